"""The script for CUDA cards, dry: every section runs, and the forced drafts are as right as they say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu.py"


def test_every_section_runs_without_a_card(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    command = [sys.executable, str(SCRIPT), "--dry", "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert found["card"].startswith("none")
    assert [name for name, section in found.items() if "failed" in str(section)] == []
    assert {dtype: verdict["exact"] for dtype, verdict in found["equality"].items()} == {
        "float32": True,
        "bfloat16": True,
    }
    assert len(found["captured rounds"]) == 6
    for verdict in found["captured rounds"].values():
        assert all(verdict["same"].values())
        # On the CPU a tape stands for the graphs.
        assert "run as they are" not in verdict["graphs"]
    for row in found["rounds"]:
        assert row["plain_eager_round_ms"] > 0
        # All rounds but the last are full.
        assert row["right"] + 1 >= row["acceptance_length"] == pytest.approx(row["right"] + 1, rel=0.1)
