"""Who may see whom when many blocks of many documents are trained in one pass.

Source: DFlash (arXiv 2602.06036) section 4.2: a block's query sees the context strictly before its anchor
(and inside the layer's window) and the slots of its own block (only earlier ones where the layer is causal).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.model import DraftConfig


def training_masks(
    config: DraftConfig, anchor_BA: Tensor, length_B: Tensor, num_context: int
) -> tuple[Tensor, ...]:
    """One bool mask per draft layer; equal layers share one tensor.

    Args:
        config: gives block size, causality and window per layer.
        anchor_BA: anchor positions (padded anchors may hold any position inside the document).
        length_B: valid context length of each document.
        num_context: L, the padded context length.

    Returns:
        masks of shape [B, 1, A*T, L + A*T], True where the query may look.
    """
    made: dict[tuple[int | None, bool], Tensor] = {}
    kinds = list(zip(config.windows, config.causal, strict=True))
    for window, causal in kinds:
        if (window, causal) not in made:
            context = _context_mask(anchor_BA, length_B, num_context, config.block_size, window)
            block = _block_mask(anchor_BA.shape[1], config.block_size, window, causal)
            own = block.expand(len(length_B), -1, -1).to(context.device)
            made[window, causal] = torch.cat([context, own], dim=-1)[:, None]
    return tuple(made[kind] for kind in kinds)


def _context_mask(
    anchor_BA: Tensor, length_B: Tensor, num_context: int, block: int, window: int | None
) -> Tensor:
    """Shape [B, A*T, L]: context strictly before the anchor, inside the document and the window."""
    slots = torch.arange(num_context, device=anchor_BA.device)
    query = anchor_BA[:, :, None] + torch.arange(block, device=anchor_BA.device)
    visible = (slots < anchor_BA[..., None]) & (slots < length_B[:, None, None])
    seen = visible[:, :, None].expand(-1, -1, block, -1)
    if window is not None:
        seen = seen & (query[..., None] - slots < window)
    return seen.flatten(1, 2)


def _block_mask(anchors: int, block: int, window: int | None, causal: bool) -> Tensor:
    """Shape [1, A*T, A*T]: every slot of the own block, or only earlier ones."""
    number = torch.arange(anchors).repeat_interleave(block)
    offset = torch.arange(block).repeat(anchors)
    own = number[:, None] == number
    distance = offset[:, None] - offset
    if causal:
        own = own & (distance >= 0)
    if window is not None:
        own = own & (distance.abs() < window)
    return own[None]
