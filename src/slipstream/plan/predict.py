"""Rates and gains by concurrency, the best block, and where drafting stops paying."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.errors import InputError
from slipstream.plan.acceptance import length
from slipstream.plan.cost import Setting, cache_bytes, draft_pass, target_pass, weights_bytes
from slipstream.plan.shape import Shape

_GIB = 1024**3
#: Of a card's memory, what weights and caches may take.
_USABLE = 0.92
#: Largest concurrency at which drafting is looked at.
_MOST = 1024


@dataclass(frozen=True)
class Pair:
    """A target and its drafter.

    Attributes:
        target: its shape.
        drafter: its layers, with the target's head.
        fused: weights that join the taps.
        block_size: T.
        profile: how often draft k is kept when all before it were, K = T - 1 shares or fewer.
    """

    target: Shape
    drafter: Shape
    fused: int
    block_size: int
    profile: tuple[float, ...]


@dataclass(frozen=True)
class Row:
    """One concurrency.

    Attributes:
        concurrency: requests side by side.
        plain_tokens_per_s: of all of them.
        drafted_tokens_per_s: likewise.
        speedup: drafted over plain.
        step_ms: a plain step.
        round_ms: a drafted round.
        draft_ms: of it, the draft pass.
        verify_ms: of it, the target's.
        memory_gib: weights of both and caches, on each card.
        fits: whether the card has so much.
    """

    concurrency: int
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    speedup: float
    step_ms: float
    round_ms: float
    draft_ms: float
    verify_ms: float
    memory_gib: float
    fits: bool


@dataclass(frozen=True)
class Prediction:
    """All of it.

    Attributes:
        rows: by concurrency.
        acceptance_length: with whole blocks.
        best_block_size: that gives most at the first concurrency; 1 where not drafting does.
        break_even: acceptance length from which drafting pays at the first concurrency.
        pays_up_to: largest power of two at which whole blocks still pay; 0 for none, None beyond what was
            looked at.
    """

    rows: tuple[Row, ...]
    acceptance_length: float
    best_block_size: int
    break_even: float
    pays_up_to: int | None


def predict(pair: Pair, setting: Setting, concurrency: Sequence[int]) -> Prediction:
    """What plain and drafted decoding reach.

    Args:
        pair: models and acceptance.
        setting: card, context, execution.
        concurrency: to look at.

    Raises:
        InputError: a value is out of range, or several cards are not joined.
    """
    _check(pair, setting, concurrency)
    first = concurrency[0]
    gains = {block: row(pair, setting, first, block).speedup for block in range(2, pair.block_size + 1)}
    best = max(gains, key=gains.__getitem__)
    whole = row(pair, setting, first, pair.block_size)
    doubled = [1 << n for n in range(_MOST.bit_length())]
    lost = next((c for c in doubled if row(pair, setting, c, pair.block_size).speedup < 1), None)
    return Prediction(
        tuple(row(pair, setting, count, pair.block_size) for count in concurrency),
        length(pair.profile[: pair.block_size - 1]),
        best if gains[best] > 1 else 1,
        whole.round_ms / whole.step_ms,
        None if lost is None else lost // 2,
    )


def row(pair: Pair, setting: Setting, concurrency: int, block_size: int) -> Row:
    """One concurrency with blocks of one size."""
    step = target_pass(pair.target, setting, concurrency, 1)
    verify = target_pass(pair.target, setting, concurrency, block_size)
    draft = draft_pass(pair.drafter, pair.fused, setting, concurrency, block_size)
    seconds = verify.seconds + draft.seconds + setting.overhead_s
    said = length(pair.profile[: block_size - 1])
    memory = _memory_gib(pair, setting, concurrency)
    plain, drafted = concurrency / step.seconds, concurrency * said / seconds
    return Row(
        concurrency=concurrency,
        plain_tokens_per_s=plain,
        drafted_tokens_per_s=drafted,
        speedup=drafted / plain,
        step_ms=step.seconds * 1e3,
        round_ms=seconds * 1e3,
        draft_ms=draft.seconds * 1e3,
        verify_ms=verify.seconds * 1e3,
        memory_gib=memory,
        fits=memory <= setting.card.memory_gib * _USABLE,
    )


def _memory_gib(pair: Pair, setting: Setting, concurrency: int) -> float:
    body = sum(layer.attention + layer.dense for layer in pair.drafter.layers) + pair.fused
    caches = cache_bytes(pair.target, setting) + cache_bytes(pair.drafter, setting)
    every = weights_bytes(pair.target, setting) + 2 * body + concurrency * caches
    return every / setting.cards / _GIB


def _check(pair: Pair, setting: Setting, concurrency: Sequence[int]) -> None:
    checks = (
        (bool(concurrency) and min(concurrency) >= 1, "concurrency must be at least 1"),
        (setting.context >= 1, "the context must be at least 1 token"),
        (setting.cards >= 1, "the number of cards must be at least 1"),
        (setting.round_s is None or setting.round_s >= 0, "the overhead of a round cannot be negative"),
        (pair.block_size >= 2, "a block has at least 2 slots, the anchor and a draft"),
        (
            len(pair.profile) < pair.block_size,
            f"a block of {pair.block_size} holds {pair.block_size - 1} drafts, "
            f"the profile has {len(pair.profile)}",
        ),
        (
            setting.cards == 1 or setting.card.link > 0,
            f"several {setting.card.name} are not joined fast enough to split a model",
        ),
    )
    for good, message in checks:
        if not good:
            raise InputError(message)
