"""The losslessness report: silent on honest engines, loud on a dishonest one, and calm about ties."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, check
from slipstream.decode.lossless import Difference, _explain, rounding_bound
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.testing import tiny_target

REQUESTS = [
    Request((5, 6), SamplingOptions(max_tokens=20)),
    Request((9,), SamplingOptions(max_tokens=20, temperature=0.8, seed=3)),
]


@pytest.fixture
def pair() -> tuple[Target, DraftProposer]:
    target = tiny_target()
    torch.manual_seed(0)
    drafter = Drafter(DraftConfig.for_target(target.info, num_layers=1, block_size=4, num_taps=1))
    return target, DraftProposer(target, drafter.eval())


def test_an_honest_engine_is_exact(pair: tuple[Target, DraftProposer]) -> None:
    seen = []
    report = check(*pair, REQUESTS, report=lambda number, request: seen.append((number, request)))
    assert report.exact
    assert report.ties == 0
    assert report.dtype == "float32"
    assert report.block_size == 4
    assert [number for number, _ in seen] == [0, 1]
    assert tuple(request for _, request in seen) == report.requests
    assert all(request.same_shape is None and request.one_row is None for request in report.requests)


def test_a_target_that_depends_on_the_drafts_is_found_out(
    pair: tuple[Target, DraftProposer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if a mask let a slot see the drafts behind it."""
    target, proposer = pair
    verify = target.verify

    def leaky(ids: torch.Tensor, start: torch.Tensor, *rest: object) -> object:
        verified = verify(ids, start, *rest)  # type: ignore[arg-type]
        if ids.shape[1] > 1 and int(ids[0, -1]) % 3 == 0:
            verified.logits_BTV[:, 0, 7] += 100
        return verified

    monkeypatch.setattr(target, "verify", leaky)
    report = check(target, proposer, REQUESTS[:1])
    assert not report.exact
    found = report.requests[0].one_row
    assert found is not None
    assert not found.is_tie
    assert found.gap > found.bound


def test_a_gap_within_rounding_is_a_tie(pair: tuple[Target, DraftProposer]) -> None:
    bound = rounding_bound(pair[0], torch.tensor([20.0, -3.0]))
    assert 0 < bound < 0.01
    assert Difference(3, 1, 2, gap=bound / 2, bound=bound).is_tie
    assert not Difference(3, 1, 2, gap=bound * 2, bound=bound).is_tie


def explain(
    target: Target, logits: dict[int, float], chosen: int, other: int, bound: float = 0.01, **options: object
) -> tuple[float, bool]:
    """What the report says where all but a few logits are far below; temperature and noise differ by case."""
    logits_V = torch.full((target.info.vocab_size,), -50.0)
    for token, value in logits.items():
        logits_V[token] = value
    request = Request((5,), SamplingOptions(**{"max_tokens": 20, **options}))  # type: ignore[arg-type]
    return _explain(target, request, [], logits_V, chosen, other, bound)


def test_end_tokens_count_where_they_are_ignored(pair: tuple[Target, DraftProposer]) -> None:
    """min_tokens bans the end tokens of a request, and one that ignores the end has none."""
    close = {0: 5.0, 3: 4.995}
    assert explain(pair[0], close, 0, 3, min_tokens=5, ignore_eos=True)[0] == pytest.approx(0.005, abs=1e-5)
    assert explain(pair[0], close, 3, 0, min_tokens=5)[0] == float("inf")


def test_a_gap_counts_whichever_way_it_points(pair: tuple[Target, DraftProposer]) -> None:
    """One-row scores that prefer the drafted token contradict one-row decoding; that is no tie."""
    for chosen, other in ((1, 2), (2, 1)):
        assert explain(pair[0], {1: 3.0, 2: 1.0}, chosen, other) == (2.0, False)


FILTERS = [
    # All but the edges are alike: token 1 is sure, 2 sits just inside the filter, 3 just outside.
    ({1: 3.0, 2: 1.001, 3: 1.0}, {"top_k": 2}),
    ({1: 3.0, 2: 3.0 - 1.608, 3: 3.0 - 1.611}, {"min_p": 0.2}),
    # Mass before token 2 is e^3 / (e^3 + 2e) = 0.787, before token 3 0.893.
    ({1: 3.0, 2: 1.001, 3: 1.0}, {"top_p": 0.8}),
]


@pytest.mark.parametrize(("logits", "options"), FILTERS)
def test_a_token_at_a_filters_border_may_come_or_go(
    pair: tuple[Target, DraftProposer], logits: dict[int, float], options: dict[str, float]
) -> None:
    seeds = range(40)
    lost = [explain(pair[0], logits, 2, 1, temperature=1.0, seed=seed, **options) for seed in seeds]
    come = [explain(pair[0], logits, 1, 3, temperature=1.0, seed=seed, **options) for seed in seeds]
    far = [explain(pair[0], logits, 2, 1, 1e-5, temperature=1.0, seed=seed, **options) for seed in seeds]
    none = [explain(pair[0], logits, 1, 3, 1e-5, temperature=1.0, seed=seed, **options) for seed in seeds]
    # Noise decides which of two tokens wins; where it is the chosen one, the border alone explains its loss.
    assert any(at_filter and gap > 0.01 for gap, at_filter in lost)
    assert any(at_filter for _, at_filter in come)
    assert not any(at_filter for _, at_filter in far)
    assert none == [(float("inf"), False)] * len(none)


def test_a_wrong_filter_is_no_tie(pair: tuple[Target, DraftProposer]) -> None:
    """A token far outside the filter has a higher perturbed score now and then; that excuses nothing."""
    logits = {1: 3.0, 2: 2.0, 3: 1.0, 4: 0.0}
    for options in ({"top_k": 2}, {"top_p": 0.7}, {"min_p": 0.3}):
        for seed in range(40):
            gap, at_filter = explain(pair[0], logits, 1, 4, temperature=1.0, seed=seed, **options)
            assert gap == float("inf")
            assert not at_filter
