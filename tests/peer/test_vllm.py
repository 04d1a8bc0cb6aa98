"""vLLM for CPUs runs our exports, in both layouts that it loads, as we run the drafter."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import slipstream
from slipstream.api import Session
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.formats.export import export_drafter
from slipstream.target import model_folder
from tests.peer.engines import PROMPTS, ROOT, TOKENS, Tally, need

pytestmark = [pytest.mark.peer, pytest.mark.real]


@pytest.fixture(scope="module")
def session() -> Session:
    session = slipstream.load("smollm2", engine_options=EngineOptions(drafts="max"))
    assert session.drafter is not None
    session.drafter.draft_vocabulary = None  # vLLM drafts from all tokens
    return session


@pytest.fixture(scope="module")
def mine(session: Session) -> Tally:
    done = [session.generate(prompt, SamplingOptions(max_tokens=TOKENS)) for prompt in PROMPTS]
    rounds = sum(one.rounds for one in done)
    by_position = np.sum([one.accepted_per_position for one in done], axis=0) / rounds
    return Tally(sum(one.completion_tokens - 1 for one in done), rounds, tuple(by_position.tolist()))


@pytest.mark.parametrize("layout", ["zlab", "speculators"])
def test_acceptance_is_ours_within_five_percent(
    layout: Literal["zlab", "speculators"], session: Session, mine: Tally, tmp_path: Path
) -> None:
    python = need("vllm", "bin", "python")
    assert session.drafter is not None
    export_drafter(session.drafter, tmp_path / "out", "vllm", layout=layout)
    script = ROOT / "benchmarks" / "peers" / "run_vllm.py"
    drafts = session.drafter.config.block_size - 1
    words = [python, script, model_folder("smollm2"), tmp_path / "out", drafts, TOKENS]
    run = subprocess.run(
        list(map(str, words)),
        input=json.dumps([session.encode(prompt) for prompt in PROMPTS]),
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    # Its rounds count drafts past the end of a text (vllm#56101); ours do not.
    theirs = 1 + found["accepted"] / found["rounds"]
    print(f"\n{layout}: tokens per round: Slipstream {mine.acceptance:.3f}, vLLM {theirs:.3f}")
    for name, shares in (("Slipstream", mine.by_position), ("vLLM", found["by_position"])):
        print(f"{name} by position: " + " ".join(f"{share:.2f}" for share in shares))
    assert abs(theirs / mine.acceptance - 1) < 0.05
