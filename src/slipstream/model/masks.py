"""Who may see whom while decoding: fixed context buffers, one block per row."""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.model.config import DraftConfig


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
    made: dict[tuple[int | None, bool], Tensor] = {}
    kinds = list(zip(config.windows, config.causal, strict=True))
    for window, causal in kinds:
        if (window, causal) not in made:
            made[window, causal] = _one_mask(length_B, num_slots, num_block, window, causal)
    return tuple(made[kind] for kind in kinds)


def _one_mask(length_B: Tensor, num_slots: int, num_block: int, window: int | None, causal: bool) -> Tensor:
    """[context | block] for one kind of layer."""
    device = length_B.device
    slot_S = torch.arange(num_slots, device=device)
    offset_T = torch.arange(num_block, device=device)
    context = (slot_S < length_B[:, None])[:, None].expand(-1, num_block, -1)
    distance = offset_T[:, None] - offset_T
    block = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        position = length_B[:, None, None] + offset_T[:, None]
        context = context & (position - slot_S < window)
        # Future slots of a bidirectional block are inside the window on the same terms as past ones.
        block = block & (distance.abs() < window)
    return torch.cat([context, block.expand(len(length_B), -1, -1)], dim=-1)[:, None]
