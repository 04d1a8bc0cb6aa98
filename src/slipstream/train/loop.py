"""The training loop: shards in, checkpoints and a drafter out; can be stopped at any step and continued."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.errors import InputError
from slipstream.core.options import TrainOptions
from slipstream.data.blocks import BlockBatch, build_batch, draw_anchors
from slipstream.data.features import FeatureStore
from slipstream.model import DraftConfig, Drafter
from slipstream.train.evaluate import Forecast, evaluate
from slipstream.train.muon import Muon
from slipstream.train.step import FrozenEnds, run_step

CHECKPOINT_NAME = "state.pt"
LOG_NAME = "log.jsonl"


@dataclass
class Run:
    """Everything that changes during training; all but `recent` is in a checkpoint.

    Attributes:
        drafter: the weights being trained, float32.
        average: their running average, which is evaluated and exported.
        optimizers: one or two.
        step: optimiser steps done.
        seconds: training time so far, over all sittings.
        generator: draws order and anchors.
        recent: acceptance lengths of the last batches, for the progress lines.
    """

    drafter: Drafter
    average: Drafter
    optimizers: list[torch.optim.Optimizer]
    generator: torch.Generator
    step: int = 0
    seconds: float = 0.0
    recent: list[float] = field(default_factory=list)


def new_run(drafter: Drafter, options: TrainOptions) -> Run:
    """Begin a run from a drafter's present weights."""
    generator = torch.Generator().manual_seed(options.seed)
    average = deepcopy(drafter).requires_grad_(False)
    return Run(drafter, average, _optimizers(drafter, options), generator)


def train(
    run: Run,
    ends: FrozenEnds,
    store: FeatureStore,
    held_out: FeatureStore | None,
    options: TrainOptions,
    folder: Path,
    report: Callable[[str], None] = print,
) -> Forecast | None:
    """Train until the options' steps or minutes are used up.

    Args:
        run: from `new_run`, or continued with `restore`.
        ends: the target's embedding and head.
        store: training documents.
        held_out: documents for the forecast; None skips it.
        options: loss, schedule and batch settings.
        folder: receives checkpoints and a log.
        report: gets one line of progress at a time.

    Returns:
        The last forecast.

    Raises:
        InputError: the features were taken from other layers than the drafter reads.
    """
    _check_features(run.drafter.config, store)
    folder.mkdir(parents=True, exist_ok=True)
    frequent = _frequent_tokens(store, run.drafter.config.vocab_size, options.vocabulary)
    forecast = None
    batches = _batches(store, run, options)
    while (progress := _progress(run, options)) < 1:
        begun = time.perf_counter()
        acceptance = _one_step(run, ends, next(batches), options, frequent, progress)
        run.seconds += time.perf_counter() - begun
        run.recent = [*run.recent[-49:], acceptance]
        if run.step % options.save_every == 0:
            save(run, folder)
        if run.step % options.evaluate_every == 0:
            forecast = _note(run, ends, held_out, folder, report)
        elif run.step % 20 == 0:
            report(_line(run))
    save(run, folder)
    return _note(run, ends, held_out, folder, report) if held_out is not None else forecast


def save(run: Run, folder: Path) -> None:
    """Write a checkpoint that `restore` continues from; only the current pass over the data is begun anew."""
    state = {
        "drafter": run.drafter.state_dict(),
        "average": run.average.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "generator": run.generator.get_state(),
        "torch": torch.get_rng_state(),
        "step": run.step,
        "seconds": run.seconds,
    }
    torch.save(state, folder / (CHECKPOINT_NAME + ".tmp"))
    os.replace(folder / (CHECKPOINT_NAME + ".tmp"), folder / CHECKPOINT_NAME)


def restore(run: Run, folder: Path) -> bool:
    """Continue from the folder's checkpoint, if it has one.

    Raises:
        InputError: the checkpoint is of another drafter shape.
    """
    path = folder / CHECKPOINT_NAME
    if not path.exists():
        return False
    state = torch.load(path, weights_only=True)
    try:
        run.drafter.load_state_dict(state["drafter"])
    except RuntimeError as error:
        raise InputError(f"{path} is a checkpoint of a drafter of another shape") from error
    run.average.load_state_dict(state["average"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.generator.set_state(state["generator"])
    torch.set_rng_state(state["torch"])
    run.step, run.seconds = state["step"], state["seconds"]
    return True


def rate_at(progress: float, options: TrainOptions) -> float:
    """Learning rate at a share of the run: linear warm-up, then cosine down to `final_rate` of the peak."""
    if progress < options.warmup:
        return options.learning_rate * (progress / options.warmup)
    rest = (progress - options.warmup) / max(1 - options.warmup, 1e-9)
    cosine = 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))
    return options.learning_rate * (options.final_rate + (1 - options.final_rate) * cosine)


def _progress(run: Run, options: TrainOptions) -> float:
    """Share of the run that is done, by time or by steps."""
    return run.seconds / (options.minutes * 60) if options.minutes > 0 else run.step / options.steps


def _one_step(
    run: Run,
    ends: FrozenEnds,
    batch: BlockBatch,
    options: TrainOptions,
    frequent: Tensor | None,
    progress: float,
) -> float:
    """Forward, backward, update, average; the batch's mean acceptance length."""
    # The first step would have rate 0 in the warm-up; a small floor keeps it from being lost.
    rate = max(rate_at(progress, options), options.learning_rate * 1e-3)
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
    result = run_step(run.drafter, ends, batch, options, frequent)
    result.loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(run.drafter.parameters(), options.clip)
    for optimizer in run.optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    run.step += 1
    _update_average(run, options.average)
    return float(result.acceptance_BA[result.real_BA].float().mean())


@torch.no_grad()
def _update_average(run: Run, decay: float) -> None:
    """Running average; young runs use a shorter memory so that early weights are forgotten."""
    decay = min(decay, run.step / (run.step + 10))
    for mean, now in zip(run.average.parameters(), run.drafter.parameters(), strict=True):
        mean.lerp_(now, 1 - decay)


def _optimizers(drafter: Drafter, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for matrices and AdamW for norms."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    vectors = [p for p in drafter.parameters() if p.ndim != 2]
    adam = {"lr": options.learning_rate, "betas": (0.9, 0.95)}
    if options.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, **adam)]  # type: ignore[arg-type]
    muon = Muon(matrices, lr=options.learning_rate, weight_decay=options.weight_decay)
    return [muon, torch.optim.AdamW(vectors, weight_decay=0.0, **adam)]  # type: ignore[arg-type]


def _batches(store: FeatureStore, run: Run, options: TrainOptions) -> Iterator[BlockBatch]:
    """Endless batches: documents shuffled each pass, neighbours of similar length padded together."""
    while True:
        order = torch.randperm(len(store), generator=run.generator).tolist()
        for pool in _chunks(order, options.documents * 16):
            pool.sort(key=store.length)
            groups = _chunks(pool, options.documents)
            for number in torch.randperm(len(groups), generator=run.generator).tolist():
                batch = _draw(store, groups[number], run, options)
                if batch is not None:
                    yield batch


def _draw(store: FeatureStore, numbers: list[int], run: Run, options: TrainOptions) -> BlockBatch | None:
    """One batch of the named documents; None where none of them has an answer long enough."""
    documents = [store[number] for number in numbers]
    anchors = [draw_anchors(doc, options.anchors, run.generator) for doc in documents]
    kept = [(doc, anchor) for doc, anchor in zip(documents, anchors, strict=True) if len(anchor)]
    if not kept:
        return None
    return build_batch(
        [doc for doc, _ in kept], [anchor for _, anchor in kept], run.drafter.config.block_size - 1
    )


def _chunks(items: list[int], size: int) -> list[list[int]]:
    """Cut a list into pieces of at most `size`."""
    return [items[start : start + size] for start in range(0, len(items), size)]


def _frequent_tokens(store: FeatureStore, vocab_size: int, count: int) -> Tensor | None:
    """The commonest tokens of the data; None when the whole vocabulary is to be scored."""
    if count == 0 or count >= vocab_size:
        return None
    return store.token_counts(vocab_size).topk(count).indices


def _check_features(config: DraftConfig, store: FeatureStore) -> None:
    """Refuse features of other layers or another width."""
    index = store.index
    if index.target_layer_ids != config.target_layer_ids or index.width != config.target_width:
        raise InputError(
            f"features hold layers {list(index.target_layer_ids)} of width {index.width}, but the drafter "
            f"reads layers {list(config.target_layer_ids)} of width {config.target_width}"
        )


def _line(run: Run) -> str:
    """One line of progress."""
    mean = _recent_mean(run)
    return f"step {run.step}, {run.seconds / 60:.1f} min, training acceptance length {mean:.3f}"


def _recent_mean(run: Run) -> float:
    """Mean acceptance length of the last batches of this sitting; 0.0 before the first."""
    return sum(run.recent) / max(len(run.recent), 1)


def _note(
    run: Run, ends: FrozenEnds, held_out: FeatureStore | None, folder: Path, report: Callable[[str], None]
) -> Forecast | None:
    """Evaluate the averaged weights, log a JSON line, report it."""
    if held_out is None:
        return None
    forecast = evaluate(run.average, ends, held_out)
    entry = {
        "step": run.step,
        "seconds": round(run.seconds, 1),
        "training": _recent_mean(run),
    }
    with (folder / LOG_NAME).open("a") as log:
        log.write(json.dumps(entry | asdict(forecast)) + "\n")
    rates = " ".join(f"{rate:.3f}" for rate in forecast.hit_rate)
    report(f"{_line(run)}, held-out {forecast.acceptance_length:.3f} (hit rate by slot {rates})")
    return forecast
