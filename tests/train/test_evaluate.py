"""Acceptance by workload is that of the bundled prompts, decoded one by one; the target stays as it was."""

from __future__ import annotations

import pytest

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.data.bundled import BUNDLED, bundled_turns
from slipstream.data.make import renderer_for
from slipstream.decode import Engine
from slipstream.decode.propose import DraftProposer
from slipstream.formats import read_zlab
from slipstream.target import load_target
from slipstream.train.evaluate import acceptance_by_workload
from tests.tiny import save_drafter, save_target


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    folder = save_target(tmp_path_factory.mktemp("models") / "target")
    return load_target(str(folder)), read_zlab(save_drafter(folder.parent / "drafter", folder))


def test_workloads_are_decoded_and_told_apart(pair) -> None:
    target, drafter = pair
    target.set_taps((1,))
    renderer = renderer_for(target, None)
    found = acceptance_by_workload(target, drafter, renderer, 5, max_tokens=12)
    assert target.tap_ids == (1,)
    expected = {}
    for workload in BUNDLED:
        prompts = [
            renderer.prompt_ids([{"role": "user", "content": turns[0]}])
            for _, turns in bundled_turns(workload)[:5]
        ]
        fitting = [ids for ids in prompts if len(ids) + 12 <= 512]
        if not fitting or workload == "multiturn":
            continue
        engine = Engine(target, DraftProposer(target, drafter.eval()), EngineOptions(drafts="max"))
        done = [engine.generate([Request(ids, SamplingOptions(max_tokens=12))])[0] for ids in fitting]
        expected[workload] = sum(c.emitted_in_rounds for c in done) / sum(c.rounds for c in done)
    assert "chat" in expected
    assert set(expected) < set(BUNDLED), "prompts that do not fit are left out"
    assert found == pytest.approx(expected)


def test_no_prompt_fits(pair) -> None:
    target, drafter = pair
    assert acceptance_by_workload(target, drafter, renderer_for(target, None), 1, max_tokens=500) == {}
