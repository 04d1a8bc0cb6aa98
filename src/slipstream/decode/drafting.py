"""A drafter at work: context in fixed buffers, a pass over a block; by PyTorch or by compiled kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from slipstream.model import Drafter, decode_masks
from slipstream.model.rope import rope_angles
from slipstream.native import Kernels, LayerWeights, NativeDecoder, Place, can_read
from slipstream.target import TargetCache
from slipstream.target.packing import is_packed


class DrafterAtWork(ABC):
    """What a proposer asks of a drafter.

    Args:
        drafter: in evaluation mode, on its device.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.dtype = drafter.hidden_norm.weight.dtype
        self._context: TargetCache | None = None

    def begin(self, rows: int, slots: int) -> None:
        """Empty context of this size; buffers of the last call serve again where they fit."""
        if self._context is None or not self._context.reuse(rows, slots):
            self._context = None  # so that the old buffers are gone before the new ones are made
            self._context = TargetCache(rows, slots)

    def clear(self, row_B: Tensor) -> None:
        """Empty some rows."""
        self.context.clear(row_B)

    @property
    def context(self) -> TargetCache:
        """Keys and values of every layer."""
        assert self._context is not None
        return self._context

    @abstractmethod
    def write(self, features_BLE: Tensor, position_BL: Tensor) -> None:
        """Write the keys and values of positions that the context is aimed at."""

    @abstractmethod
    def hidden(
        self,
        x_BTD: Tensor,
        position_BT: Tensor,
        length_B: Tensor,
        visible: int,
        row_B: Tensor | None = None,
    ) -> Tensor:
        """States of a block after the final norm, [B, T, D].

        Args:
            x_BTD: embeddings of [anchor, MASK, ...].
            position_BT: their positions, length_B[b] + t.
            length_B: context strictly before the anchor.
            visible: leading slots that hold the context and the block.
            row_B: rows of the context; None is all, in order.
        """


class TorchDrafter(DrafterAtWork):
    """Any device, any dtype."""

    @torch.no_grad()
    def write(self, features_BLE: Tensor, position_BL: Tensor) -> None:
        """As the drafter's own module computes it."""
        for layer, (k_BGLC, v_BGLC) in enumerate(self.drafter.context_kv(features_BLE, position_BL)):
            self.context.update(k_BGLC, v_BGLC, layer)

    @torch.no_grad()
    def hidden(
        self,
        x_BTD: Tensor,
        position_BT: Tensor,
        length_B: Tensor,
        visible: int,
        row_B: Tensor | None = None,
    ) -> Tensor:
        """As the drafter's own module computes it."""
        config = self.drafter.config
        whole = [self.context.read(layer, visible) for layer in range(config.num_layers)]
        context = tuple(pair if row_B is None else (pair[0][row_B], pair[1][row_B]) for pair in whole)
        masks = decode_masks(config, length_B, visible, position_BT.shape[1])
        hidden_BTD: Tensor = self.drafter(x_BTD, position_BT, context, masks)
        return hidden_BTD


class NativeDrafter(DrafterAtWork):
    """Compiled kernels. A block's keys and values are written behind the context, where the features of what
    is committed replace them.

    Args:
        drafter: in the kernels' dtype, on the CPU.
        layers: its weights, joined.
        kernels: loaded library.
    """

    def __init__(self, drafter: Drafter, layers: list[LayerWeights], kernels: Kernels) -> None:
        super().__init__(drafter)
        self._layers, self._kernels = layers, kernels
        self._decoder: NativeDecoder | None = None
        self._reach = 0

    def begin(self, rows: int, slots: int) -> None:
        """Also rotary tables for so many positions."""
        super().begin(rows, slots)
        if self._decoder is not None and self._reach >= slots:
            return
        drafter, config = self.drafter, self.drafter.config
        cos, sin = rope_angles(torch.arange(slots)[None], config.head_dim, config.rope_theta)
        # Rounded as the module rounds them; the first half is rotated with a minus sign.
        cos_LC, sin_LC = cos[0, 0].to(self.dtype).float(), sin[0, 0].to(self.dtype).float()
        sin_LC[:, : config.head_dim // 2] *= -1
        shape = config.rms_norm_eps, config.num_heads, config.head_dim
        tables = cos_LC.contiguous(), sin_LC.contiguous()
        self._decoder = NativeDecoder(self._kernels, self._layers, drafter.norm.weight, *shape, *tables)
        self._reach = slots

    def write(self, features_BLE: Tensor, position_BL: Tensor) -> None:
        """One call."""
        assert self._decoder is not None
        drafter = self.drafter
        place = self._place(features_BLE, position_BL)
        self._decoder.context(features_BLE, drafter.fc.weight, drafter.hidden_norm.weight, place)

    @torch.no_grad()
    def hidden(
        self,
        x_BTD: Tensor,
        position_BT: Tensor,
        length_B: Tensor,
        visible: int,
        row_B: Tensor | None = None,
    ) -> Tensor:
        """One call."""
        assert self._decoder is not None
        self.context.aim(position_BT, visible, row_B)
        scale = self.drafter.config.input_embedding_scale
        x_BTD = x_BTD if scale == 1.0 else x_BTD * scale
        return self._decoder(x_BTD, self._place(x_BTD, position_BT), {})

    def _place(self, like: Tensor, position_BL: Tensor) -> Place:
        config = self.drafter.config
        buffers = self.context.buffers(config.num_layers, config.num_kv_heads, config.head_dim, like)
        return Place(position_BL, position_BL, self.context.row_B, buffers)


def at_work(drafter: Drafter, kernels: Kernels | None) -> DrafterAtWork:
    """The fastest way to run a drafter: compiled kernels where they can read it."""
    if kernels is not None and not is_packed(drafter):
        layers = _joined(drafter)
        tensors = [tensor for layer in layers for tensor in layer.tensors()]
        if can_read(kernels, [*tensors, drafter.norm.weight, drafter.fc.weight], drafter.config.head_dim):
            return NativeDrafter(drafter, layers, kernels)
    return TorchDrafter(drafter)


@torch.no_grad()
def _joined(drafter: Drafter) -> list[LayerWeights]:
    """Weights of every layer; projections that read the same input become one copy."""
    config, layers = drafter.config, []
    for layer, window, causal in zip(drafter.layers, config.windows, config.causal, strict=True):
        weights = layer.state_dict()
        attention = "self_attn."
        layers.append(
            LayerWeights(
                input_norm_D=weights["input_layernorm.weight"],
                qkv_OD=torch.cat([weights[f"{attention}{name}_proj.weight"] for name in "qkv"]),
                qkv_bias_O=None,
                q_norm_C=weights[f"{attention}q_norm.weight"],
                k_norm_C=weights[f"{attention}k_norm.weight"],
                out_DO=weights[f"{attention}o_proj.weight"],
                mlp_norm_D=weights["post_attention_layernorm.weight"],
                gate_up_ID=torch.cat([weights[f"mlp.{name}_proj.weight"] for name in ("gate", "up")]),
                down_DI=weights["mlp.down_proj.weight"],
                window=window,
                causal=causal,
            )
        )
    return layers
