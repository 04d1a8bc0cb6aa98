"""The DFlash drafter: a small decoder that reads target features as keys and values in each of its layers.

Source: DFlash, arXiv 2602.06036, section 4.1. Parameter names are those of the published checkpoints. There
is no embedding and no head here; both are the target's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.model.config import DraftConfig
from slipstream.model.rope import rope_angles, rotate

#: Per layer (k_BGSC, v_BGSC): context keys, normed and rotated, and values.
ContextKV = tuple[tuple[Tensor, Tensor], ...]
#: What a layer's queries may see: a bool mask [B or 1, 1, T, S + T], or a function that attends to just that,
#: from q_BHTC, k_BGSC and v_BGSC to out_BHTC.
Mask = Tensor | Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in float32 like the models it must agree with."""

    def __init__(self, width: int, eps: float) -> None:
        """Start with gain one."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Norm the last axis."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context features and the block."""

    def __init__(self, config: DraftConfig) -> None:
        """Projections have no bias."""
        super().__init__()
        self.heads, self.groups, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.width, config.num_heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.width, config.num_kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.width, config.num_kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * config.head_dim, config.width, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)

    def keys_values(self, x_BLD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys (normed, rotated) and values of any states, each of shape [B, G, L, C]."""
        k_BGLC = self._split(self.k_proj(x_BLD))
        v_BGLC = self._split(self.v_proj(x_BLD))
        return rotate(self.k_norm(k_BGLC), cos, sin), v_BGLC

    def forward(
        self, x_BTD: Tensor, context: tuple[Tensor, Tensor], mask: Mask, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Attend from the block to what the mask shows of [context | block]."""
        q_BHTC = rotate(self.q_norm(self._split(self.q_proj(x_BTD))), cos, sin)
        own_k, own_v = self.keys_values(x_BTD, cos, sin)
        k_BGSC = torch.cat([context[0], own_k], dim=2)
        v_BGSC = torch.cat([context[1], own_v], dim=2)
        if isinstance(mask, Tensor):
            out_BHTC = _grouped_attention(q_BHTC, k_BGSC, v_BGSC, mask)
        else:
            out_BHTC = mask(q_BHTC, k_BGSC, v_BGSC)
        out: Tensor = self.o_proj(out_BHTC.transpose(1, 2).flatten(2))
        return out

    def _split(self, x: Tensor) -> Tensor:
        """[B, T, H*C] to [B, H, T, C]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: DraftConfig) -> None:
        """Projections have no bias."""
        super().__init__()
        self.gate_proj = nn.Linear(config.width, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.width, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Any leading axes."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DraftLayer(nn.Module):
    """Pre-norm attention and feed-forward with residuals."""

    def __init__(self, config: DraftConfig) -> None:
        """One layer of the drafter."""
        super().__init__()
        self.input_layernorm = RMSNorm(config.width, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.width, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x_BTD: Tensor, context: tuple[Tensor, Tensor], mask: Mask, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """Block states in, block states out; the context is read, never changed."""
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), context, mask, cos, sin)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class Drafter(nn.Module):
    """All draft layers, the fusion of the taps before them and the final norm after them.

    Attributes:
        config: shape.
        draft_vocabulary: int64 ids of the tokens that are ever drafted, ascending; None drafts from all. No
            weight: it only says over which rows of the target's head a draft is chosen.
    """

    def __init__(self, config: DraftConfig) -> None:
        """Random weights; readers and the trainer fill them."""
        super().__init__()
        self.config = config
        self.draft_vocabulary: Tensor | None = None
        self.fc = nn.Linear(config.feature_width, config.width, bias=False)
        self.hidden_norm = RMSNorm(config.width, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.width, config.rms_norm_eps)

    def fuse(self, features_BLE: Tensor) -> Tensor:
        """Target features to context states context_BLD: `fc`, then `hidden_norm`, once for all layers."""
        context_BLD: Tensor = self.hidden_norm(self.fc(features_BLE))
        return context_BLD

    def context_kv(self, features_BLE: Tensor, position_BL: Tensor) -> ContextKV:
        """Keys and values of context tokens for every layer; the context gets no input norm.

        Args:
            features_BLE: target features in the drafter's dtype.
            position_BL: absolute positions of these tokens.
        """
        context_BLD = self.fuse(features_BLE)
        cos, sin = rope_angles(position_BL, self.config.head_dim, self.config.rope_theta)
        return tuple(layer.self_attn.keys_values(context_BLD, cos, sin) for layer in self.layers)  # type: ignore[operator, union-attr]

    def forward(
        self, x_BTD: Tensor, position_BT: Tensor, context: ContextKV, masks: tuple[Mask, ...]
    ) -> Tensor:
        """One pass over blocks.

        Args:
            x_BTD: embeddings of [anchor, MASK, ...] from the target's input embedding.
            position_BT: absolute positions of the slots.
            context: from `context_kv`, or buffers of it whose invalid slots the masks hide.
            masks: one per layer; a bool mask is True where a query may look.

        Returns:
            hidden_BTD after the final norm; slot k predicts the token AT slot k.
        """
        if self.config.input_embedding_scale != 1.0:
            x_BTD = x_BTD * self.config.input_embedding_scale
        cos, sin = rope_angles(position_BT, self.config.head_dim, self.config.rope_theta)
        for layer, layer_context, mask in zip(self.layers, context, masks, strict=True):
            x_BTD = layer(x_BTD, layer_context, mask, cos, sin)
        hidden_BTD: Tensor = self.norm(x_BTD)
        return hidden_BTD

    def adjust_logits(self, logits_BTV: Tensor) -> Tensor:
        """Output multiplier, then tanh soft-cap."""
        if self.config.output_multiplier != 1.0:
            logits_BTV = logits_BTV * self.config.output_multiplier
        cap = self.config.final_logit_softcapping
        return logits_BTV if cap is None else cap * torch.tanh(logits_BTV / cap)


def _grouped_attention(q_BHTC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, mask: Tensor) -> Tensor:
    """Attention where H/G query heads share a key head: folded into query rows, K/V stay as they are."""
    rows, heads, slots, width = q_BHTC.shape
    groups = k_BGSC.shape[1]
    folded = q_BHTC.reshape(rows, groups, heads // groups * slots, width)
    folded_mask = mask.repeat(1, 1, heads // groups, 1)
    out = F.scaled_dot_product_attention(folded, k_BGSC, v_BGSC, attn_mask=folded_mask)
    return out.reshape(rows, heads, slots, width)
