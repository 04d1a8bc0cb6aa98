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


def follow(guides: Mapping[int, Guide], proposal: Proposal, vocab_size: int) -> tuple[Proposal, Permitted]:
    """Walk the grammars along a block: drafts that they permit, and what its slots may take.

    A draft that is forbidden where it stands is chosen again among what is permitted there, by the
    proposer's own logits; a proposer without logits drafts the first permitted token, which is right where
    the grammar leaves one only. This changes how many drafts are right, not what is said.

    Drafts that come with the distribution that they were drawn from stay, as others would not be from it.
    What is forbidden is never kept, so what the slots behind it may take does not matter: they may take
    anything, as rows without a grammar may.

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
        for walk in walks:
            walk.ask(slot)
        forbidden = [walk for walk in walks if not walk.step(slot)]
        if forbidden and proposal.q_BKV is None and slot < num_slots - 1:
            _mend(forbidden, slot, proposal, vocab_size)
            forbidden = [walk for walk in forbidden if not walk.step(slot)]
        walks = [walk for walk in walks if walk not in forbidden]
    for walk in every:
        walk.guide.back(walk.taken)
    device = proposal.drafts_BK.device
    mended_BK = torch.tensor(drafts, dtype=torch.int64, device=device).view_as(proposal.drafts_BK)
    return replace(proposal, drafts_BK=mended_BK), Permitted(bits)


@dataclass(eq=False)
class _Walk:
    """One guide on its way along the drafts of its row.

    Attributes:
        row: of the round.
        guide: `taken` tokens further than it stood.
        drafts: of the row, changed in place.
        bits: of the row's slots, filled in place.
    """

    row: int
    guide: Guide
    drafts: list[int]
    bits: Bits
    taken: int = 0

    def ask(self, slot: int) -> None:
        """Note what the slot may take."""
        mask = np.frombuffer(self.guide.mask(), dtype=np.uint8)[: self.bits.shape[-1]]
        self.bits[slot] = 0
        self.bits[slot, : len(mask)] = mask

    def step(self, slot: int) -> bool:
        """Take the slot's draft; False where there is none or it is forbidden."""
        if slot == len(self.drafts) or not self.guide.accept(self.drafts[slot]):
            return False
        self.taken += 1
        return True


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
