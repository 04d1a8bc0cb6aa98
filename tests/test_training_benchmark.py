"""The arithmetic of `benchmarks/training.py`; its runs are started by hand."""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PATH = Path(__file__).parent.parent / "benchmarks" / "training.py"
_SPEC = importlib.util.spec_from_file_location("training_benchmark", _PATH)
training = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(training)


def run_of(seconds: float, peak: int) -> dict:
    return {
        "steps": 2,
        "seconds": seconds,
        "cpu_seconds": seconds / 2,
        "tokens": 100,
        "blocks": 10,
        "before_bytes": 2**20,
        "peak_bytes": peak * 2**20,
        "mapped_bytes": 0,
    }


def test_a_summary_takes_medians_and_the_highest_memory():
    total = training.summary([run_of(1.0, 5), run_of(2.0, 9), run_of(10.0, 3)])
    assert total["seconds_per_step"] == 1.0
    assert total["tokens_per_second"] == 50.0
    assert total["blocks_per_cpu_second"] == 10.0
    assert (total["peak_mib"], total["above_start_mib"]) == (9, 8)


def test_ratios_are_of_the_pairs_that_ran():
    first, second = training.PAIRS[0]
    found = training.ratios(
        {first: training.summary([run_of(1.0, 5)]), second: training.summary([run_of(3.0, 9)])}
    )
    assert len(found) == 1
    assert found[0]["tokens_per_second"] == 3.0
    assert found[0]["memory"] == 0.5


def test_the_peers_row_holds_a_steps_mean_number_of_tokens():
    assert training.row_tokens(tokens=29_300, chats=100, documents=16) == 4736
    assert training.row_tokens(tokens=640, chats=10, documents=1) == 64
