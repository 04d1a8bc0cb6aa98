"""The training masks as FlexAttention, which skips what no query sees; which kind of attention is used.

Source: Dong et al., "Flex Attention", arXiv 2412.05496. The rules are those of `masks`; a test holds the two
together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from slipstream.core.errors import InputError
from slipstream.model import DraftConfig
from slipstream.model.drafter import Mask
from slipstream.model.masks import per_layer
from slipstream.train.masks import training_masks

#: A window that hides nothing.
_EVERYTHING = 1 << 30

MaskMaker = Callable[[DraftConfig, Tensor, Tensor, int], tuple[Mask, ...]]
"""From a drafter's configuration, anchor_BA, start_BA and the padded row length to one mask per layer."""


def mask_maker(attention: Literal["auto", "sdpa", "flex"], device: torch.device) -> MaskMaker:
    """The kind of masks that training uses.

    Args:
        attention: as `TrainOptions` has it.
        device: of the training.

    Raises:
        InputError: FlexAttention is asked for where it cannot be differentiated or compiled.
    """
    able = device.type == "cuda" and find_spec("triton") is not None
    if attention == "flex" and not able:
        raise InputError("attention flex needs a CUDA device and Triton; leave it at auto")
    return training_masks if attention == "sdpa" or not able else flex_masks


def flex_masks(
    config: DraftConfig, anchor_BA: Tensor, start_BA: Tensor, num_context: int
) -> tuple[Mask, ...]:
    """What `training_masks` says, for FlexAttention; equal layers share one mask.

    Args:
        config: gives block size, causality and window per layer.
        anchor_BA: anchor positions.
        start_BA: first position of each anchor's document.
        num_context: L, the padded row length.
    """
    slots, (rows, anchors), device = config.block_size, anchor_BA.shape, anchor_BA.device
    # Looked up instead of computed from L, window and causality, so that all lengths and layers are one
    # program.
    slot_T = torch.arange(anchors * slots, device=device)
    block_T, offset_T = slot_T // slots, slot_T % slots
    context_L = torch.arange(num_context, device=device)
    key_block_S = torch.cat([torch.full_like(context_L, -1), block_T])
    key_place_S = torch.cat([context_L, offset_T])
    anchor_BT = anchor_BA.repeat_interleave(slots, dim=1)
    start_BT = start_BA.repeat_interleave(slots, dim=1)

    def one(window: int | None, causal: bool) -> Mask:
        reach = torch.tensor(_EVERYTHING if window is None else window, device=device)
        ahead = torch.tensor(0 if causal else _EVERYTHING, device=device)

        def seen(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            place, offset, anchor = key_place_S[key], offset_T[query], anchor_BT[row, query]
            is_context = key_block_S[key] < 0
            context = is_context & (place >= start_BT[row, query]) & (place < anchor)
            context = context & (anchor + offset - place < reach)
            own = (key_block_S[key] == block_T[query]) & (place - offset <= ahead)
            return context | (own & ((offset - place).abs() < reach))

        mask = create_block_mask(seen, rows, None, len(slot_T), len(key_block_S), device=str(device))
        return _Flex(mask)

    return per_layer(config, one)


class _Flex:
    """Attends under a block mask."""

    def __init__(self, mask: BlockMask) -> None:
        self._mask = mask

    def __call__(self, q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor) -> Tensor:
        # Autocast knows the usual attention, not this one: the norms of queries and keys leave float32.
        q_BHTC, k_BGSC = q_BHTC.to(v_BGSC.dtype), k_BGSC.to(v_BGSC.dtype)
        attend = _compiled() if q_BHTC.device.type == "cuda" else flex_attention
        out: Tensor = attend(q_BHTC, k_BGSC, v_BGSC, block_mask=self._mask, enable_gqa=True)
        return out


@cache
def _compiled() -> Any:
    # Sizes differ from batch to batch; a program for each would soon be more than torch keeps.
    return torch.compile(flex_attention, dynamic=True)
