"""Acceptors against loops, and the distribution of what they emit by enumeration of a small vocabulary."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from slipstream.core.options import SamplingOptions
from slipstream.decode.accept import Proposal, match, reject
from slipstream.decode.propose import make_chooser
from slipstream.decode.sampling import RowSettings, choose, distribution

CPU = torch.device("cpu")


def test_match_against_a_loop_over_all_small_cases() -> None:
    rows = list(product(range(2), repeat=7))
    drafts = torch.tensor([row[:3] for row in rows])
    choices = torch.tensor([row[3:] for row in rows])
    verdict = match(Proposal(drafts), choices)
    for number, row in enumerate(rows):
        kept = 0
        while kept < 3 and row[kept] == row[3 + kept]:
            kept += 1
        assert verdict.emitted_B[number] == kept + 1
        assert verdict.tokens_BT[number, : kept + 1].tolist() == list(row[3 : 4 + kept])
    assert match(Proposal(drafts, offered=False), choices).emitted_B.eq(1).all()


def test_reject_without_drafts_draws_from_p() -> None:
    p = torch.tensor([0.5, 0.3, 0.2]).expand(20_000, 1, 3)
    seeds = torch.arange(20_000)
    verdict = reject(
        Proposal(torch.empty(20_000, 0, dtype=torch.int64)), p, seeds, torch.full((20_000, 1), 4)
    )
    counts = torch.bincount(verdict.tokens_BT[:, 0], minlength=3) / 20_000
    assert (counts - p[0, 0]).abs().max() < 0.015


def test_reject_of_greedy_rows_is_match() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, 4, 3, generator=generator)
    drafts = torch.randint(0, 3, (50, 3), generator=generator)
    settings = RowSettings.of([SamplingOptions()] * 50, 3, CPU)
    p, _ = distribution(logits, settings)
    position = torch.arange(1, 5).expand(50, -1)
    rejected = reject(Proposal(drafts), p, settings.seed_B, position)
    matched = match(Proposal(drafts), logits.argmax(-1))
    assert torch.equal(rejected.emitted_B, matched.emitted_B)
    for b in range(50):
        n = int(matched.emitted_B[b])
        assert torch.equal(rejected.tokens_BT[b, :n], matched.tokens_BT[b, :n])


FILTERS = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.4, "top_k": 3},
    {"temperature": 1.0, "top_p": 0.75},
    {"temperature": 1.0, "min_p": 0.2},
]


@pytest.mark.parametrize("filters", FILTERS)
@pytest.mark.parametrize(
    ("acceptor", "drafts"), [("match", "argmax"), ("match", "coupled"), ("reject", "coupled")]
)
def test_two_tokens_are_distributed_as_the_target_says(
    acceptor: str, drafts: str, filters: dict[str, float]
) -> None:
    """Target and drafter are Markov chains over five tokens; all pairs of next tokens are enumerated."""
    vocab, draws = 5, 40_000
    generator = torch.Generator().manual_seed(1)
    chain = torch.randn(vocab, vocab, generator=generator) * 0.7
    draft_chain = chain + 0.4 * torch.randn(vocab, vocab, generator=generator)
    options = SamplingOptions(**filters)  # type: ignore[arg-type]
    settings = RowSettings.of([SamplingOptions(**filters, seed=n) for n in range(draws)], vocab, CPU)  # type: ignore[arg-type]
    anchor, start = 2, 7
    position = torch.arange(start + 1, start + 4).expand(draws, -1)
    # The drafter does not see its own drafts: each slot guesses from the anchor's row of its chain.
    draft_logits = torch.stack([draft_chain[anchor], draft_chain.mean(0)]).expand(draws, -1, -1)
    proposal = make_chooser(settings, acceptor, drafts, draft_logits.shape[-1])(
        draft_logits, position[:, :2], None
    )
    inputs = torch.cat([torch.full((draws, 1), anchor), proposal.drafts_BK], dim=1)
    logits = chain[inputs]
    if acceptor == "match":
        verdict = match(proposal, choose(logits, position, settings).ids_BT)
    else:
        verdict = reject(proposal, distribution(logits, settings)[0], settings.seed_B, position)
    first = verdict.tokens_BT[:, 0]
    # Rows that emitted one token go on with a plain choice, as a next round would.
    plain = choose(chain[first][:, None], position[:, 1:2], settings).ids_BT[:, 0]
    second = torch.where(verdict.emitted_B > 1, verdict.tokens_BT[:, 1], plain)
    counts = torch.bincount(first * vocab + second, minlength=vocab * vocab).view(vocab, vocab) / draws
    one = RowSettings.of([options], vocab, CPU)
    p_first = distribution(chain[anchor][None, None], one)[0][0, 0]
    p_second = distribution(chain[None], one)[0][0]
    expected = p_first[:, None] * p_second
    assert 0.5 * (counts - expected).abs().sum() < 0.02
    assert (verdict.emitted_B > 1).any()
    assert (verdict.emitted_B == 1).any()


def test_coupled_drafts_agree_more_often_than_independent_ones() -> None:
    vocab, draws = 8, 20_000
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(vocab, generator=generator)
    drafter = target + 0.5 * torch.randn(vocab, generator=generator)
    settings = RowSettings.of([SamplingOptions(temperature=1.0, seed=n) for n in range(draws)], vocab, CPU)
    position = torch.full((draws, 2), 3)
    logits = torch.stack([target, target]).expand(draws, -1, -1)
    choices = choose(logits, position, settings).ids_BT
    kept = {}
    for drafts in ("coupled", "argmax"):
        proposal = make_chooser(settings, "match", drafts, drafter.shape[-1])(
            drafter.expand(draws, 1, -1), position[:, :1], None
        )
        kept[drafts] = (match(proposal, choices).emitted_B - 1).float().mean()
    p, q = target.softmax(-1), drafter.softmax(-1)
    distance = 0.5 * (p - q).abs().sum()
    # Daliri, Musco, Suresh, arXiv 2408.07978: agreement at least (1 - TV) / (1 + TV).
    assert kept["coupled"] > (1 - distance) / (1 + distance) - 0.01
    assert kept["coupled"] > kept["argmax"]
