"""`slipstream bench --url` on servers of llama.cpp, with and without our drafter: same texts, real counts."""

from __future__ import annotations

from pathlib import Path

import pytest

import slipstream
from slipstream.bench.command import Wanted, run_bench
from slipstream.bench.records import read_results
from slipstream.core.command_options import BenchOptions
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.formats.export import export_drafter
from slipstream.target import model_folder
from tests.peer.engines import llama_binaries, llama_server

pytestmark = [pytest.mark.peer, pytest.mark.real]


def test_llama_cpp_by_url(tmp_path: Path) -> None:
    llama_binaries()
    session = slipstream.load("smollm2", engine_options=EngineOptions(drafts="max"))
    assert session.drafter is not None
    session.drafter.draft_vocabulary = None  # llama.cpp drafts from all tokens
    pair, out, drafts = tmp_path / "pair", tmp_path / "out.jsonl", session.drafter.config.block_size - 1
    export_drafter(session.drafter, pair, "llama.cpp", target_folder=model_folder("smollm2"), name="smollm2")
    files = pair / "target-smollm2.gguf", pair / "dflash-smollm2.gguf"
    with llama_server(files[0], None, drafts) as plain, llama_server(*files, drafts) as drafted:
        summary = run_bench(
            session,
            Wanted(urls=(plain, f"{drafted}/v1")),
            BenchOptions("chat", prompts=6, concurrency="1,2"),
            SamplingOptions(max_tokens=64),
            out,
            force=False,
            say=lambda line: None,
            progress=lambda done, total, what: None,
        )
    print([(mark.kind, mark.text) for mark in summary.marks])
    assert not [mark for mark in summary.marks if mark.kind == "stop"], "greedy texts part at ties alone"
    ours, without, theirs = (
        summary.whole(name) for name in ("drafted", *(f"url:{url[7:]}" for url in (plain, drafted)))
    )
    assert ours is not None
    assert theirs is not None
    assert without is not None
    assert ours.acceptance is not None
    assert theirs.acceptance is not None
    assert without.acceptance is None, "it has no drafter"
    print(
        f"tokens per round: Slipstream {ours.acceptance.value:.3f}, llama.cpp {theirs.acceptance.value:.3f}"
    )
    assert theirs.acceptance.value == pytest.approx(
        ours.acceptance.value, rel=0.2
    )  # their texts part at ties
    for record in read_results(out).records:
        if record.system.startswith("url:"):
            assert record.measured.cached_tokens == 0, "the prefix cache was not used"
            assert record.measured.tokens <= 64
            assert record.measured.past_end == 0
    assert {len(curve.loads) for curve in summary.curves} == {2}
