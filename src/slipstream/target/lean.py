"""A lean forward pass for Llama-like decoders: fused weights, few operations, no repeated keys and values.

Not a general model: it serves families whose layers it knows exactly (`lean_decoder` says None to all others,
and then transformers' own modules run). The weights are those of the transformers model, which afterwards
looks at them through views, so nothing is held twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.native import Kernels, LayerWeights, NativeDecoder, Place, can_read
from slipstream.target.cache import TargetCache
from slipstream.target.masks import LayerWindows, pass_masks

#: Decoders whose layers are: norm, attention with rotary positions, norm, gated MLP, each with a residual.
_FAMILIES = frozenset({"LlamaModel", "MistralModel", "Qwen2Model", "Qwen3Model"})
#: Rows times key/value heads from which plain products beat torch's fused attention on a CPU (one token per
#: row).
_MANY = 48
#: Most tokens of a row in a pass on the compiled kernels, and of all rows: oneDNN's products win beyond. A
#: row's numbers must not depend on its company, so rounds stay far below the second.
FEW, FEW_IN_ALL = 64, 1024


@dataclass(frozen=True)
class _Layer:
    """One decoder layer's weights, projections fused along their output axis."""

    layer_type: str
    input_norm_D: Tensor
    qkv: nn.Linear
    q_norm_C: Tensor | None
    k_norm_C: Tensor | None
    out: nn.Linear
    mlp_norm_D: Tensor
    gate_up: nn.Linear
    down: nn.Linear


class LeanDecoder:
    """The decoder of a Llama-like model, from embeddings to the states after the final norm.

    Args:
        decoder: of transformers; its projections become views of the fused ones.
        config: the text configuration.
        longest: positions for which rotary tables are made.
        windows: of the layer types.
        kernels: run passes of few tokens; None leaves all to PyTorch.
    """

    def __init__(
        self, decoder: Any, config: Any, longest: int, windows: LayerWindows, kernels: Kernels | None
    ) -> None:
        self._windows = windows
        self._eps = float(config.rms_norm_eps)
        self._heads = int(config.num_attention_heads)
        self._kv_heads = int(config.num_key_value_heads)
        self._head_dim = int(
            getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        )
        self._embed: nn.Module = decoder.embed_tokens
        self._act = decoder.layers[0].mlp.act_fn
        self._norm_D: Tensor = decoder.norm.weight
        types = getattr(config, "layer_types", None) or [""] * len(decoder.layers)
        self._layers = [_fuse(layer, kind) for layer, kind in zip(decoder.layers, types, strict=True)]
        position_BL = torch.arange(longest, device=self._norm_D.device)[None]
        cos_BLC, sin_BLC = decoder.rotary_emb(self._norm_D, position_BL)
        # The rotation of the first half has a minus sign, which the table takes over.
        sign_C = torch.ones(self._head_dim, dtype=sin_BLC.dtype, device=sin_BLC.device)
        sign_C[: self._head_dim // 2] = -1
        self._cos_LC, self._sin_LC = cos_BLC[0].contiguous(), (sin_BLC[0] * sign_C).contiguous()
        self.native = None if kernels is None else self._natively(kernels)

    def __call__(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        rotary_BT: Tensor,
        visible: int,
        cache: TargetCache,
        taps: Mapping[int, Tensor],
    ) -> Tensor:
        """One pass.

        Args:
            ids_BT: int64 tokens.
            position_BT: int64 positions.
            rotary_BT: int64 positions for the rotary tables, inside them.
            visible: leading slots of the cache that the pass reads or writes.
            cache: aimed at these positions.
            taps: by 0-based layer id, a [B, T, D] buffer that receives the layer's output.

        Returns:
            States after the final norm, [B, T, D].
        """
        x_BTD = self._embed(ids_BT)
        if self.native is not None and ids_BT.shape[1] <= FEW and ids_BT.numel() <= FEW_IN_ALL:
            buffers = cache.buffers(len(self._layers), self._kv_heads, self._head_dim, x_BTD)
            return self.native(x_BTD, Place(position_BT, rotary_BT, cache.row_B, buffers), taps)
        masks = pass_masks(position_BT, visible, self._windows, x_BTD.dtype)
        cos_BT1C, sin_BT1C = self._cos_LC[rotary_BT][:, :, None], self._sin_LC[rotary_BT][:, :, None]
        group = self._heads // self._kv_heads
        grouped = {
            kind: mask.repeat_interleave(group, dim=2)
            for kind, mask in (masks.items() if isinstance(masks, Mapping) else [("", masks)])
        }
        single = None if isinstance(masks, Mapping) else grouped[""]
        for number, layer in enumerate(self._layers):
            mask = single if single is not None else grouped[layer.layer_type]
            h_BTD = self._normed(x_BTD, layer.input_norm_D)
            x_BTD = x_BTD + self._attend(layer, number, h_BTD, cos_BT1C, sin_BT1C, cache, mask)
            gate_up = layer.gate_up(self._normed(x_BTD, layer.mlp_norm_D))
            gate, up = gate_up.chunk(2, dim=-1)
            x_BTD = x_BTD + layer.down(self._act(gate) * up)
            if number in taps:
                taps[number].copy_(x_BTD)
        return self._normed(x_BTD, self._norm_D)

    def _attend(
        self,
        layer: _Layer,
        number: int,
        h_BTD: Tensor,
        cos_BT1C: Tensor,
        sin_BT1C: Tensor,
        cache: TargetCache,
        mask: Tensor,
    ) -> Tensor:
        """Attention of one layer; the queries that share a key/value head are its rows."""
        heads, groups, width = self._heads, self._kv_heads, self._head_dim
        rows, tokens, _ = h_BTD.shape
        qkv = layer.qkv(h_BTD).unflatten(-1, (heads + 2 * groups, width))
        qk, v_BTGC = qkv[:, :, : heads + groups], qkv[:, :, heads + groups :]
        if layer.q_norm_C is not None and layer.k_norm_C is not None:
            q_norm, k_norm = layer.q_norm_C, layer.k_norm_C
            qk = torch.cat(
                [self._normed(qk[:, :, :heads], q_norm), self._normed(qk[:, :, heads:], k_norm)], dim=2
            )
        qk = qk * cos_BT1C + qk.roll(width // 2, dims=-1) * sin_BT1C
        k_BGSC, v_BGSC = cache.update(qk[:, :, heads:].transpose(1, 2), v_BTGC.transpose(1, 2), number)
        # Query head g * group + j belongs to key/value head g, as transformers repeats them. Rows of a token
        # lie together, so the mask has each token's row `group` times.
        q_BGQC = (
            qk[:, :, :heads]
            .view(rows, tokens, groups, heads // groups, width)
            .transpose(1, 2)
            .reshape(rows, groups, -1, width)
        )
        mixed = _attention(q_BGQC, k_BGSC, v_BGSC, mask, width**-0.5)
        mixed = mixed.view(rows, groups, tokens, -1, width).transpose(1, 2).reshape(rows, tokens, -1)
        out: Tensor = layer.out(mixed)
        return out

    def _natively(self, kernels: Kernels) -> NativeDecoder:
        """The same decoder on compiled kernels."""
        only = next(iter(self._windows.values()))
        layers = [
            LayerWeights(
                *(layer.input_norm_D, layer.qkv.weight, layer.qkv.bias, layer.q_norm_C, layer.k_norm_C),
                *(layer.out.weight, layer.mlp_norm_D, layer.gate_up.weight, layer.down.weight),
                window=self._windows.get(layer.layer_type, only),
            )
            for layer in self._layers
        ]
        tables = self._cos_LC.float().contiguous(), self._sin_LC.float().contiguous()
        return NativeDecoder(
            *(kernels, layers, self._norm_D, self._eps, self._heads, self._head_dim), *tables
        )

    def _normed(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self._eps)


def lean_decoder(
    decoder: Any, config: Any, longest: int, windows: LayerWindows, kernels: Kernels | None = None
) -> LeanDecoder | None:
    """A lean pass for this decoder, or None where its family is not known here.

    Args:
        decoder: of a transformers model, in evaluation mode, on its device.
        config: the text configuration.
        longest: longest context in tokens.
        windows: of the layer types.
        kernels: compiled ones, if there are any; they serve where they can read the weights.
    """
    if not _known(decoder):
        return None
    able = kernels is not None and runs_natively(decoder, kernels)
    return LeanDecoder(decoder, config, longest, windows, kernels if able else None)


def runs_natively(decoder: Any, kernels: Kernels) -> bool:
    """Whether compiled kernels can run this decoder of a transformers model."""
    if not _known(decoder):
        return False
    layers = list(decoder.layers)
    silu = "silu" in type(layers[0].mlp.act_fn).__name__.lower()
    behind = [part for layer in layers for part in (layer.self_attn.o_proj, *_projections(layer.mlp))]
    weights = [*decoder.layers.parameters(), decoder.norm.weight]
    head_dim = int(layers[0].self_attn.head_dim)
    return silu and all(part.bias is None for part in behind) and can_read(kernels, weights, head_dim)


def _known(decoder: Any) -> bool:
    """Whether it is of a family whose layers are known here, as transformers made it."""
    if type(decoder).__name__ not in _FAMILIES or not type(decoder).__module__.startswith("transformers."):
        return False
    projections = _projections(decoder.layers)
    plain = all(type(m) is nn.Linear for m in projections) and len(projections) == 7 * len(decoder.layers)
    # transformers hangs hooks of its own on whole layers; on a projection they are someone's who wants to be
    # asked.
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in projections)
    return plain and not hooked and len({p.weight.dtype for p in projections}) == 1


def _projections(module: nn.Module) -> list[nn.Linear]:
    return [part for part in module.modules() if isinstance(part, nn.Linear)]


def _attention(q_BGQC: Tensor, k_BGSC: Tensor, v_BGSC: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Attention of Q = group x T query rows per key/value head."""
    rows, groups, queries, _ = q_BGQC.shape
    if q_BGQC.device.type == "cpu" and rows * groups >= _MANY and queries <= 16:
        scores = torch.matmul(q_BGQC, k_BGSC.transpose(-1, -2)).float() * scale + mask
        return torch.matmul(scores.softmax(-1).to(v_BGSC.dtype), v_BGSC)
    return F.scaled_dot_product_attention(q_BGQC, k_BGSC, v_BGSC, attn_mask=mask, scale=scale)


def _fuse(layer: Any, layer_type: str) -> _Layer:
    """Join what reads the same input."""
    attention, mlp = layer.self_attn, layer.mlp
    return _Layer(
        layer_type,
        layer.input_layernorm.weight,
        _joined(attention.q_proj, attention.k_proj, attention.v_proj),
        getattr(getattr(attention, "q_norm", None), "weight", None),
        getattr(getattr(attention, "k_norm", None), "weight", None),
        attention.o_proj,
        layer.post_attention_layernorm.weight,
        _joined(mlp.gate_proj, mlp.up_proj),
        mlp.down_proj,
    )


@torch.no_grad()
def _joined(*parts: nn.Linear) -> nn.Linear:
    """One layer with the outputs of all parts; the parts' own weights become views of it."""
    sizes = [part.out_features for part in parts]
    joined = nn.Linear(1, 1, bias=parts[0].bias is not None, device="meta")
    joined.in_features, joined.out_features = parts[0].in_features, sum(sizes)
    joined.weight = nn.Parameter(torch.cat([part.weight for part in parts]), requires_grad=False)
    if parts[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([part.bias for part in parts]), requires_grad=False)
    for name in ("weight", "bias") if joined.bias is not None else ("weight",):
        for part, view in zip(parts, getattr(joined, name).split(sizes), strict=True):
            setattr(part, name, nn.Parameter(view, requires_grad=getattr(part, name).requires_grad))
    return joined
