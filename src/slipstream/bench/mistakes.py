"""Teacher-forced acceptance of a drafter as it is stated, and under each usual way of reading it wrongly.

Not a benchmark: a few of the target's own answers, no clock. It shows which reading a checkpoint was
trained for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.command_options import InspectOptions
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import Engine
from slipstream.model import DraftConfig, Drafter, decode_masks
from slipstream.target import Target

#: Fixed, so that figures of two checkpoints can be compared.
PROMPTS = (
    "Explain in simple words how rain forms.",
    "Write a short story about a fox who learns to swim.",
    "Write a Python function that returns the largest number of a list.",
    "What are three good habits for staying healthy?",
)
STATED = "as stated"
#: A wrong reading must accept more than the stated one by so many standard errors of their paired difference.
_SURE = 3.0


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target says after it.

    Attributes:
        ids_L: both, int64.
        start: first token of the answer.
    """

    ids_L: Tensor
    start: int


@dataclass(frozen=True)
class Score:
    """Acceptance under one reading.

    Attributes:
        name: of the reading.
        lengths: tokens per block, the target's own included.
        by_position: share of blocks whose drafts 1..k are all right, for k = 1..K.
        drafter: read that way; None where it is the text that differs.
    """

    name: str
    lengths: tuple[int, ...]
    by_position: tuple[float, ...]
    drafter: Drafter | None

    @property
    def acceptance_length(self) -> float:
        """Mean over blocks."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0


@dataclass(frozen=True)
class Diagnosis:
    """All readings of one pair.

    Attributes:
        stated: as the checkpoint says.
        others: under each mistake that can be made with it.
        better: a wrong reading that accepts clearly more than the stated one.
    """

    stated: Score
    others: tuple[Score, ...]
    better: Score | None


def diagnose(
    target: Target,
    drafter: Drafter,
    texts: Sequence[Sequence[int]],
    options: InspectOptions = InspectOptions(),
    other_texts: Sequence[tuple[str, Sequence[Sequence[int]]]] = (),
) -> Diagnosis:
    """Score every reading on the same answers.

    Args:
        target: to draft for.
        drafter: in the target's dtype, on its device.
        texts: prompts as token ids.
        options: how many answers' blocks.
        other_texts: the same prompts rendered otherwise (no chat template, another thinking mode), by name.
    """
    taps = target.tap_ids
    try:
        answers = answer(target, texts, options)
        readings = {STATED: drafter} | wrong_readings(drafter)
        scores = [_score(target, one, answers, options, name) for name, one in readings.items()]
        for name, prompts in other_texts:
            found = _score(target, drafter, answer(target, prompts, options), options, name)
            scores.append(replace(found, drafter=None))
    finally:
        target.set_taps(taps)
    stated, *others = scores
    fixable = [score for score in others if score.drafter is not None and _clearly_more(score, stated)]
    better = max(fixable, key=lambda score: score.acceptance_length) if fixable else None
    return Diagnosis(stated, tuple(others), better)


def answer(target: Target, texts: Sequence[Sequence[int]], options: InspectOptions) -> list[Answer]:
    """The target's greedy answers, decoded plainly."""
    sampling = SamplingOptions(max_tokens=options.answer_tokens)
    engine = Engine(target, None, EngineOptions(max_rows=max(1, len(texts))))
    done = engine.generate([Request(list(ids), sampling) for ids in texts])
    return [
        Answer(torch.tensor([*ids, *one.token_ids]), len(ids)) for ids, one in zip(texts, done, strict=True)
    ]


def wrong_readings(drafter: Drafter) -> dict[str, Drafter]:
    """The usual mistakes that change anything for this drafter, each as a drafter that is read that way."""
    config = drafter.config
    made: dict[str, Drafter] = {}
    for shift, name in ((-1, "taps one layer too low"), (1, "taps one layer too high")):
        ids = tuple(number + shift for number in config.target_layer_ids)
        if all(0 <= number < config.num_target_layers for number in ids):
            made[name] = _as(drafter, target_layer_ids=ids)
    if not all(config.causal):
        made["causal blocks"] = _as(drafter, causal=(True,) * config.num_layers)
    if any(config.causal):
        made["bidirectional blocks"] = _as(drafter, causal=(False,) * config.num_layers)
    if any(window is not None for window in config.windows):
        made["window ignored"] = _as(drafter, windows=(None,) * config.num_layers)
    other = 0 if config.mask_token_id else config.vocab_size - 1
    made[f"mask token {other}"] = _as(drafter, mask_token_id=other)
    made["rope over neighbouring channels"] = _turned(drafter)
    slot = "mask" if config.from_anchor else "anchor's"
    made[f"first draft at the {slot} slot"] = _as(drafter, from_anchor=not config.from_anchor)
    return made


def _as(drafter: Drafter, **changes: object) -> Drafter:
    """The same weights under another configuration."""
    config: DraftConfig = replace(drafter.config, **changes)  # type: ignore[arg-type]
    return _with_weights(drafter, config, drafter.state_dict())


def _with_weights(drafter: Drafter, config: DraftConfig, weights: Mapping[str, Tensor]) -> Drafter:
    with torch.device("meta"):
        made = Drafter(config)
    made.load_state_dict(weights, assign=True)
    made.draft_vocabulary = drafter.draft_vocabulary
    return made.eval().requires_grad_(False)


def _turned(drafter: Drafter) -> Drafter:
    """Rotating channels 2i and 2i + 1 together is rotating halves of heads whose channels are put in that
    order.
    """
    width = drafter.config.head_dim
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    weights = dict(drafter.state_dict())
    for name, weight in weights.items():
        if ".q_" in name or ".k_" in name:  # projections and norms, in rows of heads
            heads = weight.reshape(-1, width, *weight.shape[1:])
            weights[name] = heads[:, order].reshape(weight.shape)
    return _with_weights(drafter, drafter.config, weights)


@torch.no_grad()
def _score(
    target: Target, drafter: Drafter, answers: Sequence[Answer], options: InspectOptions, name: str
) -> Score:
    """Draft after evenly spread anchors of every answer and compare with what the target said."""
    config = drafter.config
    target.set_taps(config.target_layer_ids)
    drafts = config.block_size - 1
    lengths: list[int] = []
    for one in answers:
        last = len(one.ids_L) - 1 - drafts
        if last < one.start:
            continue
        count = min(options.anchors, last - one.start + 1)
        anchor_A = torch.linspace(one.start, last, count).round().long().to(target.device)
        ids_L = one.ids_L.to(target.device)
        found_AK = draft_after(target, drafter, ids_L, anchor_A)
        label_AK = ids_L[anchor_A[:, None] + torch.arange(1, drafts + 1, device=target.device)]
        right_AK = (found_AK == label_AK).long().cumprod(-1)
        lengths += (1 + right_AK.sum(-1)).tolist()
    shares = [sum(n > k for n in lengths) / max(1, len(lengths)) for k in range(1, drafts + 1)]
    return Score(name, tuple(lengths), tuple(shares), drafter)


@torch.no_grad()
def draft_after(target: Target, drafter: Drafter, ids_L: Tensor, anchor_A: Tensor) -> Tensor:
    """Greedy drafts after each anchor, whose context is the text before it.

    Args:
        target: with the drafter's taps set.
        drafter: in the target's dtype.
        ids_L: a text.
        anchor_A: positions in it.

    Returns:
        int64 drafts_AK.
    """
    config, length = drafter.config, len(ids_L)
    whole = torch.tensor([length], device=target.device)
    features_BLE = target.prefill(ids_L[None], whole, target.new_cache(1, length)).features_BLE
    position_BL = torch.arange(length, device=target.device)[None]
    rows, first = len(anchor_A), config.first_draft_slot
    context = tuple(
        (k.expand(rows, -1, -1, -1), v.expand(rows, -1, -1, -1))
        for k, v in drafter.context_kv(features_BLE.to(drafter.norm.weight.dtype), position_BL)
    )
    slots = config.block_size - 1 + first
    block_AT = torch.full((rows, slots), config.mask_token_id, device=target.device)
    block_AT[:, 0] = ids_L[anchor_A]
    position_AT = anchor_A[:, None] + torch.arange(slots, device=target.device)
    masks = decode_masks(config, anchor_A, length, slots)
    x_ATD = target.embed(block_AT).to(drafter.norm.weight.dtype)
    hidden_AKD = drafter(x_ATD, position_AT, context, masks)[:, first:].to(target.dtype)
    if drafter.draft_vocabulary is None:
        return drafter.adjust_logits(target.unembed(hidden_AKD)).argmax(-1)
    ids_V = drafter.draft_vocabulary.to(target.device)
    logits_AKV = target.product(hidden_AKD, target.output_rows(ids_V))
    return ids_V[drafter.adjust_logits(logits_AKV).argmax(-1)]


def _clearly_more(score: Score, stated: Score) -> bool:
    """Whether it accepts more on the same blocks than chance explains."""
    gain = torch.tensor(score.lengths).double() - torch.tensor(stated.lengths).double()
    if len(gain) < 2:
        return False
    error = float(gain.std()) / len(gain) ** 0.5
    return float(gain.mean()) > max(0.05, _SURE * error)
