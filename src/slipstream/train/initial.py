"""A head start: the drafter's layers begin as late layers of a Llama-like target.

The context that a draft layer reads is `hidden_norm(fc(features))`. With `fc` the identity on the last tap
and the target's input norm folded into the projections, a draft layer starts with exactly the keys and values
that its target layer would compute there. Other shapes start at random.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from slipstream.model import Drafter

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_COPIED = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "post_attention_layernorm")


def target_layers_for(num_draft_layers: int, num_target_layers: int) -> tuple[int, ...]:
    """Which target layers to begin from: the last ones."""
    return tuple(range(num_target_layers - num_draft_layers, num_target_layers))


@torch.no_grad()
def initialise_from_target(
    drafter: Drafter, weights: Mapping[str, Tensor], layer_ids: tuple[int, ...], sample_LE: Tensor
) -> bool:
    """Copy target layers into the drafter where every shape allows it.

    Args:
        drafter: changed in place.
        weights: the target's state, keys as in transformers (`model.layers.0...`).
        layer_ids: one target layer per draft layer.
        sample_LE: some features. Where the target has no per-head query and key norms, ours start at the
            mean magnitude of its queries and keys on them: attention starts as sharp as the target's.

    Returns:
        Whether it was done; False leaves the drafter untouched.
    """
    config = drafter.config
    sources = [_layer_weights(weights, number) for number in layer_ids]
    if config.width != config.target_width or any(source is None for source in sources):
        return False
    state = drafter.state_dict()
    last_tap_LD = sample_LE[:, -config.target_width :].float()
    context_LD = last_tap_LD * last_tap_LD.square().mean(-1, keepdim=True).add(config.rms_norm_eps).rsqrt()
    updates: dict[str, Tensor] = {}
    for number, source in enumerate(sources):
        assert source is not None
        updates |= {
            f"layers.{number}.{name}": value
            for name, value in _folded(source, context_LD, config.head_dim).items()
        }
    if "model.norm.weight" in weights:
        updates["norm.weight"] = weights["model.norm.weight"]
    if any(name not in state or state[name].shape != value.shape for name, value in updates.items()):
        return False
    fc = torch.zeros_like(state["fc.weight"])
    fc[:, -config.target_width :] = torch.eye(config.width)
    updates["fc.weight"] = fc
    for name, value in updates.items():
        state[name].copy_(value)
    return True


def _layer_weights(weights: Mapping[str, Tensor], number: int) -> dict[str, Tensor] | None:
    """One target layer's tensors by short name; None where the layer is built otherwise."""
    prefix = f"model.layers.{number}."
    layer = {
        key[len(prefix) : -len(".weight")]: value for key, value in weights.items() if key.startswith(prefix)
    }
    needed = {"input_layernorm", *_COPIED, *(f"self_attn.{name}" for name in _PROJECTIONS)}
    # A layer with more in it, norms after its parts say, computes something else with the same names.
    known = needed | {"self_attn.q_norm", "self_attn.k_norm"}
    return layer if needed <= set(layer) <= known else None


@torch.no_grad()
def plain_gains(model: nn.Module) -> dict[str, Tensor]:
    """A model's state in which the weight of every RMS norm is what it multiplies by.

    Some families store a norm's weight less one (Gemma). A vector of ones has root mean square one, so what
    a norm makes of it is its gain.
    """
    state = dict(model.state_dict())
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if "RMSNorm" in type(module).__name__ and isinstance(weight, Tensor) and weight.ndim == 1:
            state[f"{name}.weight"] = module(torch.ones_like(weight))
    return state


def _folded(source: dict[str, Tensor], context_LD: Tensor, head_dim: int) -> dict[str, Tensor]:
    """Draft-layer tensors: the input norm folded into q, k, v; the rest copied."""
    gain = source["input_layernorm"].float()
    result = {f"self_attn.{name}.weight": source[f"self_attn.{name}"].float() * gain for name in _PROJECTIONS}
    result |= {f"{name}.weight": source[name].float() for name in _COPIED}
    for name in ("q", "k"):
        own = source.get(f"self_attn.{name}_norm")
        if own is None:
            heads = (context_LD @ result[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, head_dim))
            own = heads.square().mean().sqrt().expand(head_dim)
        result[f"self_attn.{name}_norm.weight"] = own.float()
    result["input_layernorm.weight"] = torch.ones_like(gain)
    return result
