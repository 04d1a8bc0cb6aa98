"""Two processes, or accumulated batches, give the losses of one process with the same documents a step."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def run(folder: Path, out: str, processes: int, optimizer: str, accumulate: int = 1) -> list[float]:
    """Start the processes and wait; losses of all steps."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = []
    for rank in range(processes):
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
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
        command = [sys.executable, "-m", "tests.train.parallel", str(folder), out, optimizer, str(accumulate)]
        children.append(subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE))
    for child in children:
        _, error = child.communicate(timeout=180)
        assert child.returncode == 0, error.decode()[-2000:]
    losses: list[float] = json.loads((folder / out / "losses.json").read_text())
    return losses


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_two_processes_and_accumulation_equal_one_process(tmp_path: Path, optimizer: str) -> None:
    alone = run(tmp_path, "one", 1, optimizer)
    assert len(alone) == 6
    for out, processes, accumulate in (("two", 2, 1), ("accumulated", 1, 3), ("both", 2, 2)):
        assert run(tmp_path, out, processes, optimizer, accumulate) == pytest.approx(alone, abs=1e-5)
        mine, theirs = (torch.load(tmp_path / name / "weights.pt") for name in (out, "one"))
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value, atol=2e-5, rtol=1e-4)
