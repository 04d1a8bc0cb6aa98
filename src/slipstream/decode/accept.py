"""Which drafts stay: `match` against the target's own choices, or `reject` by p/q; pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.decode.noise import ACCEPT, RESIDUAL, gumbel, uniform

#: Rows, a slot, and the tokens that each row may take there, [rows, V], to other drafts for that slot.
Again = Callable[[Sequence[int], int, Tensor], list[int]]


@dataclass(frozen=True)
class Proposal:
    """What a proposer offers for one round.

    Attributes:
        drafts_BK: one token per draft slot.
        q_BKV: the distribution each draft was drawn from; needed by `reject` only.
        offered: False has the target verify the drafts but keep none, which is plain decoding with the
            shapes of drafted decoding.
        again: chooses drafts again among some tokens; None where there are no logits to choose by.
        most_B: tokens that a row may say in this round, at least one; None sets no limit.
    """

    drafts_BK: Tensor
    q_BKV: Tensor | None = None
    offered: bool = True
    again: Again | None = None
    most_B: Tensor | None = None


@dataclass(frozen=True)
class Verdict:
    """What a round says.

    Attributes:
        tokens_BT: the first emitted_B[b] of a row are its new tokens.
        emitted_B: kept drafts plus one.
    """

    tokens_BT: Tensor
    emitted_B: Tensor

    def within(self, most_B: Tensor | None) -> Verdict:
        """No more than so many tokens of each row."""
        if most_B is None:
            return self
        return Verdict(self.tokens_BT, self.emitted_B.minimum(most_B))


def match(proposal: Proposal, choices_BT: Tensor) -> Verdict:
    """Keep drafts while they equal the target's choice; the choice at the first difference follows.

    Every token is the target's own choice after a committed prefix, so drafting cannot change the text.
    """
    equal_BK = proposal.drafts_BK == choices_BT[:, :-1]
    accepted_B = equal_BK.long().cumprod(-1).sum(-1) * int(proposal.offered)
    return Verdict(choices_BT, accepted_B + 1)


def reject(proposal: Proposal, p_BTV: Tensor, seed_B: Tensor, position_BT: Tensor) -> Verdict:
    """Keep a draft x with probability min(1, p(x)/q(x)); at the first rejection draw from max(0, p - q).

    Source: Leviathan, Kalman, Matias, arXiv 2211.17192, section 2.3. Emitted tokens are distributed as p.

    Args:
        proposal: with q; without it drafts count as certain (one-hot q).
        p_BTV: the target's distribution per slot.
        seed_B: int64 seed per row.
        position_BT: absolute position of the token of each slot.
    """
    drafts_BK, vocab_size = proposal.drafts_BK, p_BTV.shape[-1]
    num_drafts = drafts_BK.shape[1]
    q_BKV = proposal.q_BKV
    if q_BKV is None:
        q_BKV = torch.zeros_like(p_BTV[:, :-1]).scatter_(-1, drafts_BK[..., None], 1.0)
    drawn_BK = uniform(seed_B, position_BT[:, :-1], 1, ACCEPT)[..., 0]
    p_BK = p_BTV[:, :-1].gather(-1, drafts_BK[..., None])[..., 0]
    q_BK = q_BKV.gather(-1, drafts_BK[..., None])[..., 0]
    kept_BK = (drawn_BK * q_BK < p_BK) & proposal.offered
    accepted_B = kept_BK.long().cumprod(-1).sum(-1)
    slot_B11 = accepted_B[:, None, None].expand(-1, 1, vocab_size)
    p_BV = p_BTV.gather(1, slot_B11)[:, 0]
    if num_drafts:
        q_BV = q_BKV.gather(1, slot_B11.clamp(max=num_drafts - 1))[:, 0]
        rejected_B1 = (accepted_B < num_drafts)[:, None] & proposal.offered
        rest_BV = torch.where(rejected_B1, (p_BV - q_BV).clamp(min=0), p_BV)
        p_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BV)
    noise_BV = gumbel(seed_B, position_BT.gather(1, accepted_B[:, None]), vocab_size, RESIDUAL)[:, 0]
    last_B = (p_BV.log() + noise_BV).argmax(-1)
    tokens_BT = torch.cat([drafts_BK, drafts_BK.new_zeros(len(drafts_BK), 1)], dim=1)
    return Verdict(tokens_BT.scatter(1, accepted_B[:, None], last_B[:, None]), accepted_B + 1)
