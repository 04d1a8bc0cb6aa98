"""The losslessness report: silent on honest engines, loud on a dishonest one, and calm about ties."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, check
from slipstream.decode.lossless import Difference, rounding_bound
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
