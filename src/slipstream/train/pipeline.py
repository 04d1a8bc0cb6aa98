"""A drafter from nothing but its target: chats, features, training, checkpoint; each step's files are kept.

Every step looks for its own files first, so a run that was stopped continues where it ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.core.errors import InputError
from slipstream.core.options import (
    DrafterOptions,
    EngineOptions,
    SynthesisOptions,
    TargetOptions,
    TrainOptions,
)
from slipstream.data.chats import Chat, read_chats, write_chats
from slipstream.data.extract import extract_features
from slipstream.data.features import FeatureStore
from slipstream.data.synthesize import synthesize
from slipstream.decode import Engine
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target, load_target
from slipstream.train.evaluate import Forecast
from slipstream.train.loop import new_run, restore, train
from slipstream.train.prepare import fresh_drafter, frozen_ends

#: Rows decoded side by side while the target writes its chats; more rows share the reading of the weights.
_ROWS = 64
_HELD_OUT_SHARE = 0.05
_MOST_HELD_OUT = 40

Report = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to make and where to keep the files on the way.

    Attributes:
        target: name of the target, as `load_target` takes it.
        work: folder for chats, features and training state.
        chats: how many chats the target writes.
    """

    target: str
    work: Path
    chats: int
    drafter: DrafterOptions = DrafterOptions()
    synthesis: SynthesisOptions = SynthesisOptions()
    training: TrainOptions = TrainOptions()
    loading: TargetOptions = TargetOptions()


def train_drafter(plan: Plan, report: Report = print) -> tuple[Drafter, Forecast | None]:
    """Run all steps.

    Args:
        plan: what to make.
        report: gets lines of progress.

    Returns:
        The drafter (running average of the weights) and its held-out forecast.

    Raises:
        InputError: too few chats, or files in the work folder that belong to another plan.
    """
    if plan.chats < 2:
        raise InputError(f"at least 2 chats are needed, one of them held out, not {plan.chats}")
    plan.work.mkdir(parents=True, exist_ok=True)
    target = load_target(plan.target, plan.loading, report)
    config = _config(target, plan.drafter)
    chats = _chats(plan, target, report)
    held = max(1, min(_MOST_HELD_OUT, int(len(chats) * _HELD_OUT_SHARE)))
    folders = plan.work / "features", plan.work / "held-out"
    for folder, part in zip(folders, (chats[held:], chats[:held]), strict=True):
        extract_features(target, part, config.target_layer_ids, folder, report=report)
    # Packed weights are for decoding only; training copies layers and needs them as they are.
    plain = load_target(plan.target, replace(plan.loading, pack=False), report)
    store, held_out = FeatureStore(folders[0]), FeatureStore(folders[1])
    drafter, copied = fresh_drafter(config, plain, store, plan.training)
    report(f"drafter starts from {'the last target layers' if copied else 'random weights'}")
    run = new_run(drafter, plan.training)
    if restore(run, plan.work / "run"):
        report(f"continuing at step {run.step}")
    forecast = train(run, frozen_ends(plain), store, held_out, plan.training, plan.work / "run", report)
    return run.average, forecast


def _config(target: Target, options: DrafterOptions) -> DraftConfig:
    """The drafter's shape for this target."""
    return DraftConfig.for_target(
        target.info,
        num_layers=options.layers,
        block_size=options.block_size,
        num_taps=options.taps,
        mask_token_id=None if options.mask_token_id < 0 else options.mask_token_id,
    )


def _chats(plan: Plan, target: Target, report: Report) -> list[Chat]:
    """The chats of an earlier sitting, or new ones."""
    path = plan.work / "chats.jsonl"
    if path.exists():
        chats = read_chats(path)
        if len(chats) < plan.chats:
            raise InputError(
                f"{path} holds {len(chats)} chats, fewer than {plan.chats}; remove it to begin anew"
            )
        return chats[: plan.chats]
    engine = Engine(target, None, EngineOptions(max_rows=_ROWS))
    write_chats(path, synthesize(engine, plan.chats, plan.synthesis, report))
    return read_chats(path)
