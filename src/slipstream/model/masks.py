"""Who may see whom: the two rules of a draft layer, and the masks of decoding made from them.

A block's query sees context strictly before its anchor, and slots of its own block; both only inside the
layer's window, and a causal layer's query no later slot (DFlash, arXiv 2602.06036, section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from slipstream.model.config import DraftConfig

Made = TypeVar("Made")


def decode_masks(config: DraftConfig, length_B: Tensor, num_slots: int, num_block: int) -> tuple[Tensor, ...]:
    """One bool mask per draft layer; equal layers share one tensor.

    The anchor sits at position length_B[b]; context is what lies strictly before it and inside the window.

    Args:
        config: causality and window per layer.
        length_B: valid context length per row.
        num_slots: S, size of the context buffers.
        num_block: T, slots of the block.

    Returns:
        masks of shape [B, 1, T, S + T], True where the query may look.
    """

    def one(window: int | None, causal: bool) -> Tensor:
        context = context_mask(length_B, num_slots, num_block, window)
        block = block_mask(num_block, window, causal, length_B.device).expand(len(length_B), -1, -1)
        return torch.cat([context, block], dim=-1)[:, None]

    return per_layer(config, one)


def per_layer(config: DraftConfig, make: Callable[[int | None, bool], Made]) -> tuple[Made, ...]:
    """`make(window, causal)` for every draft layer, called once for each kind of layer."""
    kinds = list(zip(config.windows, config.causal, strict=True))
    made = {kind: make(*kind) for kind in dict.fromkeys(kinds)}
    return tuple(made[kind] for kind in kinds)


def context_mask(anchor: Tensor, num_slots: int, num_block: int, window: int | None) -> Tensor:
    """Context strictly before the anchor and inside the window.

    Args:
        anchor: positions of anchors, any shape.
        num_slots: S, context slots; slot s holds position s.
        num_block: T, slots of a block, at positions anchor, anchor + 1, ...
        window: of the layer.

    Returns:
        Bool of shape [*anchor.shape, T, S].
    """
    slot_S = torch.arange(num_slots, device=anchor.device)
    seen = (slot_S < anchor[..., None])[..., None, :].expand(*anchor.shape, num_block, num_slots)
    if window is None:
        return seen
    query = anchor[..., None] + torch.arange(num_block, device=anchor.device)
    return seen & (query[..., None] - slot_S < window)


def block_mask(num_block: int, window: int | None, causal: bool, device: torch.device) -> Tensor:
    """Slots of one block that see one another, bool of shape [T, T]."""
    offset_T = torch.arange(num_block, device=device)
    distance = offset_T[:, None] - offset_T
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    # Later slots of a bidirectional block are inside the window on the same terms as earlier ones.
    return seen if window is None else seen & (distance.abs() < window)
