"""A drafter from nothing but its target: chats, features, training, checkpoint; all in one run folder.

Every step looks for its own files first, so a run that was stopped goes on where it ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch import Tensor

from slipstream.core.errors import InputError
from slipstream.core.options import (
    CHAT_ROWS,
    CONTINUED_RATE,
    DrafterOptions,
    EngineOptions,
    SynthesisOptions,
    TargetOptions,
    TrainOptions,
)
from slipstream.data.chats import Chat
from slipstream.data.extract import Workers, extract_features
from slipstream.data.features import Features, FeatureStore
from slipstream.data.live import LiveFeatures
from slipstream.data.make import ChatPlan, make_chats, renderer_for, text_ids
from slipstream.data.readers import read_chats
from slipstream.decode import Engine
from slipstream.formats import read_zlab, write_zlab
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target, load_target
from slipstream.target.packing import is_packed
from slipstream.train.card import card, draw_curve
from slipstream.train.checkpoint import Run, new_run, read_best, restore
from slipstream.train.evaluate import Forecast, acceptance_by_workload, decoded_acceptance, evaluate
from slipstream.train.folder import RunFolder
from slipstream.train.loop import METRICS_NAME, Evaluation, Observer, accelerator_for, train
from slipstream.train.prepare import fresh_drafter, frozen_ends
from slipstream.train.step import FrozenEnds

_BLOCK_SIZE = 8
_HELD_OUT_SHARE = 0.05
_MOST_HELD_OUT = 100
#: Share of a run's minutes that may go into writing chats, and the least that training gets.
_WRITING, _TRAINING = 0.4, 0.25
#: Chats made at once where the clock decides when to stop.
_SHORT_WAVE = 192

Report = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to make.

    Attributes:
        target: name of the target, as `load_target` takes it.
        out: the run folder.
        data: file or hub data set of chats; None lets the target write its own.
        chats: most chats to write or read; 0 sets no limit to what is read.
        start: drafter to begin from, as `read_zlab` takes it; None makes a new one.
        resume: go on with the run in the folder.
        force: throw away the run in the folder.
    """

    target: str
    out: Path
    data: str | None = None
    chats: int = 20_000
    start: Path | None = None
    resume: bool = False
    force: bool = False
    drafter: DrafterOptions = DrafterOptions()
    synthesis: SynthesisOptions = SynthesisOptions()
    training: TrainOptions = TrainOptions()
    loading: TargetOptions = TargetOptions()


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        drafter: folder of the drafter.
        steps: optimiser steps done.
        seconds: of training, over all sittings.
        chats: trained on and held out.
        answer_tokens: trained on.
        acceptance_length: teacher-forced on held-out chats; None where none was held out.
        decoded: by greedy decoding of held-out prompts.
        hit_rate: teacher-forced, per slot.
        workloads: tokens per round of greedy decoding after bundled prompts, by workload; empty where none
            was asked for or the target has no chat template.
    """

    drafter: Path
    steps: int
    seconds: float
    chats: int
    answer_tokens: int
    acceptance_length: float | None
    decoded: float | None
    hit_rate: tuple[float, ...]
    workloads: dict[str, float]


def train_drafter(plan: Plan, report: Report = print, observe: Observer | None = None) -> Result:
    """Run all steps, on every process that Accelerate has started.

    The main process writes chats, features on disk and the drafter; the others read and train with it.

    Args:
        plan: what to make.
        report: gets lines about the steps.
        observe: is told of every training step.

    Returns:
        What came of it; on processes other than the main one without held-out figures.

    Raises:
        InputError: no chats, or a run in the folder that belongs to another plan.
        TrainingError: the loss is not a number.
    """
    begun, plan = time.perf_counter(), replace(plan, training=_with_rate(plan))
    accelerator = accelerator_for(plan.training, plan.out)
    main = accelerator.is_main_process
    folder = RunFolder(plan.out)
    if main:
        folder.open(_asked(plan), plan.resume, plan.force)
    else:
        report, observe = _silent, None
    target = load_target(plan.target, plan.loading, report)
    # Before hours of writing, not after.
    drafter = None if plan.start is None else _started(plan.start, target, plan.drafter)
    with accelerator.main_process_first():
        chats = _chats(plan, folder, target, report)
        config = _config(target, plan.drafter) if drafter is None else drafter.config
        held = held_out_numbers(len(chats))
        parts = [chat for n, chat in enumerate(chats) if n not in held], [chats[n] for n in sorted(held)]
        store = _features(plan, target, parts[0], config.target_layer_ids, folder.features, report)
        held_out = None
        if held:
            # On disk in any case: they are few, and every evaluation reads them.
            held_out = _stored(plan, target, parts[1], config.target_layer_ids, folder.held_out, report)
    plain = _plain(plan, target, report)
    if drafter is None:
        drafter, copied = fresh_drafter(config, plain, store, plan.training)
        report(f"the drafter starts from {'late layers of the target' if copied else 'random weights'}")
    run = new_run(drafter, plan.training)
    if restore(run, folder.path):
        report(f"continuing at step {run.step}")
    run.average.draft_vocabulary = _draft_vocabulary(store, drafter, plan)
    options = _within(plan.training, _of_main(time.perf_counter() - begun))
    ends = frozen_ends(plain)
    evaluation = None
    if held_out is not None:
        evaluation = _evaluation(target, ends, held_out, parts[1][: options.decode_prompts])
    forecast = train(run, ends, store, evaluation, options, folder.path, observe, accelerator)
    if not main:
        return _result(run, None, folder, len(chats), store)
    result = _result(run, _take_best(run, forecast, evaluation, folder), folder, len(chats), store)
    result = replace(result, workloads=_by_workload(target, run.average, plan))
    _write(run.average, result, folder, target.info.name)
    return result


def _with_rate(plan: Plan) -> TrainOptions:
    """The options with the peak rate that follows from the beginning, where none is asked for."""
    asked = plan.training.learning_rate
    rate = CONTINUED_RATE if asked is None and plan.start else plan.training.peak_rate
    return replace(plan.training, learning_rate=rate)


def _plain(plan: Plan, target: Target, report: Report) -> Target:
    """The target as training needs it: it copies layers, and packed weights are for decoding only."""
    if not is_packed(target.model):
        return target
    return load_target(plan.target, replace(plan.loading, pack=False), report)


def is_main_process() -> bool:
    """Whether this process is the one that writes files and tells the user."""
    return bool(PartialState().is_main_process)


def _evaluation(target: Target, ends: FrozenEnds, store: Features, prompts: list[Chat]) -> Evaluation:
    """Held-out figures: teacher-forced, and by decoding where there are prompts."""

    def evaluation(run: Run) -> Forecast:
        forecast = evaluate(run.average, ends, store)
        decoded = decoded_acceptance(target, run.average, prompts) if prompts else None
        return replace(forecast, decoded=decoded)

    return evaluation


def _by_workload(target: Target, drafter: Drafter, plan: Plan) -> dict[str, float]:
    """What the finished drafter does for prompts unlike those it was trained on."""
    renderer = renderer_for(target, plan.synthesis.thinking)
    if renderer is None or not plan.training.workload_prompts:
        return {}
    return acceptance_by_workload(target, drafter, renderer, plan.training.workload_prompts)


def _write(drafter: Drafter, result: Result, folder: RunFolder, target: str) -> None:
    """Leave the drafter with its card, and the curve."""
    write_zlab(drafter, folder.drafter, force=True)
    draw_curve(folder.path / METRICS_NAME, folder.path / "curve.png")
    text = card(folder.record(), result, target, drafter.config)
    (folder.drafter / "README.md").write_text(text, encoding="utf-8")


def _silent(line: str) -> None:
    """Reports of all processes but one."""


def _of_main(seconds: float) -> float:
    """The main process's clock, so that all processes stop at the same step."""
    shared: list[float] = broadcast_object_list([seconds])
    return shared[0]


def _features(
    plan: Plan, target: Target, chats: list[Chat], taps: tuple[int, ...], path: Path, report: Report
) -> Features:
    """Features of chats, on disk or live."""
    if plan.training.features == "live":
        return LiveFeatures(target, chats, taps)
    return _stored(plan, target, chats, taps, path, report)


def _stored(
    plan: Plan, target: Target, chats: list[Chat], taps: tuple[int, ...], path: Path, report: Report
) -> Features:
    """Features of chats in a folder, computed as far as they are not there yet."""
    workers = Workers(plan.training.workers, plan.target, plan.loading)
    extract_features(target, chats, taps, path, report=report, workers=workers)
    return FeatureStore(path)


def _asked(plan: Plan) -> dict[str, Any]:
    """The options that a run is held to."""
    return {
        "target": plan.target,
        "data": plan.data,
        "chats": plan.chats,
        "start": None if plan.start is None else str(plan.start),
        "drafter": asdict(plan.drafter),
        "synthesis": asdict(plan.synthesis),
        "training": asdict(plan.training),
        "loading": asdict(plan.loading),
    }


def _chats(plan: Plan, folder: RunFolder, target: Target, report: Report) -> list[Chat]:
    """Chats of the plan's data, of an earlier sitting, or new ones."""
    renderer = renderer_for(target, plan.synthesis.thinking)
    source: str | Path = folder.chats if plan.data is None else plan.data
    if plan.data is None and not folder.chats.exists():
        engine = Engine(target, None, EngineOptions(max_rows=CHAT_ROWS))
        minutes = plan.training.minutes * _WRITING
        wanted = ChatPlan(plan.chats, options=plan.synthesis, minutes=minutes)
        if minutes:
            wanted = replace(wanted, wave=_SHORT_WAVE)
        made = make_chats(target, engine, wanted, folder.chats, report=report)
        report(f"{made.chats} chats, {made.answer_tokens} answer tokens in {made.seconds:.0f} s")
    ids = None if target.tokenizer is None else text_ids(target)
    reading = read_chats(source, renderer, ids, plan.synthesis.thinking, plan.chats or None)
    if reading.skipped:
        report(f"{reading.skipped} records of {source} have no answer and are left out")
    if not reading.chats:
        raise InputError(f"{source} holds no chat with an answer, so there is nothing to train on")
    outside = next(
        (t for c in reading.chats for t in c.token_ids if not 0 <= t < target.info.vocab_size), None
    )
    if outside is not None:
        raise InputError(
            f"{source} holds token {outside}, which is outside the vocabulary of {target.info.name}"
        )
    return [_shortened(chat, target.info.max_context) for chat in reading.chats]


def _shortened(chat: Chat, longest: int) -> Chat:
    """A chat that fits the target's context: its end is cut off."""
    if len(chat.token_ids) <= longest:
        return chat
    answers = tuple((start, min(end, longest)) for start, end in chat.answers if start < longest)
    return replace(chat, token_ids=chat.token_ids[:longest], answers=answers)


def held_out_numbers(count: int) -> frozenset[int]:
    """Numbers of the chats that are held out, spread evenly; none of a single chat."""
    if count < 2:
        return frozenset()
    held = max(1, min(_MOST_HELD_OUT, int(count * _HELD_OUT_SHARE)))
    return frozenset((n * count) // held for n in range(held))


def _started(path: Path, target: Target, options: DrafterOptions) -> Drafter:
    """An existing drafter, in float32; only its blocks may be asked to be of another size."""
    drafter = read_zlab(path).float().train().requires_grad_(True)
    if drafter.config.target_width != target.info.width:
        raise InputError(
            f"the drafter in {path} reads a target of width {drafter.config.target_width}, "
            f"but {target.info.name} has width {target.info.width}"
        )
    if options.block_size:
        drafter.config = replace(drafter.config, block_size=options.block_size)
    return drafter


def _config(target: Target, options: DrafterOptions) -> DraftConfig:
    """The drafter's shape for this target."""
    return DraftConfig.for_target(
        target.info,
        num_layers=options.num_layers,
        block_size=options.block_size or _BLOCK_SIZE,
        num_taps=options.taps,
        mask_token_id=None if options.mask_token_id < 0 else options.mask_token_id,
    )


def _draft_vocabulary(store: Features, drafter: Drafter, plan: Plan) -> Tensor | None:
    """The commonest tokens of the data, ascending; None where all are drafted.

    Data that shows fewer different tokens says nothing of the others: then what the drafter to begin from
    drafts stays (nothing, of a new one, which learns nothing of tokens that are never shown), and what the
    data shows is added; where it drafts from all, so does the new one.
    """
    count, vocab_size = plan.training.draft_vocabulary, drafter.config.vocab_size
    before = drafter.draft_vocabulary if plan.start else torch.empty(0, dtype=torch.int64)
    if count == 0 or count * 2 > vocab_size:
        return None
    counts = store.token_counts(vocab_size)
    if int((counts > 0).sum()) < count:
        return None if before is None else torch.cat([before, counts.nonzero()[:, 0]]).unique()
    return counts.topk(count).indices.sort().values


def _within(options: TrainOptions, used_s: float) -> TrainOptions:
    """What is left of the run's minutes once chats and features are there; training gets a quarter at
    least.
    """
    if not options.minutes:
        return options
    return replace(options, minutes=max(options.minutes - used_s / 60, options.minutes * _TRAINING))


def _take_best(
    run: Run, forecast: Forecast | None, evaluation: Evaluation | None, folder: RunFolder
) -> Forecast | None:
    """Put the best weights back where the last ones fell behind."""
    if forecast is None or evaluation is None or forecast.acceptance_length >= run.best:
        return forecast
    weights = read_best(folder.path)
    if weights is None:
        return forecast
    run.average.load_state_dict(weights)
    return evaluation(run)


def _result(run: Run, forecast: Forecast | None, folder: RunFolder, chats: int, store: Features) -> Result:
    return Result(
        drafter=folder.drafter,
        steps=run.step,
        seconds=round(run.seconds, 1),
        chats=chats,
        answer_tokens=store.answer_tokens(),
        acceptance_length=None if forecast is None else forecast.acceptance_length,
        decoded=None if forecast is None else forecast.decoded,
        hit_rate=() if forecast is None else forecast.hit_rate,
        workloads={},
    )
