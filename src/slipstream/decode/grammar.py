"""Grammars under drafting: which tokens each slot of a block may take, given the drafts before it.

A host matter: a guide is a parser. What the grammar is, and who parses it, is not said here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.core.records import Guide


def constrain(guides: Mapping[int, Guide], drafts: Sequence[Sequence[int]], logits_BTV: Tensor) -> Tensor:
    """Logits with what the grammars forbid at -inf; arguments as for `permitted`."""
    num_slots, vocab_size = logits_BTV.shape[1:]
    allowed_BTV = permitted(guides, drafts, num_slots, vocab_size, logits_BTV.device)
    return logits_BTV.masked_fill(~allowed_BTV, -torch.inf)


def permitted(
    guides: Mapping[int, Guide],
    drafts: Sequence[Sequence[int]],
    num_slots: int,
    vocab_size: int,
    device: torch.device,
) -> Tensor:
    """Tokens that may be chosen at each slot, as plain decoding under the grammar would find them, [B, T, V].

    Slot t is asked after the first t drafts. A draft that its slot forbids is never kept, so what the slots
    behind it may take does not matter: they may take anything, as rows without a grammar may.

    Args:
        guides: by row; afterwards they stand where they stood.
        drafts: of all rows.
        num_slots: T, one more than there are drafts.
        vocab_size: V; tokens that a guide does not know are forbidden.
        device: of the result.
    """
    bits = np.full((len(drafts), num_slots, -(-vocab_size // 8)), 255, dtype=np.uint8)
    for row, guide in guides.items():
        accepted = 0
        for slot in range(num_slots):
            mask = np.frombuffer(guide.mask(), dtype=np.uint8)[: bits.shape[-1]]
            bits[row, slot] = 0
            bits[row, slot, : len(mask)] = mask
            if slot == num_slots - 1 or not guide.accept(drafts[row][slot]):
                break
            accepted += 1
        guide.back(accepted)
    unpacked = np.unpackbits(bits, axis=-1, count=vocab_size, bitorder="little")
    return torch.from_numpy(unpacked).to(device).bool()
