"""The drafter's masks when many blocks of many documents are trained in one pass.

The rules are those of decoding (`model.masks`); here every block has an anchor of its own, blocks do not see
one another, nor another document of their row (DFlash, arXiv 2602.06036, section 4.2).
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.model import DraftConfig
from slipstream.model.masks import block_mask, context_mask, per_layer


def training_masks(
    config: DraftConfig, anchor_BA: Tensor, start_BA: Tensor, num_context: int
) -> tuple[Tensor, ...]:
    """One bool mask per draft layer; equal layers share one tensor.

    Args:
        config: gives block size, causality and window per layer.
        anchor_BA: anchor positions (padded anchors may hold any position of the row).
        start_BA: first position of each anchor's document; what lies before belongs to another document.
        num_context: L, the padded row length.

    Returns:
        masks of shape [B, 1, A*T, L + A*T], True where the query may look.
    """
    slots, (rows, anchors) = config.block_size, anchor_BA.shape
    own_document = torch.arange(num_context, device=anchor_BA.device) >= start_BA[..., None, None]
    same_block = torch.eye(anchors, dtype=torch.bool, device=anchor_BA.device)

    def one(window: int | None, causal: bool) -> Tensor:
        context = (context_mask(anchor_BA, num_context, slots, window) & own_document).flatten(1, 2)
        own = torch.kron(same_block, block_mask(slots, window, causal, anchor_BA.device))
        return torch.cat([context, own.expand(rows, -1, -1)], dim=-1)[:, None]

    return per_layer(config, one)
