"""The drafter's masks when many blocks of many documents are trained in one pass.

The rules are those of decoding (`model.masks`); here every block has an anchor of its own, blocks do not see
one another, and documents are padded (DFlash, arXiv 2602.06036, section 4.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.model import DraftConfig
from slipstream.model.masks import block_mask, context_mask, per_layer


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
    slots, anchors = config.block_size, anchor_BA.shape[1]
    inside = torch.arange(num_context, device=anchor_BA.device) < length_B[:, None, None]
    same_block = torch.eye(anchors, dtype=torch.bool, device=anchor_BA.device)

    def one(window: int | None, causal: bool) -> Tensor:
        context = context_mask(anchor_BA, num_context, slots, window).flatten(1, 2) & inside
        own = torch.kron(same_block, block_mask(slots, window, causal, anchor_BA.device))
        return torch.cat([context, own.expand(len(length_B), -1, -1)], dim=-1)[:, None]

    return per_layer(config, one)
