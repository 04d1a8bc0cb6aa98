"""The attention masks of one target pass: explicit, 4-D and additive, one per distinct window.

Not the drafter's masks. Slots are absolute positions, so a mask needs no length: a slot is seen by a token at
position p if it lies at or before p, and, in a sliding-window layer, less than the window behind it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

LayerWindows = Mapping[str, int | None]
"""Window of every layer type of a model; None sees the whole past."""


def causal_mask(position_BT: Tensor, slots: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """Mask of tokens at given positions over cache slots.

    Args:
        position_BT: int64 position of every token of the pass.
        slots: S, how many leading slots of the cache the pass reads.
        window: W sees slots p with position - p < W, None sees all p <= position (as transformers counts it).
        dtype: of the model; the mask is added to attention scores.

    Returns:
        [B, 1, T, S]: 0 where seen, the least finite number of `dtype` elsewhere. Additive, because every
        attention of transformers takes that and a boolean mask would be turned into it again in each layer.
    """
    slot_S = torch.arange(slots, device=position_BT.device)
    behind_BTS = position_BT[:, :, None] - slot_S
    seen_BTS = behind_BTS >= 0
    if window is not None:
        seen_BTS &= behind_BTS < window
    mask_BTS = torch.zeros(seen_BTS.shape, dtype=dtype, device=position_BT.device)
    return mask_BTS.masked_fill_(~seen_BTS, torch.finfo(dtype).min)[:, None]


def pass_masks(
    position_BT: Tensor, slots: int, windows: LayerWindows, dtype: torch.dtype
) -> Tensor | dict[str, Tensor]:
    """What a model takes as `attention_mask`: one mask, or one per layer type where windows differ.

    Args:
        position_BT: int64 position of every token of the pass.
        slots: leading cache slots that the pass reads.
        windows: window per layer type.
        dtype: of the model.

    Returns:
        A mask [B, 1, T, S], or a dict of such masks by layer type; equal windows share one tensor.
    """
    distinct = set(windows.values())
    by_window = {w: causal_mask(position_BT, slots, w, dtype) for w in distinct}
    if len(distinct) == 1:
        return by_window[distinct.pop()]
    return {layer_type: by_window[w] for layer_type, w in windows.items()}
