"""What a round holds is what is planned for it, as PyTorch's allocator saw it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.footprint import ANYTHING, Demands
from slipstream.decode.graphs import Graphs
from slipstream.decode.round import Batch, Said, run_round
from slipstream.decode.sampling import RowSettings, choose
from slipstream.model import DraftConfig, Drafter
from slipstream.tape import TapeRecorder
from slipstream.target import Target, memory
from slipstream.testing import tiny_config, tiny_target

VOCAB, ROWS, SLOTS = 1 << 14, 3, 6
#: Bytes of the logits of a block.
UNIT = ROWS * SLOTS * VOCAB * 4


class Permissive:
    """A grammar that all texts follow."""

    def mask(self) -> bytes:
        return b"\xff" * (VOCAB // 8)

    def accept(self, token: int) -> bool:
        return True

    def back(self, count: int) -> None:
        pass


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tiny_config(VOCAB))


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    return Drafter(DraftConfig.for_target(target.info, num_layers=1, block_size=SLOTS, num_taps=2)).eval()


def most_held(work: Callable[[], Any], trace: Path) -> float:
    """Most bytes that were held at once by what the work allocated, in units."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    profiler.export_chrome_trace(str(trace))
    events = [one for one in json.loads(trace.read_text())["traceEvents"] if one.get("name") == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda one: one["ts"]):
        held += event["args"]["Bytes"]
        most = max(most, held)
    return most / UNIT


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "few": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    "drawn": {"temperature": 1.0},
    "filtered": {"temperature": 1.0, "top_p": 0.9, "min_p": 0.1, "min_tokens": 2},
    "biased": {"logit_bias": {3: 1.0}},
    "penalties": {"frequency_penalty": 0.5},
    "everything": {"temperature": 1.0, "repetition_penalty": 1.1, "logit_bias": {3: 1.0}, "min_p": 0.1},
}


@pytest.mark.parametrize("extra", ["", "grammar", "logprobs", "reject", "no drafts"])
@pytest.mark.parametrize("case", CASES)
def test_a_round_holds_what_is_planned(
    target: Target, drafter: Drafter, case: str, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[float] = []

    def prepare(self: Graphs, batch: Batch, visible: int) -> Callable[[], Said]:
        said: list[Said] = []
        work = lambda: said.append(run_round(batch, visible))  # noqa: E731
        return lambda: (found.append(most_held(work, tmp_path / "trace.json")), said[0])[1]

    monkeypatch.setattr(Graphs, "prepare", prepare)
    requests = [
        Request(
            (1, 2, 3 + row),
            SamplingOptions(max_tokens=3, ignore_eos=True, seed=row, **CASES[case]),
            grammar=Permissive if extra == "grammar" else None,
            logprobs=2 if extra == "logprobs" else None,
        )
        for row in range(ROWS)
    ]
    acceptor = "reject" if extra == "reject" else "match"
    proposer = None if extra == "no drafts" else DraftProposer(target, drafter)
    Engine(target, proposer, EngineOptions(drafts="max", acceptor=acceptor)).generate(requests)
    slots = 1 if extra == "no drafts" else SLOTS
    planned = Demands.of(requests).round_bytes(ROWS, slots, VOCAB, acceptor) / UNIT
    assert max(found) < planned + 0.15  # beside logits: states, features, keys of the noise
    assert planned < 1.35 * max(found) + 1
    assert planned <= ANYTHING.round_bytes(ROWS, slots, VOCAB, acceptor) / UNIT


def test_a_choice_among_all_tokens_made_again_stays_within(tmp_path: Path) -> None:
    options = [SamplingOptions(temperature=1.0, top_p=0.9999)] * ROWS
    settings = RowSettings.of(options, VOCAB, torch.device("cpu"))
    logits_BTV = torch.randn(ROWS, SLOTS, VOCAB)
    position_BT = torch.arange(SLOTS).expand(ROWS, SLOTS)
    held = most_held(lambda: choose(logits_BTV, position_BT, settings, VOCAB), tmp_path / "trace.json")
    planned = Demands.of([Request((1,), options[0])]).round_bytes(ROWS, SLOTS, VOCAB, "match") / UNIT
    assert held < planned


def test_captured_rounds_are_planned_beside_those_that_run_as_they_are(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pool keeps its memory while other rounds run: the two are named apart."""
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    said = {}
    for name, recorder in (("off", None), ("on", TapeRecorder())):
        engine = Engine(target, DraftProposer(target, drafter), EngineOptions(max_rows=ROWS), recorder)
        with pytest.raises(InputError) as error:
            engine.open()
        said[name] = str(error.value)
    assert "for a round" in said["off"]
    assert "captured" not in said["off"]
    assert "for a round" in said["on"]
    assert "for captured rounds" in said["on"]


def test_a_call_that_demands_more_of_the_same_buffers_is_planned_anew(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(target, DraftProposer(target, drafter))
    greedy, drawn = (
        Request((1, 2, 3), SamplingOptions(max_tokens=3, temperature=value)) for value in (0.0, 1.0)
    )
    engine.generate([greedy])
    monkeypatch.setattr(memory, "free_memory", lambda device: 1)
    engine.generate([greedy])
    with pytest.raises(InputError, match="for a round"):
        engine.generate([drawn])
