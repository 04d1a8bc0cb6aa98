"""Several processes, with whole or split weights, and accumulated batches give the losses of one process."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin

from slipstream.core.errors import InputError
from slipstream.train.checkpoint import LAST
from slipstream.train.sharding import check_plugin

ROOT = Path(__file__).parents[2]


OPTIMIZERS = ("muon", "adamw")
Jobs = list[tuple[str, dict[str, Any]]]


def run(folder: Path, processes: int, split: bool, jobs: Jobs) -> None:
    """Start the processes, which do all jobs, and wait."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src{os.pathsep}{ROOT}"}
        if processes > 1:
            environment |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "ACCELERATE_USE_CPU": "true",
                "ACCELERATE_TORCH_BACKEND": "gloo",
            }
        if split:  # as `accelerate launch --use_fsdp --fsdp_version 2` sets it
            environment |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
        command = [sys.executable, "-m", "tests.train.parallel", str(folder), json.dumps(jobs)]
        children.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE))
    try:
        for child in children:
            _, error = child.communicate(timeout=240)
            assert child.returncode == 0, error.decode()[-2000:]
    finally:
        for child in children:
            child.kill()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs, each under its name and its optimiser's."""
    folder = tmp_path_factory.mktemp("runs")

    def jobs(**asked: dict[str, Any]) -> Jobs:
        return [
            (f"{o}-{name}", {"optimizer": o} | wishes) for o in OPTIMIZERS for name, wishes in asked.items()
        ]

    level = {"warmup": 0.0, "final_rate": 1.0}
    first, accumulate, few = level | {"max_steps": 3}, {"accumulate": 2}, {"documents": 1, "max_steps": 3}
    run(folder, 1, False, jobs(one={}, accumulated={"accumulate": 3}, few=few, whole=level, onwards=first))
    run(folder, 2, False, jobs(two={}, both=accumulate, few_two=few))
    run(folder, 2, True, jobs(split={}, split_both=accumulate, few_split=few, onwards=level, back=first))
    run(folder, 1, False, jobs(back=level))
    return folder


def assert_equal(folder: Path, out: str, other: str, steps: int) -> None:
    """Losses, held-out figures, weights and averages of two runs are the same up to rounding."""
    ours, others = (json.loads((folder / name / "sittings.json").read_text()) for name in (out, other))
    assert len(others["losses"]) == steps
    assert ours["losses"] == pytest.approx(others["losses"], abs=1e-5)
    assert ours["held_out"][-1] == pytest.approx(others["held_out"][-1], abs=1e-5)
    mine, theirs = (torch.load(folder / name / "weights.pt") for name in (out, other))
    for part in ("drafter", "average"):
        assert mine[part].keys() == theirs[part].keys()
        for name, value in theirs[part].items():
            torch.testing.assert_close(mine[part][name], value, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("out", ["two", "accumulated", "both", "split", "split_both"])
def test_processes_and_accumulation_equal_one_process(runs: Path, optimizer: str, out: str) -> None:
    assert_equal(runs, f"{optimizer}-{out}", f"{optimizer}-one", 6)


def test_split_weights_lie_on_two_processes_and_whole_ones_on_each(runs: Path) -> None:
    for out, rows in {"one": 16, "two": 16, "split": 8}.items():
        figures = json.loads((runs / f"muon-{out}" / "sittings.json").read_text())
        assert figures["rows"] == [[rows, rows]] * 6


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("out", ["onwards", "back"])
def test_a_run_goes_on_with_another_number_of_processes(runs: Path, optimizer: str, out: str) -> None:
    assert_equal(runs, f"{optimizer}-{out}", f"{optimizer}-whole", 6)
    mine, theirs = (torch.load(runs / f"{optimizer}-{name}" / LAST) for name in (out, "whole"))
    assert mine.keys() == theirs.keys()
    for one, other in zip(mine["optimizers"], theirs["optimizers"], strict=True):
        assert one["state"].keys() == other["state"].keys()
        for number, state in other["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(one["state"][number][name], value, atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("out", ["few_two", "few_split"])
def test_a_process_with_nothing_to_do_takes_part(runs: Path, optimizer: str, out: str) -> None:
    assert_equal(runs, f"{optimizer}-{out}", f"{optimizer}-few", 3)


def test_settings_of_fsdp_that_are_not_followed_are_refused() -> None:
    check_plugin(FullyShardedDataParallelPlugin(fsdp_version=2))
    for settings, name in (
        ({"fsdp_version": 1}, "fsdp_version 2"),
        ({"fsdp_version": 2, "cpu_offload": True}, "fsdp_offload_params"),
        ({"fsdp_version": 2, "activation_checkpointing": True}, "fsdp_activation_checkpointing"),
    ):
        with pytest.raises(InputError, match=name):
            check_plugin(FullyShardedDataParallelPlugin(**settings))
