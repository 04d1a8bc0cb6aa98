"""Teacher-forced acceptance of a drafter as it is stated, and under each usual way of reading it wrongly.

Not a benchmark: a few of the target's own answers, no clock. It shows which reading a checkpoint was
trained for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    "Explain what a budget is and how to make one.",
    "Write a short note to thank a teacher.",
    "List the steps to change the tyre of a bicycle.",
    "What is the difference between weather and climate?",
)
STATED = "as stated"
#: A wrong reading must be better than the stated one by so many standard errors of their paired difference.
_SURE = 3.0
#: Blocks per answer on which every special token is tried as the mask.
_MASK_ANCHORS = 8
#: The likeliest of them are then scored on all blocks.
_MASKS_SCORED = 4
#: Special tokens tried at most; some vocabularies reserve hundreds.
_MASKS = 40


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
        log_p: per block, the mean log-probability of the tokens of the text. It tells two readings apart
            where too few drafts are right to do so.
        drafter: read that way; None where it is the text that differs.
    """

    name: str
    lengths: tuple[int, ...]
    by_position: tuple[float, ...]
    log_p: tuple[float, ...]
    drafter: Drafter | None

    @property
    def acceptance_length(self) -> float:
        """Mean over blocks."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else 0.0

    @property
    def mean_log_p(self) -> float:
        """Mean over blocks."""
        return sum(self.log_p) / len(self.log_p) if self.log_p else 0.0


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
    mask_ids: Sequence[int] = (),
) -> Diagnosis:
    """Score every reading on the same answers.

    Args:
        target: to draft for.
        drafter: in the target's dtype, on its device.
        texts: prompts as token ids.
        options: how many answers' blocks.
        other_texts: the same prompts rendered otherwise (no chat template, another thinking mode), by name.
        mask_ids: tokens that could be the mask; the likeliest of them becomes one of the readings.
    """
    taps = target.tap_ids
    try:
        answers = answer(target, texts, options)
        features: dict[tuple[int, ...], list[Tensor]] = {}

        def score(one: Drafter, name: str = "", anchors: int = options.anchors) -> Score:
            key = one.config.target_layer_ids
            if key not in features:
                features[key] = _features(target, key, answers)
            return _score(target, one, answers, features[key], anchors, name)

        mask = _likeliest_mask(drafter, mask_ids, score)
        stated = score(drafter, STATED)
        wrong = wrong_readings(drafter, mask_token_id=mask, rope_theta=target.info.rope_theta)
        others = [score(one, name) for name, one in wrong.items()]
        for name, prompts in other_texts:
            rendered = answer(target, prompts, options)
            seen = _features(target, drafter.config.target_layer_ids, rendered)
            found = _score(target, drafter, rendered, seen, options.anchors, name)
            others.append(replace(found, drafter=None))
    finally:
        target.set_taps(taps)
    fixable = [one for one in others if one.drafter is not None and _clearly_better(one, stated)]
    better = max(fixable, key=lambda one: one.mean_log_p) if fixable else None
    return Diagnosis(stated, tuple(others), better)


def _likeliest_mask(drafter: Drafter, ids: Sequence[int], score: Callable[..., Score]) -> int | None:
    """Of other tokens than the stated one: first on a few blocks, then the best of them on all."""
    reads = {one: _as(drafter, mask_token_id=one) for one in ids if one != drafter.config.mask_token_id}
    few = {one: score(read, anchors=_MASK_ANCHORS).mean_log_p for one, read in reads.items()}
    best = sorted(few, key=lambda one: few[one], reverse=True)[:_MASKS_SCORED]
    return max(best, key=lambda one: score(reads[one]).mean_log_p, default=None)


def mask_candidates(tokenizer: Any, rows: int) -> tuple[int, ...]:
    """Tokens that drafters take as the mask: special ones, and rows of the embedding that no text uses.

    Args:
        tokenizer: of transformers.
        rows: of the target's embedding.
    """
    added = {int(number): str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    special = sorted(added, key=lambda number: ("mask" not in added[number].lower(), number))
    unused = [len(tokenizer), rows - 1, 0]
    return tuple(dict.fromkeys(one for one in [*unused, *special[:_MASKS]] if 0 <= one < rows))


def answer(target: Target, texts: Sequence[Sequence[int]], options: InspectOptions) -> list[Answer]:
    """The target's greedy answers, decoded plainly."""
    sampling = SamplingOptions(max_tokens=options.answer_tokens)
    engine = Engine(target, None, EngineOptions(max_rows=max(1, len(texts))))
    done = engine.generate([Request(list(ids), sampling) for ids in texts])
    return [
        Answer(torch.tensor([*ids, *one.token_ids]), len(ids)) for ids, one in zip(texts, done, strict=True)
    ]


def wrong_readings(
    drafter: Drafter, mask_token_id: int | None = None, rope_theta: float | None = None
) -> dict[str, Drafter]:
    """The usual mistakes that change anything for this drafter, each as a drafter that is read that way.

    Args:
        drafter: as stated.
        mask_token_id: a mask token to try besides one end of the vocabulary.
        rope_theta: of the target.
    """
    config = drafter.config
    made: dict[str, Drafter] = {}
    for shift, name in ((-1, "taps one layer too low"), (1, "taps one layer too high")):
        ids = tuple(number + shift for number in config.target_layer_ids)
        if all(0 <= number < config.num_target_layers for number in ids):
            made[name] = _as(drafter, target_layer_ids=ids)
    for name, causal in _other_causalities(config).items():
        made[name] = _as(drafter, causal=causal)
    if any(window is not None for window in config.windows):
        made["window ignored"] = _as(drafter, windows=(None,) * config.num_layers)
    for mask in (0 if config.mask_token_id else config.vocab_size - 1, mask_token_id):
        if mask is not None and mask != config.mask_token_id:
            made[f"mask token {mask}"] = _as(drafter, mask_token_id=mask)
    made["rope over neighbouring channels"] = _turned(drafter)
    made["rope channels put apart once too often"] = _turned(drafter, back=True)
    if rope_theta is not None and rope_theta != config.rope_theta:
        made[f"the target's rope theta {rope_theta:g}"] = _as(drafter, rope_theta=rope_theta)
    slot = "mask" if config.from_anchor else "anchor's"
    made[f"first draft at the {slot} slot"] = _as(drafter, from_anchor=not config.from_anchor)
    return made


def as_read(drafter: Drafter, score: Score) -> Drafter:
    """A drafter under the reading of a score, with its own weights.

    Raises:
        ValueError: it is the text that differs, not the reading.
    """
    if score.drafter is None:
        raise ValueError(f"{score.name} is no reading of the drafter")
    config = score.drafter.config
    made = wrong_readings(drafter, config.mask_token_id, config.rope_theta)
    return made[score.name]


def _other_causalities(config: DraftConfig) -> dict[str, tuple[bool, ...]]:
    """What engines make of a drafter whose causality they do not read, as far as it differs."""
    sliding = tuple(window is not None for window in config.windows)
    kinds = {
        "causal blocks": (True,) * config.num_layers,
        "bidirectional blocks": (False,) * config.num_layers,
        "causal sliding and bidirectional full layers": sliding,
    }
    return {
        name: causal
        for number, (name, causal) in enumerate(kinds.items())
        if causal != config.causal and causal not in list(kinds.values())[:number]
    }


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


def _turned(drafter: Drafter, back: bool = False) -> Drafter:
    """Rotating channels 2i and 2i + 1 together is rotating halves of heads whose channels are put in that
    order; back undoes that for weights that were put in it although they rotate halves.
    """
    width = drafter.config.head_dim
    order = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    if back:
        order = order.argsort()
    weights = dict(drafter.state_dict())
    for name, weight in weights.items():
        if ".q_" in name or ".k_" in name:  # projections and norms, in rows of heads
            heads = weight.reshape(-1, width, *weight.shape[1:])
            weights[name] = heads[:, order].reshape(weight.shape)
    return _with_weights(drafter, drafter.config, weights)


@torch.no_grad()
def _features(target: Target, taps: tuple[int, ...], answers: Sequence[Answer]) -> list[Tensor]:
    """What the target's layers say about every answer, as features_BLE."""
    target.set_taps(taps)
    found = []
    for one in answers:
        length = len(one.ids_L)
        whole = torch.tensor([length], device=target.device)
        filled = target.prefill(one.ids_L[None].to(target.device), whole, target.new_cache(1, length))
        found.append(filled.features_BLE)
    return found


@torch.no_grad()
def _score(
    target: Target,
    drafter: Drafter,
    answers: Sequence[Answer],
    features: Sequence[Tensor],
    anchors: int,
    name: str,
) -> Score:
    """Draft after evenly spread anchors of every answer and compare with what the target said."""
    drafts = drafter.config.block_size - 1
    lengths: list[int] = []
    log_p: list[float] = []
    for one, features_BLE in zip(answers, features, strict=True):
        last = len(one.ids_L) - 1 - drafts
        if last < one.start:
            continue
        count = min(anchors, last - one.start + 1)
        anchor_A = torch.linspace(one.start, last, count).round().long().to(target.device)
        ids_L = one.ids_L.to(target.device)
        found_AK, log_p_AK = draft_after(target, drafter, ids_L, anchor_A, features_BLE)
        right_AK = (found_AK == labels(ids_L, anchor_A, drafts)).long().cumprod(-1)
        lengths += (1 + right_AK.sum(-1)).tolist()
        log_p += log_p_AK.mean(-1).tolist()
    shares = [sum(n > k for n in lengths) / max(1, len(lengths)) for k in range(1, drafts + 1)]
    return Score(name, tuple(lengths), tuple(shares), tuple(log_p), drafter)


def labels(ids_L: Tensor, anchor_A: Tensor, drafts: int) -> Tensor:
    """What the text says after each anchor, as ids_AK."""
    return ids_L[anchor_A[:, None] + torch.arange(1, drafts + 1, device=ids_L.device)]


@torch.no_grad()
def draft_after(
    target: Target, drafter: Drafter, ids_L: Tensor, anchor_A: Tensor, features_BLE: Tensor
) -> tuple[Tensor, Tensor]:
    """Greedy drafts after each anchor, whose context is the text before it.

    Args:
        target: of the drafter.
        drafter: in the target's dtype.
        ids_L: a text.
        anchor_A: positions in it.
        features_BLE: of the whole text from the drafter's taps.

    Returns:
        int64 drafts_AK, and the log-probability log_p_AK of what the text says there; 0 for a token that is
        not drafted from.
    """
    config, length = drafter.config, len(ids_L)
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
    label_AK = labels(ids_L, anchor_A, config.block_size - 1)
    if drafter.draft_vocabulary is None:
        logits_AKV = drafter.adjust_logits(target.unembed(hidden_AKD)).float()
        return logits_AKV.argmax(-1), _log_p(logits_AKV, label_AK)
    ids_V = drafter.draft_vocabulary.to(target.device)
    logits_AKV = drafter.adjust_logits(target.product(hidden_AKD, target.output_rows(ids_V))).float()
    place_AK = torch.searchsorted(ids_V, label_AK).clamp(max=len(ids_V) - 1)
    known_AK = ids_V[place_AK] == label_AK
    return ids_V[logits_AKV.argmax(-1)], _log_p(logits_AKV, place_AK) * known_AK


def _log_p(logits_AKV: Tensor, label_AK: Tensor) -> Tensor:
    """Log-probability of each label."""
    return logits_AKV.log_softmax(-1).gather(-1, label_AK[..., None])[..., 0]


def _clearly_better(score: Score, stated: Score) -> bool:
    """Whether it accepts no less on the same blocks, and more or likelier than chance explains."""
    if score.acceptance_length < stated.acceptance_length:
        return False
    drafts = len(score.by_position)
    pairs = ((score.lengths, stated.lengths), (score.log_p, stated.log_p))
    return any(_above_chance(mine, theirs, drafts) for mine, theirs in pairs)


def _above_chance(mine: Sequence[float], theirs: Sequence[float], drafts: int) -> bool:
    """By means over neighbouring blocks: as many as there are drafts share tokens and are not independent."""
    gain = torch.tensor(mine).double() - torch.tensor(theirs).double()
    means = torch.stack([part.mean() for part in gain.split(drafts)])
    if len(means) < 2:
        return False
    return float(gain.mean()) > _SURE * float(means.std()) / len(means) ** 0.5
