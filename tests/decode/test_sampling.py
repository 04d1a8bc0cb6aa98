"""Filters and choices against the oracle's own list versions, and the distribution by enumeration."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.options import SamplingOptions
from slipstream.decode.plain import next_token
from slipstream.decode.sampling import RowSettings, choose, distribution, filtered

CPU = torch.device("cpu")


def slow_filter(logits: list[float], options: SamplingOptions) -> set[int]:
    """Which tokens survive, from the definitions alone."""
    scores = [value / options.temperature for value in logits]
    kept = set(range(len(scores)))
    if options.top_k:
        kth = sorted(scores, reverse=True)[min(options.top_k, len(scores)) - 1]
        kept = {v for v in kept if scores[v] >= kth}
    if options.top_p < 1:
        mass = sum(math.exp(scores[v]) for v in kept)
        best: set[int] = set()
        for v in sorted(kept, key=lambda v: -scores[v]):
            if sum(math.exp(scores[u]) for u in best) / mass >= options.top_p:
                break
            best.add(v)
        least = min(scores[v] for v in best)
        kept = {v for v in kept if scores[v] >= least}
    if options.min_p:
        top = max(math.exp(score) for score in scores)
        kept = {v for v in kept if math.exp(scores[v]) >= options.min_p * top * (1 - 1e-9)}
    return kept


OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 3, 7, 100]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.02, 0.2]),
    seed=st.integers(0, 2**62),
)


@given(st.lists(OPTIONS, min_size=1, max_size=4), st.integers(0, 1000))
def test_filters_against_loops(rows: list[SamplingOptions], seed: int) -> None:
    logits = torch.randn(len(rows), 2, 20, generator=torch.Generator().manual_seed(seed)) * 3
    scores, short = filtered(logits, RowSettings.of(rows, 20, CPU))
    assert not short.any()
    for b, options in enumerate(rows):
        for t in range(2):
            expected = slow_filter(logits[b, t].tolist(), options)
            assert {v for v in range(20) if scores[b, t, v] > -math.inf} == expected


@given(st.lists(st.one_of(OPTIONS, st.just(SamplingOptions())), min_size=1, max_size=4), st.integers(0, 1000))
def test_choices_are_the_oracles(rows: list[SamplingOptions], seed: int) -> None:
    logits = torch.randn(len(rows), 3, 20, generator=torch.Generator().manual_seed(seed)) * 3
    position = torch.tensor([[5, 6, 7]]).expand(len(rows), -1)
    chosen = choose(logits, position, RowSettings.of(rows, 20, CPU)).ids_BT
    for b, options in enumerate(rows):
        for t in range(3):
            # A prompt of 5 + t tokens puts the choice at the same absolute position.
            assert int(chosen[b, t]) == next_token(logits[b, t].tolist(), [0] * (5 + t), [], set(), options)


def test_ties_at_the_edge_stay() -> None:
    logits = torch.tensor([[[2.0, 1.0, 1.0, 0.0]]])
    for options in (SamplingOptions(temperature=1.0, top_k=2), SamplingOptions(temperature=1.0, top_p=0.65)):
        scores, _ = filtered(logits, RowSettings.of([options], 4, CPU))
        assert (scores[0, 0] > -math.inf).tolist() == [True, True, True, False]


def test_too_few_survivors_are_reported_and_enough_are_exact() -> None:
    logits = torch.zeros(2, 1, 64)
    rows = [SamplingOptions(temperature=1.0, top_p=0.9), SamplingOptions(temperature=1.0, top_p=0.9)]
    logits[1, 0, 5] = 20.0
    settings = RowSettings.of(rows, 64, CPU)
    assert filtered(logits, settings, survivors=8)[1].tolist() == [True, False]
    scores, short = filtered(logits, settings, survivors=64)
    assert not short.any()
    assert {v for v in range(64) if scores[1, 0, v] > -math.inf} == {5}


def test_greedy_rows_ignore_filters_and_noise_of_their_mates() -> None:
    logits = torch.randn(2, 3, 30, generator=torch.Generator().manual_seed(0))
    rows = [SamplingOptions(), SamplingOptions(temperature=1.5, top_k=4, seed=9)]
    chosen = choose(logits, torch.arange(3).expand(2, -1), RowSettings.of(rows, 30, CPU)).ids_BT
    assert torch.equal(chosen[0], logits[0].argmax(-1))


@pytest.mark.parametrize(
    "options",
    [
        SamplingOptions(temperature=1.0),
        SamplingOptions(temperature=0.6),
        SamplingOptions(temperature=1.3, top_k=3),
        SamplingOptions(temperature=1.0, top_p=0.7),
        SamplingOptions(temperature=1.0, min_p=0.15),
    ],
)
def test_choices_follow_the_distribution(options: SamplingOptions) -> None:
    draws = 20_000
    logits = torch.tensor([[[1.0, 0.3, -0.5, 0.9, -2.0, 0.0]]])
    one = RowSettings.of([options], 6, CPU)
    expected = distribution(logits, one)[0][0, 0]
    assert expected.sum().item() == pytest.approx(1.0, abs=1e-5)
    position = torch.arange(draws)[None]
    counts = torch.bincount(choose(logits.expand(1, draws, 6), position, one).ids_BT[0], minlength=6)
    assert 0.5 * (counts / draws - expected).abs().sum() < 0.015


@pytest.mark.parametrize("step", [1e-9, 0.25, 1.0])
def test_a_choice_among_few_is_the_choice_among_all(step: float) -> None:
    """Where every row has a top_k only some tokens get noise; ties, as bf16 logits have them, may need
    more.
    """
    rows = [
        SamplingOptions(temperature=0.9, top_k=5, seed=1),
        SamplingOptions(temperature=1.4, top_k=40, top_p=0.8, seed=2),
        SamplingOptions(temperature=0.7, top_k=12, min_p=0.05, seed=3),
        SamplingOptions(),
    ]
    settings = RowSettings.of(rows, 600, CPU)
    assert settings.bounded
    generator = torch.Generator().manual_seed(0)
    shorts = 0
    for _ in range(60):
        logits = (torch.randn(4, 3, 600, generator=generator) * 2 / step).round() * step
        position = torch.arange(3).expand(4, -1)
        few = choose(logits, position, settings)
        every = choose(logits, position, settings, 600)
        whole = ~few.short_B
        assert torch.equal(few.ids_BT[whole], every.ids_BT[whole])
        shorts += int(few.short_B.sum())
    assert not few.short_B[3]
    assert (shorts > 0) == (step > 0.1)


@pytest.mark.parametrize("asked", ["greedy", "few", "all", "mixed"])
def test_a_choice_among_some_tokens_is_that_among_all_with_the_others_ruled_out(asked: str) -> None:
    torch.manual_seed(1)
    kinds = {
        "greedy": [SamplingOptions()] * 3,
        "few": [SamplingOptions(temperature=0.9, top_k=4, seed=n) for n in range(3)],
        "all": [SamplingOptions(temperature=1.2, top_p=0.9, seed=n) for n in range(3)],
        "mixed": [
            SamplingOptions(),
            SamplingOptions(temperature=0.7, top_k=3),
            SamplingOptions(temperature=1),
        ],
    }
    settings = RowSettings.of(kinds[asked], 40, CPU)
    ids_V = torch.tensor([0, 3, 4, 9, 11, 12, 20, 31, 32, 39])
    logits_BTV = torch.randn(3, 60, 10)
    whole_BTV = torch.full((3, 60, 40), -torch.inf).index_copy(-1, ids_V, logits_BTV)
    position_BT = torch.arange(60).expand(3, -1)
    some = choose(logits_BTV, position_BT, settings, 10, ids_V)
    assert torch.equal(some.ids_BT, choose(whole_BTV, position_BT, settings, 40).ids_BT)
    assert torch.equal(choose(logits_BTV, position_BT, settings, None, ids_V).ids_BT, some.ids_BT)
