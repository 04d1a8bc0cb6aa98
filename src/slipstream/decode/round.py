"""One round: propose, verify, accept, commit. Static in shape, one copy from the device to the host."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from slipstream.core.options import EngineOptions
from slipstream.core.records import TokenLogprob
from slipstream.decode.accept import Proposal, Verdict, match, reject
from slipstream.decode.backlog import Backlog
from slipstream.decode.grammar import Followed, follow
from slipstream.decode.history import History
from slipstream.decode.logprobs import read_logprobs
from slipstream.decode.propose import DraftChooser, Proposer
from slipstream.decode.sampling import RowSettings, choose, distribution
from slipstream.target import Target
from slipstream.target.cache import TargetCache


@dataclass
class Batch:
    """What a batch of requests has on the device.

    Attributes:
        rows: of the buffers, that the rounds are about.
        row_B: the same on the device; None is all of them, in order.
        anchor_B: last committed token of each row.
        length_B: its position; context lies strictly before it. 0 in rows that nobody uses.
        num_drafts: K of the next round.
        backlog: features that the proposer has not seen yet.
        active_B: 1 while a row decodes, 0 in a free row (it stands still).
        settings, history, chooser: of the requests in the rows; set anew whenever a row changes hands.
        guides: by place among the rows, of requests that a grammar binds.
        logprobs: most of the likeliest tokens that any row wants reported; None where no row wants any.
        drafting: whether any row wants drafts.
    """

    target: Target
    proposer: Proposer | None
    options: EngineOptions
    num_drafts: int
    cache: TargetCache
    rows: tuple[int, ...]
    row_B: Tensor | None
    anchor_B: Tensor
    length_B: Tensor
    active_B: Tensor
    settings: RowSettings = field(init=False)
    history: History = field(init=False)
    chooser: DraftChooser = field(init=False)
    backlog: Backlog = field(init=False)
    guides: dict[int, Followed] = field(default_factory=dict)
    logprobs: int | None = None
    drafting: bool = True

    def __post_init__(self) -> None:
        """Nothing waits yet."""
        self.backlog = Backlog(self.proposer, self.cache.rows)


@dataclass(frozen=True)
class Said:
    """What a round says, by row; in rows that do not decode it means nothing.

    Attributes:
        tokens: the new tokens, at least one.
        logprobs: of these tokens; no rows where no row asks.
    """

    tokens: list[list[int]]
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)


@dataclass(frozen=True)
class Passed:
    """A round before anything is committed.

    Attributes:
        proposal: drafts.
        raw_BTV: the target's logits.
        logits_BTV: the same as history and grammars make them.
        features_BTE: of the block.
        verdict: what the round says.
        short_B: rows that have to choose again with more tokens.
    """

    proposal: Proposal
    raw_BTV: Tensor
    logits_BTV: Tensor
    features_BTE: Tensor
    verdict: Verdict
    short_B: Tensor


def run_round(batch: Batch, visible: int) -> Said:
    """Advance every active row by at least one token.

    Args:
        batch: changed in place; nothing waits in its backlog if the round has drafts.
        visible: leading buffer slots that can hold anything valid, this round's block included.
    """
    return finish_round(batch, visible, propose(batch, visible))


def finish_round(batch: Batch, visible: int, proposal: Proposal) -> Said:
    """`run_round` after the proposal."""
    passed = pass_round(batch, visible, proposal)
    if not batch.num_drafts or batch.proposer is None:
        batch.backlog.park(passed.features_BTE, batch.length_B, batch.rows)
    verdict = passed.verdict
    rows = read(pack(verdict, passed.short_B & (batch.active_B > 0)))
    if any(row[-1] for row in rows):
        verdict, rows = choose_again(batch, passed.proposal, passed.logits_BTV)
    commit(batch, verdict)
    tokens = [row[: row[-2]] for row in rows]
    if batch.logprobs is None:
        return Said(tokens)
    return Said(tokens, read_logprobs(passed.raw_BTV, verdict.tokens_BT, batch.logprobs))


def pass_round(batch: Batch, visible: int, proposal: Proposal) -> Passed:
    """Verify and accept; the proposer sees the features if the round has drafts.

    Without grammars nothing here reads the device, and no shape depends on a value.
    """
    permitted = None
    if batch.guides:
        proposal, permitted = follow(batch.guides, proposal, batch.target.info.vocab_size)
    ids_BT = torch.cat([batch.anchor_B[:, None], proposal.drafts_BK], dim=1)
    verified = batch.target.verify(ids_BT, batch.length_B, batch.cache, visible, batch.row_B)
    position_BT = positions(batch, ids_BT.shape[1])
    logits_BTV = batch.history.adjust(verified.logits_BTV, proposal.drafts_BK, position_BT)
    if permitted is not None:
        logits_BTV = permitted.constrain(logits_BTV)
    verdict, short_B = accept(batch, proposal, logits_BTV, position_BT)
    if batch.num_drafts and batch.proposer is not None:
        batch.proposer.extend(verified.features_BTE, position_BT - 1, visible, batch.row_B)
    return Passed(
        *(proposal, verified.logits_BTV, logits_BTV, verified.features_BTE),
        *(verdict, short_B),
    )


def positions(batch: Batch, slots: int) -> Tensor:
    """Positions of the tokens that the slots of a block choose, [B, T]."""
    return batch.length_B[:, None] + torch.arange(1, slots + 1, device=batch.length_B.device)


def choose_again(batch: Batch, proposal: Proposal, logits_BTV: Tensor) -> tuple[Verdict, list[list[int]]]:
    """Rare: the likeliest tokens did not reach top_p, so the filter is run again over all of them."""
    position_BT = positions(batch, logits_BTV.shape[1])
    verdict, short_B = accept(batch, proposal, logits_BTV, position_BT, logits_BTV.shape[-1])
    return verdict, read(pack(verdict, short_B))


def accept(
    batch: Batch, proposal: Proposal, logits_BTV: Tensor, position_BT: Tensor, survivors: int | None = None
) -> tuple[Verdict, Tensor]:
    """The verdict of the batch's acceptor, and rows where more survivors are needed."""
    settings = batch.settings
    if batch.options.acceptor == "reject":
        p_BTV, short_B = distribution(logits_BTV, settings, survivors)
        drawn = reject(proposal, p_BTV, settings.seed_B, position_BT)
        return drawn.within(proposal.most_B), short_B
    choice = choose(logits_BTV, position_BT, settings, survivors)
    return match(proposal, choice.ids_BT).within(proposal.most_B), choice.short_B


def propose(batch: Batch, visible: int) -> Proposal:
    """Drafts of the proposer, or none at all."""
    if batch.proposer is None or not batch.num_drafts:
        return Proposal(batch.anchor_B.new_empty(len(batch.anchor_B), 0))
    return batch.proposer.propose(
        batch.anchor_B, batch.length_B, batch.num_drafts, visible, batch.chooser, batch.row_B
    )


def pack(verdict: Verdict, short_B: Tensor) -> Tensor:
    """What the host wants to know of a round, in one tensor: tokens, how many count, and whether the filter
    fell short.
    """
    return torch.cat([verdict.tokens_BT, verdict.emitted_B[:, None], short_B[:, None].long()], dim=1)


def read(packed: Tensor) -> list[list[int]]:
    """The round's one copy to the host, of what `pack` packed."""
    rows: list[list[int]] = packed.tolist()  # host: the one copy of a round
    return rows


def commit(batch: Batch, verdict: Verdict) -> None:
    """Move every active row on that emits; what lies beyond its new length will be written again."""
    emitted_B = verdict.emitted_B * batch.active_B
    last_B = verdict.tokens_BT.gather(1, (emitted_B - 1).clamp(min=0)[:, None])[:, 0]
    batch.history.add(verdict.tokens_BT, emitted_B)
    batch.anchor_B = torch.where(emitted_B > 0, last_B, batch.anchor_B)
    batch.length_B = batch.length_B + emitted_B
