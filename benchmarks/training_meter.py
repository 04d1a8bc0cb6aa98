"""What every contender of `training.py` measures about itself; only the standard library is needed."""

from __future__ import annotations

import json
import resource
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

_STATUS = Path("/proc/self/status")


def peak_bytes() -> int:
    """Most memory this process has held: VmHWM, or ru_maxrss where there is no /proc.

    VmHWM first, because ru_maxrss of a child begins with what its parent held at the fork.
    """
    if _STATUS.exists():
        return _status_bytes("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def mapped_bytes() -> int:
    """The part of the memory held now that is pages of files, which can be taken back; 0 if unknown."""
    return _status_bytes("RssFile") if _STATUS.exists() else 0


def _status_bytes(name: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class Meter:
    """Clock readings between steps and the memory around them.

    Args:
        skipped: first steps that are not counted.
        steps: steps that are.
    """

    def __init__(self, skipped: int, steps: int) -> None:
        self._first, self._last = skipped, skipped + steps
        self._marks: list[tuple[float, float]] = []
        self._peak = 0
        self.before = peak_bytes()

    def mark(self) -> None:
        """Call once before the first step and after each one."""
        self._marks.append((time.perf_counter(), time.process_time()))
        if len(self._marks) == self._last + 1:
            self._peak = peak_bytes()

    def print(self, tokens: list[int], blocks: list[int], **about: Any) -> None:
        """One JSON line; the figures of all steps are given, those that count are taken from them."""
        counted = slice(self._first, self._last)
        wall, cpu = zip(*self._marks, strict=True)
        steps = [b - a for a, b in pairwise(wall)][counted]
        result = {
            **about,
            "steps": len(steps),
            "step_seconds": [round(s, 4) for s in steps],
            "seconds": sum(steps),
            "cpu_seconds": cpu[self._last] - cpu[self._first],
            "tokens": sum(tokens[counted]),
            "blocks": sum(blocks[counted]),
            "before_bytes": self.before,
            "peak_bytes": self._peak,
            "mapped_bytes": mapped_bytes(),
        }
        print(json.dumps(result), flush=True)
