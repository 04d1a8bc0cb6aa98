"""The training loop: features in, checkpoints and metrics out; can be killed at any moment and continued.

Processes, devices and mixed precision are Accelerate's. Every process computes its share of a step's
documents; the loss is divided by the blocks of the whole step, so the number of processes does not change it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState
from accelerate.utils import FullyShardedDataParallelPlugin, parse_flag_from_env
from torch import Tensor

from slipstream.core.errors import InputError, MissingExtraError, TrainingError
from slipstream.core.options import TrainOptions
from slipstream.data.blocks import BlockBatch
from slipstream.data.features import Features
from slipstream.model import DraftConfig
from slipstream.target.device import choose_dtype
from slipstream.train import sharding
from slipstream.train.batches import Batches
from slipstream.train.checkpoint import Run, place, save, save_best, state_of
from slipstream.train.evaluate import Forecast
from slipstream.train.metrics import METRICS_NAME, drop_later_metrics, log_step
from slipstream.train.step import BlockLoss, FrozenEnds

_RECENT = 50
#: How long processes wait for the main one, which may write chats and features for hours. A process that has
#: died is noticed by what launched it.
_PATIENCE = timedelta(days=1)


@dataclass(frozen=True)
class Progress:
    """Where a run stands, told after every step.

    Attributes:
        step: optimiser steps done.
        share: of the run, 0 to 1.
        loss: of the step, per block.
        acceptance_length: mean of the last steps' training batches.
        tokens_per_second: tokens of chats read, over this sitting.
        seconds_left: expected.
        forecast: of the step's evaluation, where there was one.
    """

    step: int
    share: float
    loss: float
    acceptance_length: float
    tokens_per_second: float
    seconds_left: float
    forecast: Forecast | None = None


Observer = Callable[[Progress], None]
Evaluation = Callable[[Run], Forecast]
"""Scores the averaged weights on held-out chats."""


def train(
    run: Run,
    ends: FrozenEnds,
    store: Features,
    evaluation: Evaluation | None,
    options: TrainOptions,
    folder: Path,
    observe: Observer | None = None,
    accelerator: Accelerator | None = None,
) -> Forecast | None:
    """Train until the options' steps, epochs or minutes are used up.

    Args:
        run: from `new_run`, or continued with `restore`.
        ends: the target's embedding and head.
        store: training documents.
        evaluation: scores held-out chats now and then; None skips it.
        options: loss, schedule and batch settings.
        folder: receives checkpoints and metrics.
        observe: is told of every step.
        accelerator: of a run on several processes; None makes one for this process. With FSDP the run's
            weights are split until training ends; then they are whole on every process.

    Returns:
        The last forecast.

    Raises:
        InputError: the features were taken from other layers than the drafter reads, or a file cannot be
            written.
        TrainingError: the loss is not a number; the batch is named and the last checkpoint is whole.
    """
    _check_features(run.drafter.config, store)
    folder.mkdir(parents=True, exist_ok=True)
    loop = _Loop(run, ends, store, options, accelerator or accelerator_for(options, folder))
    _open_tracker(loop.accelerator, options)
    if loop.main:
        drop_later_metrics(folder / METRICS_NAME, run.step)
    forecast = None
    begun, read = time.perf_counter(), 0
    share = loop.share()
    while share < 1:
        started = time.perf_counter()
        loss, acceptance, tokens = loop.step(share)
        run.seconds += time.perf_counter() - started
        read += tokens
        run.recent = [*run.recent[1 - _RECENT :], acceptance]
        share = loop.share()  # asked by all processes, as they agree on it
        due = run.step % options.evaluate_every == 0 or share >= 1
        now = loop.evaluated(evaluation, folder) if evaluation and due else None
        forecast = now or forecast
        loop.record(folder, loss, acceptance, now, share >= 1)
        if observe is not None:
            left = max(0.0, run.seconds * (1 - share) / share) if share > 0 else math.inf
            rate = read / (time.perf_counter() - begun)
            observe(Progress(run.step, share, loss, recent_mean(run), rate, left, now))
    loop.finish()
    if forecast is None and evaluation and loop.main:
        forecast = evaluation(run)
    return forecast


def accelerator_for(options: TrainOptions, folder: Path | None = None, **arguments: Any) -> Accelerator:
    """Accelerate with the options' precision: products in bf16 where that is asked for or pays, weights in
    fp32.

    Args:
        options: precision and tracker.
        folder: for files of the tracker.
        **arguments: passed on to Accelerate.

    Raises:
        InputError: FSDP is asked for with settings that training does not follow.
    """
    # Accelerate looks for processes on a CPU only where it is told to.
    asked = arguments.pop("cpu", False) or parse_flag_from_env("ACCELERATE_USE_CPU")
    cpu = asked or not torch.accelerator.is_available()
    half = choose_dtype(options.precision, PartialState(cpu, timeout=_PATIENCE).device) == torch.bfloat16
    # The state is the process's; a second run in one process may want another precision.
    AcceleratorState._reset_state()
    tracker = None if options.tracker == "none" else options.tracker
    plugin = FullyShardedDataParallelPlugin() if parse_flag_from_env("ACCELERATE_USE_FSDP") else None
    if plugin is not None:
        sharding.check_plugin(plugin)
    precision = "bf16" if half else "no"
    accelerator = Accelerator(
        cpu=cpu, mixed_precision=precision, log_with=tracker, project_dir=folder, **arguments
    )
    if plugin is not None and accelerator.num_processes > 1:
        # Accelerate itself keeps it on accelerators only; torch splits on a CPU as well.
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def _open_tracker(accelerator: Accelerator, options: TrainOptions) -> None:
    if options.tracker == "none":
        return
    if not accelerator.log_with:
        raise MissingExtraError(options.tracker, "train")
    accelerator.init_trackers("slipstream", config=asdict(options))


def _figures(loss: float, acceptance: float, forecast: Forecast | None) -> dict[str, float]:
    """What a tracker shows of a step."""
    figures = {"loss": loss, "acceptance_length": acceptance}
    if forecast is not None:
        figures["held_out"] = forecast.acceptance_length
        if forecast.decoded is not None:
            figures["held_out_decoded"] = forecast.decoded
    return figures


def rate_at(progress: float, options: TrainOptions) -> float:
    """Learning rate at a share of the run: linear warm-up, then cosine down to `final_rate` of the peak."""
    if progress < options.warmup:
        return options.peak_rate * (progress / options.warmup)
    rest = (progress - options.warmup) / max(1 - options.warmup, 1e-9)
    cosine = 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))
    return options.peak_rate * (options.final_rate + (1 - options.final_rate) * cosine)


def recent_mean(run: Run) -> float:
    """Mean acceptance length of the last batches of this sitting; 0.0 before the first."""
    return sum(run.recent) / max(len(run.recent), 1)


class _Loop:
    """One process's part of the steps."""

    def __init__(
        self,
        run: Run,
        ends: FrozenEnds,
        store: Features,
        options: TrainOptions,
        accelerator: Accelerator,
    ) -> None:
        self.accelerator, self._run, self._options = accelerator, run, options
        self.main = accelerator.is_main_process
        self._batches = Batches(store, options, run.drafter.config.block_size - 1)
        self._steps = options.max_steps
        if options.epochs:
            self._steps = max(1, round(options.epochs * self._batches.steps_per_epoch))
        # A GPU computes while the host reads, or has the target compute, what comes next.
        overlaps = accelerator.device.type == "cuda"
        self._drawer = ThreadPoolExecutor(1) if overlaps else None
        self._ahead: Future[list[BlockBatch | None]] | None = None
        frequent = _frequent_tokens(store, run.drafter.config.vocab_size, options.vocabulary)
        device = accelerator.device
        ends = FrozenEnds(ends.embed, ends.output_VD.to(device))
        place(run, device)
        frequent = frequent if frequent is None else frequent.to(device)
        module = BlockLoss(run.drafter, ends, options, frequent)
        plugin = getattr(accelerator.state, "fsdp_plugin", None)
        self._split = plugin is not None
        if plugin is None:
            self._module: torch.nn.Module = accelerator.prepare_model(module)
        else:
            self._module = module
            sharding.split(run, module, accelerator, plugin)

    def share(self) -> float:
        """How much of the run is done, by time or by steps; the same on all processes."""
        if self._options.minutes <= 0:
            return self._run.step / self._steps
        seconds = torch.tensor(self._run.seconds, device=self.accelerator.device)
        if self.accelerator.num_processes > 1:
            seconds = self.accelerator.reduce(seconds, "mean")
        return float(seconds) / (self._options.minutes * 60)

    def step(self, share: float) -> tuple[float, float, int]:
        """Forward, backward, update, average; loss per block, mean acceptance length, tokens read."""
        options, run, accelerator = self._options, self._run, self.accelerator
        _set_rate(run, max(rate_at(share, options), options.peak_rate * 1e-3))
        parts = options.accumulate * accelerator.num_processes
        mine = range(accelerator.process_index, parts, accelerator.num_processes)
        batches = self._drawn(run.step, mine, parts)
        counts = torch.tensor([0.0, 0.0, 0.0], device=accelerator.device)
        blocks = torch.tensor(
            float(sum(b.blocks for b in batches if b is not None)), device=accelerator.device
        )
        # Gradients are averaged over processes; dividing by the mean number of blocks makes that the step's
        # mean.
        mean_blocks = _reduced(accelerator, blocks) / accelerator.num_processes
        for number, (part, batch) in enumerate(zip(mine, batches, strict=True)):
            if batch is not None or accelerator.num_processes > 1:
                last = number + 1 == len(batches)
                counts += self._pass(batch, part, parts, mean_blocks, last)
        loss, lengths_sum, number = _reduced(accelerator, counts).tolist()  # host: once a step
        if not math.isfinite(loss):
            raise TrainingError(
                f"the loss of step {run.step + 1} is not a number; its chats are numbers "
                f"{self._batches.numbers(run.step)}. The last checkpoint is whole; a lower "
                "--learning-rate may help"
            )
        accelerator.clip_grad_norm_(run.drafter.parameters(), options.clip)
        for optimizer in run.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        run.step += 1
        _update_average(run, options.average)
        if self._ahead is not None:
            # Whoever comes next may want the target for itself.
            wait([self._ahead])
        tokens = sum(self._batches.lengths(run.step - 1))
        return loss / max(number, 1), lengths_sum / max(number, 1), tokens

    def _pass(
        self, batch: BlockBatch | None, part: int, parts: int, mean_blocks: Tensor, last: bool
    ) -> Tensor:
        """Forward and backward of one batch; its summed loss, accepted tokens and blocks."""
        accelerator, step = self.accelerator, self._run.step
        # Processes exchange weights or gradients in every pass, so one with nothing to do passes a batch of
        # another for nothing.
        real = batch is not None
        batch = self._batches.batch(step, 0, parts) if batch is None else batch
        assert batch is not None
        # Whole gradients are exchanged with the last batch only; split ones with every one, to save memory.
        quiet = not last and not self._split
        with accelerator.no_sync(self._module) if quiet else nullcontext():
            with accelerator.autocast():
                result = self._module(batch.to(accelerator.device), self._batches.noise(step, part))
            accelerator.backward(result.loss * float(real) / mean_blocks)
        lengths = result.acceptance_BA[result.real_BA].float()
        counts = torch.stack([result.loss.detach(), lengths.sum(), lengths.new_tensor(len(lengths))])
        return counts * float(real)

    def record(
        self, folder: Path, loss: float, acceptance: float, forecast: Forecast | None, over: bool
    ) -> None:
        """Metrics of the last step, and now and then a checkpoint."""
        run = self._run
        if self.main:
            log_step(folder / METRICS_NAME, run, loss, acceptance, forecast)
            self.accelerator.log(_figures(loss, acceptance, forecast), step=run.step)
        if run.step % self._options.save_every == 0 or over:
            state = sharding.gathered(state_of(run), keep=self.main) if self._split else None
            if self.main:
                save(run, folder, state)

    def evaluated(self, evaluation: Evaluation, folder: Path) -> Forecast | None:
        """The main process evaluates the averaged weights and keeps them if they are the best so far."""
        run = self._run
        if self._split:
            whole = sharding.whole_drafter(run.average, self.accelerator.device, keep=self.main)
            run = run if whole is None else replace(run, average=whole)
        if not self.main:
            return None
        forecast = evaluation(run)
        if forecast.acceptance_length > run.best:
            self._run.best = run.best = forecast.acceptance_length
            save_best(run, folder)
        return forecast

    def finish(self) -> None:
        """Leave a whole run behind."""
        if self._split:
            sharding.join(self._run)
        self.accelerator.wait_for_everyone()
        self.accelerator.end_training()

    def _drawn(self, step: int, mine: range, parts: int) -> list[BlockBatch | None]:
        """The step's batches, drawn while the step before was computed where there was one."""

        def draw(number: int) -> list[BlockBatch | None]:
            return [self._batches.batch(number, part, parts) for part in mine]

        ready, self._ahead = self._ahead, None
        batches = draw(step) if ready is None else ready.result()
        if self._drawer is not None:
            self._ahead = self._drawer.submit(draw, step + 1)
        return batches


def _reduced(accelerator: Accelerator, values: Tensor) -> Tensor:
    """Sum over all processes."""
    if accelerator.num_processes == 1:
        return values
    total: Tensor = accelerator.reduce(values, "sum")
    return total


def _set_rate(run: Run, rate: float) -> None:
    for optimizer in run.optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


@torch.no_grad()
def _update_average(run: Run, decay: float) -> None:
    """Running average; young runs use a shorter memory so that early weights are forgotten."""
    decay = min(decay, run.step / (run.step + 10))
    for mean, now in zip(run.average.parameters(), run.drafter.parameters(), strict=True):
        mean.lerp_(now, 1 - decay)


def _frequent_tokens(store: Features, vocab_size: int, count: int) -> Tensor | None:
    """The commonest tokens of the data; None when the whole vocabulary is to be scored."""
    if count == 0 or count >= vocab_size:
        return None
    return store.token_counts(vocab_size).topk(count).indices


def _check_features(config: DraftConfig, store: Features) -> None:
    """Refuse features of other layers or another width."""
    index = store.index
    if index.target_layer_ids != config.target_layer_ids or index.width != config.target_width:
        raise InputError(
            f"features hold layers {list(index.target_layer_ids)} of width {index.width}, but the drafter "
            f"reads layers {list(config.target_layer_ids)} of width {config.target_width}"
        )
