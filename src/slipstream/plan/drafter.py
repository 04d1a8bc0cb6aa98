"""A drafter's shape, from its own config or as one would train it for a target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slipstream.core.errors import InputError
from slipstream.plan.shape import Layer, Shape, read_shape


def read_drafter_shape(raw: Mapping[str, Any], target: Shape) -> tuple[Shape, int, int]:
    """Of a drafter's config in the z-lab layout.

    Args:
        raw: the object in config.json.
        target: whose head it borrows.

    Returns:
        Its shape, weights of the projection that joins the taps, and its block size.

    Raises:
        InputError: it is no drafter's config, or not for this target.
    """
    own = raw.get("dflash_config")
    block = raw.get("block_size") or (own or {}).get("block_size")
    taps = (own or {}).get("target_layer_ids")
    if not isinstance(own, Mapping) or not isinstance(block, int) or not isinstance(taps, list):
        raise InputError("the drafter's config has no dflash_config with block_size and target_layer_ids")
    # Draft layers are of Qwen3's kind, whatever the target is.
    shape = read_shape(dict(raw) | {"model_type": "qwen3"})
    if shape.width != target.width or shape.vocabulary != target.vocabulary:
        raise InputError(
            f"the drafter has width {shape.width} and {shape.vocabulary} tokens, "
            f"the target {target.width} and {target.vocabulary}"
        )
    return shape, shape.width * shape.width * len(taps), block


def described_drafter(target: Shape, layers: int, taps: int = 5) -> tuple[Shape, int]:
    """A drafter of so many layers as the paper would make it: the target's widths, full attention.

    Args:
        target: to draft for.
        layers: of the drafter.
        taps: target layers that it reads.

    Returns:
        Its shape, and the weights of the projection that joins the taps.

    Raises:
        InputError: no layers, or a target without attention.
    """
    if layers < 1:
        raise InputError(f"a drafter has at least one layer, not {layers}")
    model = next((layer for layer in target.layers if not layer.state), None)
    if model is None:
        raise InputError(f"{target.name} has no layer with attention that a drafter could be shaped after")
    # Experts become one MLP three times as wide as the states, as published drafters of such targets have.
    dense = 3 * target.width * 3 * target.width if model.experts else model.dense
    if model.latent:  # published drafters of such targets have plain attention, of as many keys as this
        model = replace(model, queries=target.width, kv=target.width // 4, latent=False)
    # Without an output gate: queries, keys and values, and what joins them again.
    attention = target.width * (2 * model.queries + model.kv)
    layer = replace(model, attention=attention, dense=dense, expert=0, experts=0, per_token=0, window=None)
    made: tuple[Layer, ...] = (layer,) * layers
    return replace(target, layers=made, bits=None, expert_bits=None), target.width * target.width * taps
