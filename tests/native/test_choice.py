"""Contenders: the choice among them is the choice among all, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.core.options import SamplingOptions
from slipstream.decode.noise import gumbel, key
from slipstream.decode.sampling import RowSettings, choose
from slipstream.native import Kernels, contenders

CPU = torch.device("cpu")


def sums(scores: Tensor, seed: Tensor, position: Tensor, ids: Tensor | None) -> Tensor:
    """Score and noise of every token, in float64, in a loop."""
    out = torch.empty(scores.shape, dtype=torch.float64)
    for b in range(scores.shape[0]):
        for t in range(scores.shape[1]):
            for v in range(scores.shape[2]):
                token = torch.tensor([[[v if ids is None else int(ids[v])]]])
                out[b, t, v] = scores[b, t, v] + gumbel(
                    seed[b : b + 1], position[b : b + 1, t : t + 1], token
                )
    return out


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
def test_contenders_hold_the_best_and_only_what_comes_close(
    kernels: Kernels, spread: float, named: bool
) -> None:
    torch.manual_seed(int(spread * 10))
    scores = torch.randn(2, 3, 1500) * spread
    scores[1, 2, 40:] = -torch.inf
    seed, position = torch.tensor([3, 2**61]), torch.tensor([[7, 8, 9], [1, 2, 3]])
    ids = torch.randperm(49152)[:1500] if named else None
    places = contenders(kernels, scores, key(seed, position), ids)
    assert places is not None
    assert torch.equal(places, places.sort(-1).values)
    all_sums = sums(scores, seed, position, ids)
    best = all_sums.amax(-1, keepdim=True)
    assert (places == all_sums.argmax(-1, keepdim=True)).any(-1).all()
    assert (all_sums.gather(-1, places) > best - 1e-3).all()


def test_equal_scores_beyond_what_is_told_apart_are_left_to_all(kernels: Kernels) -> None:
    # Whoever is this much larger wins by rounding alone: the noise is lost in a sum of 1e12.
    scores = torch.full((1, 2, 50), 1e12)
    assert contenders(kernels, scores, key(torch.tensor([1]), torch.tensor([[4, 5]])), None) is None
    assert (
        contenders(kernels, scores * torch.nan, key(torch.tensor([1]), torch.tensor([[4, 5]])), None) is None
    )


FILTERED = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.0, 0.01, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 0, 5]),
    top_p=st.sampled_from([1.0, 1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    seed=st.integers(0, 2**62),
)


@settings(deadline=None)
@given(
    rows=st.lists(FILTERED, min_size=1, max_size=4),
    seed=st.integers(0, 1000),
    step=st.sampled_from([0.0, 0.25, 2.0]),
    named=st.booleans(),
)
def test_choices_are_those_without_kernels(
    kernels: Kernels, rows: list[SamplingOptions], seed: int, step: float, named: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), 3, 3000, generator=generator) * 3
    if step:  # bf16 logits tie often
        logits = (logits / step).round() * step
    ids = torch.randperm(49152, generator=generator)[:3000].sort().values if named else None
    position = torch.tensor([[5, 6, 700]]).expand(len(rows), -1)
    chosen = [
        choose(logits, position, RowSettings.of(rows, 3000, CPU, which), None, ids)
        for which in (kernels, None)
    ]
    assert torch.equal(chosen[0].ids_BT, chosen[1].ids_BT)
    assert torch.equal(chosen[0].short_B, chosen[1].short_B)


def test_threads_do_not_matter(kernels: Kernels) -> None:
    before = torch.get_num_threads()
    logits = torch.randn(5, 4, 2000, generator=torch.Generator().manual_seed(2)) * 2
    rows = [replace(SamplingOptions(temperature=0.9), seed=n) for n in range(5)]
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            position = torch.arange(4).expand(5, -1)
            found.append(choose(logits, position, RowSettings.of(rows, 2000, CPU, kernels)).ids_BT)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
