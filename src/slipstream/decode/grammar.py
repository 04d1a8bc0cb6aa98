"""Grammars under drafting: a block is drafted within the grammar, and each slot knows what it may take.

A host matter: a guide is a parser. What the grammar is, and who parses it, is not said here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.core.records import Guide
from slipstream.decode.accept import Proposal

Bits = NDArray[np.uint8]
"""One bit per token along the last axis, lowest first."""


@dataclass(frozen=True)
class Permitted:
    """Tokens that may be chosen at each slot of a block, as plain decoding under the grammars finds them.

    Attributes:
        bits: of every row and slot, [B, T, bytes]; all ones where anything may be chosen.
    """

    bits: Bits

    def constrain(self, logits_BTV: Tensor) -> Tensor:
        """Logits with what is forbidden at -inf."""
        allowed = np.unpackbits(self.bits, axis=-1, count=logits_BTV.shape[-1], bitorder="little")
        allowed_BTV = torch.from_numpy(allowed).to(logits_BTV.device).bool()
        return logits_BTV.masked_fill(~allowed_BTV, -torch.inf)


@dataclass(eq=False)
class Followed:
    """The guide of a text, and why it can be followed no further: whatever it raises ends that text alone.

    Attributes:
        guide: stands at the end of the text between rounds.
        failure: empty while all is well.
    """

    guide: Guide
    failure: str = ""

    def fail(self, error: Exception) -> None:
        """Note why the text cannot go on."""
        self.failure = self.failure or str(error) or type(error).__name__

    def say(self, token: int, last: bool) -> bool:
        """Move on by a token of the text; False where the text cannot go on with it.

        Args:
            token: that was chosen.
            last: it ends the text; a grammar need not know it.
        """
        if self.failure:
            return False
        try:
            if not self.guide.accept(token) and not last:
                self.failure = f"token {token} was permitted and then refused"
        except Exception as error:  # a parser may raise anything
            self.fail(error)
        return not self.failure


def follow(guides: Mapping[int, Followed], proposal: Proposal, vocab_size: int) -> tuple[Proposal, Permitted]:
    """Walk the grammars along a block: drafts that they permit, and what its slots may take.

    A draft that is forbidden where it stands is chosen again among what is permitted there, by the
    proposer's own logits; a proposer without logits drafts the first permitted token, which is right where
    the grammar leaves one only. This changes how many drafts are right, not what is said.

    Drafts that come with the distribution that they were drawn from stay, as others would not be from it.
    What is forbidden is never kept, so what the slots behind it may take does not matter: they may take
    anything, as rows without a grammar may. Where a parser gives up on drafts, the round says nothing beyond
    the last slot whose tokens are known.

    Args:
        guides: by row; afterwards they stand where they stood.
        proposal: of all rows.
        vocab_size: V; tokens that a guide does not know are forbidden.
    """
    drafts: list[list[int]] = proposal.drafts_BK.tolist()  # host: for grammars only
    num_slots = proposal.drafts_BK.shape[1] + 1
    bits = np.full((len(drafts), num_slots, -(-vocab_size // 8)), 255, dtype=np.uint8)
    every = walks = [_Walk(row, guide, drafts[row], bits[row]) for row, guide in guides.items()]
    for slot in range(num_slots):
        walks = [walk for walk in walks if walk.ask()]
        forbidden = [walk for walk in walks if not walk.step() and not walk.over]
        if forbidden and proposal.q_BKV is None and slot < num_slots - 1:
            _mend(forbidden, slot, proposal, vocab_size)
            for walk in forbidden:
                walk.step()
        walks = [walk for walk in walks if walk.taken > slot]
    most = [num_slots] * len(drafts)
    for walk in every:
        walk.back()
        most[walk.row] = max(1, walk.known)
    device = proposal.drafts_BK.device
    mended_BK = torch.tensor(drafts, dtype=torch.int64, device=device).view_as(proposal.drafts_BK)
    most_B = torch.tensor(most, device=device)
    return replace(proposal, drafts_BK=mended_BK, most_B=most_B), Permitted(bits)


@dataclass(eq=False)
class _Walk:
    """One guide on its way along the drafts of its row.

    Attributes:
        row: of the round.
        followed: its guide stands `taken` tokens further than the text.
        drafts: of the row, changed in place.
        bits: of the row's slots, filled in place.
        known: slots whose tokens are known.
        over: the parser has given up.
    """

    row: int
    followed: Followed
    drafts: list[int]
    bits: Bits
    taken: int = 0
    known: int = 0
    over: bool = False

    def ask(self) -> bool:
        """Note what the next slot may take; False where the parser gives up."""
        try:
            mask = np.frombuffer(self.followed.guide.mask(), dtype=np.uint8)[: self.bits.shape[-1]]
        except Exception as error:  # a parser may raise anything
            if not self.taken:
                self.followed.fail(error)
            return False
        self.bits[self.known] = 0
        self.bits[self.known, : len(mask)] = mask
        self.known += 1
        return True

    def step(self) -> bool:
        """Take the slot's draft; False where there is none, it is forbidden or the parser gives up on it."""
        if self.taken == len(self.drafts):
            return False
        try:
            moved = self.followed.guide.accept(self.drafts[self.taken])
        except Exception:  # likewise; whether it matters shows once the token is said
            self.over = True
            return False
        self.taken += moved
        return moved

    def back(self) -> None:
        """Return to the end of the text."""
        try:
            self.followed.guide.back(self.taken)
        except Exception as error:  # likewise
            self.followed.fail(error)


def _mend(walks: Sequence[_Walk], slot: int, proposal: Proposal, vocab_size: int) -> None:
    """Other drafts for one slot, within what is permitted there."""
    bits = np.stack([walk.bits[slot] for walk in walks])
    allowed = np.unpackbits(bits, axis=-1, count=vocab_size, bitorder="little").view(bool)
    for walk, first in zip(walks, allowed.argmax(-1), strict=True):
        walk.drafts[slot] = int(first)
    several: list[int] = [place for place, count in enumerate(allowed.sum(-1)) if count > 1]
    if several and proposal.again is not None:
        unsure = [walks[place] for place in several]
        chosen = proposal.again([walk.row for walk in unsure], slot, torch.from_numpy(allowed[several]))
        for walk, token in zip(unsure, chosen, strict=True):
            walk.drafts[slot] = token
