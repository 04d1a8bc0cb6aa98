"""The bundled model, two prompts: four systems say the same up to ties."""

import pytest

from slipstream.api import load
from slipstream.bench.command import Wanted, run_bench
from slipstream.core.command_options import BenchOptions
from slipstream.core.options import SamplingOptions


@pytest.mark.real
def test_four_systems_on_the_bundled_model(tmp_path):
    options = BenchOptions("chat,extraction", prompts=1, systems="plain,drafted,lookup,transformers")
    summary = run_bench(
        *(load("smollm2"), Wanted(), options, SamplingOptions(max_tokens=16), tmp_path / "out.jsonl", False),
        *(lambda line: None, lambda done, total, what: None),
    )
    assert [mark.text for mark in summary.marks if mark.kind == "stop"] == []
    assert [summary.whole(side.name).different for side in summary.sides] == [0] * 4
    assert summary.whole("drafted").acceptance.value >= 1
