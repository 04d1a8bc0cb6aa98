"""What the parts of a round take: target passes, a draft, whole rounds; by compiled kernels and by PyTorch.

Interleaved in one process, so that ratios hold while the machine does other things; the least of many times
is printed beside the median, as nothing makes a pass too fast. With it two floors: the time that reading the
weights alone takes, at the rate at which this machine sums a large tensor, and the time that the products of
16 tokens take, at the rate at which its cores multiply out of registers (`peak.cpp`).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from slipstream import EngineOptions, SamplingOptions, TargetOptions, load
from slipstream.api import Session
from slipstream.core.errors import InputError
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.rows import Rows
from slipstream.native.build import compiled
from slipstream.target import Target
from slipstream.target.load import model_folder
from slipstream.target.memory import weight_bytes


def main() -> None:
    """Print a table, or one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("--context", type=int, default=200, help="tokens before the pass")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    works: dict[str, Callable[[], object]] = {}
    for kernels in ("native", "torch"):
        session = load(options.target, target_options=TargetOptions(kernels=kernels))
        for tokens in (1, 2, 4, 8, 16, 32):
            works[f"{kernels} target, {tokens} tokens"] = _pass(session.target, tokens, options.context)
        for drafts in (0, 3, 7):
            works[f"{kernels} round, {drafts} drafts"] = _round(session, drafts, options.context)
        works[f"{kernels} draft of 7"] = _draft(session, options.context)
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(options.repeat):
        for name, work in works.items():
            begun = time.perf_counter()
            work()
            times[name].append((time.perf_counter() - begun) * 1e3)
    rate = _bytes_per_second()
    weights = weight_bytes(model_folder(options.target), session.target.dtype)
    found = {name: (min(all_), statistics.median(all_)) for name, all_ in times.items()}
    floor = weights / rate * 1e3
    peak = _products_per_second(session.target.dtype)
    # Two operations a weight and token; an embedding that the head does not share is looked up only.
    busy = 32 * weights / session.target.dtype.itemsize / peak * 1e3 if peak else None
    if options.json:
        floors = {"weights_floor_ms": floor, "products_floor_16_tokens_ms": busy}
        print(json.dumps({"ms": found, **floors, "gigabytes_per_s": rate / 1e9, "flop_per_s": peak}))
        return
    print(f"weights {weights / 1e6:.0f} MB, {rate / 1e9:.1f} GB/s: {floor:.1f} ms")
    if busy is not None:
        print(f"products of 16 tokens, {peak / 1e9:.0f} GFLOP/s: {busy:.1f} ms")
    for name, (least, median) in found.items():
        print(f"{name:28} least {least:6.2f} ms, median {median:6.2f} ms")


def _pass(target: Target, tokens: int, context: int) -> Callable[[], object]:
    """A verify pass, head on every token."""
    ids_BT, start_B = torch.full((1, tokens), 100), torch.tensor([context])
    visible = -(-(context + tokens) // 64) * 64
    cache = target.new_cache(1, max(512, visible))
    return lambda: target.verify(ids_BT, start_B, cache, visible)


def _round(session: Session, drafts: int, context: int) -> Callable[[], object]:
    """A whole round of one request, host work included."""
    assert session.drafter is not None
    options = EngineOptions(drafts=drafts)
    engine = Engine(session.target, DraftProposer(session.target, session.drafter), options)
    rows: list[Rows] = []

    def work() -> None:
        if not rows or not rows[0].busy:
            rows[:] = [engine.open(1)]
            rows[0].submit(Request((100,) * context, SamplingOptions(max_tokens=128, ignore_eos=True)))
            while not rows[0].step():
                pass
        rows[0].step()

    return work


def _draft(session: Session, context: int) -> Callable[[], object]:
    """A draft alone, with greedy choices."""
    from slipstream.decode.propose import make_chooser
    from slipstream.decode.sampling import RowSettings

    target = session.target
    assert session.drafter is not None
    proposer = DraftProposer(target, session.drafter)
    visible = -(-(context + 8) // 64) * 64
    proposer.begin(1, max(512, visible))
    features = torch.zeros(1, context, session.drafter.config.feature_width, dtype=target.dtype)
    proposer.admit(features, torch.tensor([0]), torch.tensor([0]), context)
    settings = RowSettings.of([SamplingOptions()], target.info.vocab_size, target.device)
    chooser = make_chooser(settings, "match", "argmax", target.info.vocab_size)
    anchor_B, length_B = torch.tensor([100]), torch.tensor([context])
    return lambda: proposer.propose(anchor_B, length_B, 7, visible, chooser)


def _bytes_per_second() -> float:
    """The best rate of summing 400 MB."""
    big = torch.ones(100_000_000)
    best = 0.0
    for _ in range(8):
        begun = time.perf_counter()
        big.sum()
        best = max(best, big.numel() * 4 / (time.perf_counter() - begun))
    return best


def _products_per_second(dtype: torch.dtype) -> float:
    """The best rate of operations out of registers, all threads; 0 where there are no kernels."""
    try:
        peak = compiled(Path(__file__).with_name("peak.cpp"), dtype).slipstream_peak
    except InputError:
        return 0.0
    peak.restype = ctypes.c_double
    return max(peak(torch.get_num_threads(), ctypes.c_long(20_000_000)) for _ in range(8))


if __name__ == "__main__":
    main()
