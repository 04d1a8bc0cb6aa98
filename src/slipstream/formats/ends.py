"""A checkpoint's own copies of the target's embedding and head: compared with the target's and left out.

Slipstream's drafters borrow both ends. Copies that equal the target's say nothing new; anything else is
refused.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError

EMBEDDING, HEAD, TO_TARGET, TO_DRAFT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
_SOME = 4096


class TargetEnds(Protocol):
    """The target's embedding and head, row by row."""

    def embed(self, ids_BT: Tensor) -> Tensor:
        """Input embeddings."""

    def output_rows(self, ids_V: Tensor) -> Tensor:
        """Rows of the output embedding."""


def take_ends(tensors: dict[str, Tensor], vocab_size: int, ends: TargetEnds | None) -> Tensor | None:
    """Remove a checkpoint's own ends from its tensors once they are known to be the target's.

    Args:
        tensors: of the checkpoint; embed_tokens, lm_head, d2t and t2d are taken out.
        vocab_size: rows of the target's embedding.
        ends: of the target; None cannot vouch for anything.

    Returns:
        Ascending ids of the tokens that the head covers; None where it covers all.

    Raises:
        CheckpointError: the ends are not the target's, or there is no target to compare them with.
    """
    embedding, head = tensors.pop(EMBEDDING, None), tensors.pop(HEAD, None)
    to_target, to_draft = tensors.pop(TO_TARGET, None), tensors.pop(TO_DRAFT, None)
    ids = _drafted_ids(to_target, to_draft, vocab_size)
    if ids is not None and (head is None or len(head) != len(ids)):
        raise CheckpointError(f"d2t names {len(ids)} tokens, but lm_head.weight has another number of rows")
    if embedding is None and head is None:
        return ids
    if ends is None:
        raise CheckpointError(
            "the checkpoint has its own embedding or head; name its target with -t, so that they can "
            "be compared with the target's"
        )
    if embedding is not None:
        _same(embedding, torch.arange(len(embedding)), vocab_size, ends, "embedding")
    if head is not None:
        _same(head, torch.arange(len(head)) if ids is None else ids, vocab_size, ends, "head")
    return ids


def _drafted_ids(to_target: Tensor | None, to_draft: Tensor | None, vocab_size: int) -> Tensor | None:
    """Target ids of the draft vocabulary: draft id + offset."""
    if to_target is None:
        if to_draft is not None:
            raise CheckpointError("the checkpoint has t2d but no d2t")
        return None
    if to_target.dim() != 1 or to_target.is_floating_point() or not 0 < len(to_target) <= vocab_size:
        raise CheckpointError("d2t must be a list of integer offsets")
    ids = to_target.long() + torch.arange(len(to_target))
    if bool((ids < 0).any()) or bool((ids >= vocab_size).any()) or bool((ids[1:] <= ids[:-1]).any()):
        raise CheckpointError(f"d2t names no ascending list of tokens below {vocab_size}")
    if to_draft is not None:
        expected = torch.zeros(vocab_size, dtype=torch.bool)
        expected[ids] = True
        if to_draft.shape != expected.shape or not torch.equal(to_draft.bool(), expected):
            raise CheckpointError("t2d and d2t contradict each other")
    return ids


def _same(own: Tensor, ids: Tensor, vocab_size: int, ends: TargetEnds, what: str) -> None:
    """Rows of one end, compared as bfloat16, which is what checkpoints keep."""
    if own.dim() != 2 or len(own) != len(ids) or len(ids) > vocab_size:
        raise CheckpointError(f"the checkpoint's own {what} has {len(own)} rows, the target's {vocab_size}")
    for part in range(0, len(ids), _SOME):
        some = ids[part : part + _SOME]
        rows = ends.embed(some[None])[0] if what == "embedding" else ends.output_rows(some)
        mine, theirs = own[part : part + _SOME].bfloat16(), rows.cpu().bfloat16()
        if mine.shape != theirs.shape or not torch.equal(mine, theirs):
            raise CheckpointError(
                f"the checkpoint's own {what} is not the target's; Slipstream drafts with the target's alone"
            )
