"""This machine as a card: what reading a large tensor and multiplying matrices reach here, in a second."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from slipstream.plan.cards import CPU, Card

_BYTES = 400_000_000
_SIDE = 2048
_REPEATS = 6


def measured_cpu() -> Card:
    """The best of some tries, so that other work on the machine counts little."""
    import torch

    big = torch.ones(_BYTES // 4)
    bandwidth = _BYTES / _least(lambda: big.sum())
    square = torch.randn(_SIDE, _SIDE).bfloat16()
    flops = 2 * _SIDE**3 / _least(lambda: square @ square)
    memory = psutil.virtual_memory().total / 1024**3
    threads = torch.get_num_threads()
    return Card(CPU, memory, bandwidth, flops, 0.0, f"measured now, {threads} threads", measured=True)


def _least(work: Callable[[], object]) -> float:
    """Seconds of the fastest try."""
    least = float("inf")
    for _ in range(_REPEATS):
        begun = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - begun)
    return least
