"""`slipstream train`: a drafter from nothing but its target."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.session import say
from slipstream.core.errors import InputError
from slipstream.core.options import DrafterOptions, SynthesisOptions, TargetOptions, TrainOptions


def train(
    *,
    target: Annotated[str, Parameter(alias="-t")] = "smollm2",
    out: Annotated[Path, Parameter(alias="-o")],
    work: Path | None = None,
    chats: int = 2000,
    force: bool = False,
    drafter: Annotated[DrafterOptions, Parameter(name="*", group="Drafter")] = DrafterOptions(),
    synthesis: Annotated[SynthesisOptions, Parameter(name="chat", group="Chats")] = SynthesisOptions(),
    training: Annotated[TrainOptions, Parameter(name="*", group="Training")] = TrainOptions(),
    loading: Annotated[TargetOptions, Parameter(name="*", group="Models")] = TargetOptions(),
) -> int:
    """Let the target write its own chats and train a drafter on them; a stopped run continues.

    Args:
        target: the model to draft for: smollm2 (bundled), a hub id, a folder or a GGUF file.
        out: folder of the new drafter, in the layout of the published DFlash checkpoints.
        work: folder for chats, features and training state; OUT.work if not given.
        chats: how many chats the target writes.
        force: overwrite an existing drafter.
    """
    if out.exists() and not force:
        raise InputError(f"{out} exists already; --force overwrites it")
    from slipstream.formats import write_zlab
    from slipstream.train.pipeline import Plan, train_drafter

    folder = work if work is not None else out.with_name(out.name + ".work")
    plan = Plan(target, folder, chats, drafter, synthesis, training, loading)
    made, forecast = train_drafter(plan, say)
    write_zlab(made, out, force=force)
    if forecast is not None:
        print(f"{out}: acceptance length {forecast.acceptance_length:.2f} on held-out chats, teacher-forced")
    return 0
