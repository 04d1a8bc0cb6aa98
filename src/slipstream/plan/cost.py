"""What passes take: reading, then computing, and what launching layers and rounds costs.

Bytes over bandwidth and operations over arithmetic, as in a roofline (Williams, Waterman, Patterson, CACM
2009), but added: the sum is nearer to published figures than the longer of both (`docs/plan_accuracy.md`).
Three constants are fitted: how much of a card's arithmetic passes reach, and what a drafted round costs
beyond its passes in graph execution and in eager mode. Weights are read once per pass, however many rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from slipstream.plan.cards import Card
from slipstream.plan.shape import Layer, Shape, distinct_experts

Precision = Literal["auto", "bf16", "fp8", "int4"]
#: Bits per weight; int4 with a scale of 16 bits for 64 weights.
BITS = {"bf16": 16.0, "fp8": 8.0, "int4": 4.25}
_BF16 = 16.0
#: Bytes of a key's or value's number.
_KV_BYTES = 2
#: Of a recurrent state's number; it is kept in 32 bits.
_STATE_BYTES = 4
#: A message of two per layer between cards takes at least so long, in seconds.
_MESSAGE_S = 8e-6


@dataclass(frozen=True)
class Constants:
    """What separates data sheets from programs.

    Attributes:
        bandwidth_share: of a card's bandwidth that reading weights reaches; usual, not fitted.
        flops_share: of its arithmetic that passes over many tokens reach; fitted.
        graph_layer_s: what a layer of a captured or compiled pass costs beside its work, in seconds; from two
            published plain rates of models of equal depth, not fitted.
        graph_round_s: what a drafted round costs beyond its passes, in seconds; fitted.
        eager_layer_s: launching a layer in PyTorch's eager mode; usual, not fitted.
        eager_round_s: as for graphs; fitted.
    """

    bandwidth_share: float = 0.85
    flops_share: float = 0.350
    graph_layer_s: float = 56e-6
    graph_round_s: float = 1.45e-3
    eager_layer_s: float = 0.7e-3
    eager_round_s: float = 3.05e-3


@dataclass(frozen=True)
class Setting:
    """Where and how a model runs.

    Attributes:
        card: that it runs on.
        cards: over which the weights are split.
        context: tokens before the pass, per row.
        execution: `graph` (captured or compiled) or `eager`.
        precision: of the target's layers; `auto` takes what the checkpoint says, else bf16.
        round_s: what a drafted round costs beyond its passes; None takes the execution's own.
        constants: of the model.
    """

    card: Card
    cards: int = 1
    context: int = 1500
    execution: Literal["graph", "eager"] = "graph"
    precision: Precision = "auto"
    round_s: float | None = None
    constants: Constants = Constants()

    @property
    def layer_s(self) -> float:
        """Launching one layer; nothing where the rates were measured, launches included."""
        if self.card.measured:
            return 0.0
        constants = self.constants
        return constants.graph_layer_s if self.execution == "graph" else constants.eager_layer_s

    @property
    def overhead_s(self) -> float:
        """Of a drafted round."""
        if self.round_s is not None:
            return self.round_s
        if self.card.measured:
            return 0.0
        constants = self.constants
        return constants.graph_round_s if self.execution == "graph" else constants.eager_round_s


@dataclass(frozen=True)
class Pass:
    """One pass over a batch.

    Attributes:
        bytes: read, over all cards.
        flops: over all cards.
        seconds: it takes.
    """

    bytes: float
    flops: float
    seconds: float


def target_pass(shape: Shape, setting: Setting, rows: int, tokens: int) -> Pass:
    """A pass of the target over `tokens` tokens in each of so many rows, the head on every one."""
    every = rows * tokens
    read = _head_bytes(shape) + sum(_layer_bytes(shape, layer, setting, every) for layer in shape.layers)
    read += rows * cache_bytes(shape, setting)
    # Each token's queries meet the context's keys, and their shares its values.
    attended = sum(_seen(layer, setting.context) * layer.queries for layer in shape.layers)
    flops = every * (2.0 * shape.active + 4.0 * attended)
    byte = _bits(shape, setting) == BITS["fp8"]
    return _timed(read, flops, shape.width, len(shape.layers), every, setting, byte)


def draft_pass(drafter: Shape, fused: int, setting: Setting, rows: int, tokens: int) -> Pass:
    """A pass of the drafter over a block in each row, head included; new features are fused on the way.

    Args:
        drafter: its layers, with the target's head.
        fused: weights of the projection that joins the taps.
        setting: where it runs; the drafter is in bf16.
        rows: side by side.
        tokens: T.
    """
    every = rows * tokens
    body = sum(layer.attention + layer.dense for layer in drafter.layers)
    read = (body + fused) * _BF16 / 8 + _head_bytes(drafter)
    read += rows * cache_bytes(drafter, setting)
    flops = 2.0 * (body + fused + drafter.head) * every
    return _timed(read, flops, drafter.width, len(drafter.layers), every, setting)


def weights_bytes(shape: Shape, setting: Setting) -> float:
    """What the target's weights take in memory, input embedding included, over all cards."""
    layers = sum(
        (x.attention + x.dense) * _bits(shape, setting) / 8
        + x.expert * x.experts * _expert_bits(shape, setting) / 8
        for x in shape.layers
    )
    return layers + shape.head * (1 if shape.tied else 2) * _BF16 / 8


def kv_bytes(shape: Shape, context: int) -> float:
    """Keys and values of one row."""
    return sum(_kv_bytes(layer, context) for layer in shape.layers)


def cache_bytes(shape: Shape, setting: Setting) -> float:
    """The same over all cards: a latent cannot be split by heads, so each card has a copy."""
    return sum(
        _kv_bytes(layer, setting.context) * (setting.cards if layer.latent else 1) for layer in shape.layers
    )


def _timed(
    read: float, flops: float, width: int, layers: int, tokens: int, setting: Setting, byte: bool = False
) -> Pass:
    card, constants = setting.card, setting.constants
    shares = (1.0, 1.0) if card.measured else (constants.bandwidth_share, constants.flops_share)
    rate = card.fp8_flops if byte and card.fp8_flops else card.flops
    reading, computing = read / (card.bandwidth * shares[0]), flops / (rate * shares[1])
    # Slipstream's kernels on a CPU fetch while they compute; in a served pass both add up.
    work = (max(reading, computing) if card.measured else reading + computing) / setting.cards
    return Pass(read, flops, work + layers * setting.layer_s + _between(width, layers, tokens, setting))


def _between(width: int, layers: int, tokens: int, setting: Setting) -> float:
    """Two sums over all cards per layer (Shoeybi et al., arXiv 1909.08053), in rings."""
    if setting.cards == 1:
        return 0.0
    sent = tokens * width * 2 * 2 * (setting.cards - 1) / setting.cards
    return 2 * layers * (_MESSAGE_S + sent / setting.card.link)


def _layer_bytes(shape: Shape, layer: Layer, setting: Setting, tokens: int) -> float:
    touched = distinct_experts(layer.experts, layer.per_token, tokens)
    own = (layer.attention + layer.dense) * _bits(shape, setting)
    return (own + layer.expert * touched * _expert_bits(shape, setting)) / 8


def _bits(shape: Shape, setting: Setting) -> float:
    if setting.precision == "auto":
        return shape.bits or _BF16
    return BITS[setting.precision]


def _expert_bits(shape: Shape, setting: Setting) -> float:
    if setting.precision == "auto":
        return shape.expert_bits or shape.bits or _BF16
    return BITS[setting.precision]


def _head_bytes(shape: Shape) -> float:
    return shape.head * _BF16 / 8


def _seen(layer: Layer, context: int) -> int:
    return context if layer.window is None else min(context, layer.window)


def _kv_bytes(layer: Layer, context: int) -> float:
    return _seen(layer, context) * layer.kv * _KV_BYTES + layer.state * _STATE_BYTES
