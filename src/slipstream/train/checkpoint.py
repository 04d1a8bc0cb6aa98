"""What a run needs to go on where it was: written whole or not at all, read back to the last bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.core.errors import InputError
from slipstream.core.options import TrainOptions
from slipstream.model import Drafter
from slipstream.target.device import choose_dtype
from slipstream.train.muon import Muon

LAST, BEST = "last.pt", "best.pt"


@dataclass
class Run:
    """Everything that changes during training; all but `recent` is in a checkpoint.

    Attributes:
        drafter: the weights being trained, float32.
        average: their running average, which is evaluated and exported.
        optimizers: one or two.
        step: optimiser steps done.
        seconds: training time so far, over all sittings.
        best: highest held-out acceptance length so far.
        recent: acceptance lengths of the last batches, for the progress lines.
    """

    drafter: Drafter
    average: Drafter
    optimizers: list[torch.optim.Optimizer]
    step: int = 0
    seconds: float = 0.0
    best: float = 0.0
    recent: list[float] = field(default_factory=list)


def new_run(drafter: Drafter, options: TrainOptions) -> Run:
    """Begin a run from a drafter's present weights."""
    average = deepcopy(drafter).requires_grad_(False)
    return Run(drafter, average, _optimizers(drafter, options))


def place(run: Run, device: torch.device) -> None:
    """Move weights, average and what the optimisers remember of them to a device."""
    run.drafter.to(device)
    run.average.to(device)
    for optimizer in run.optimizers:
        for parameter, state in optimizer.state.items():
            moved = {name: value for name, value in state.items() if value.shape == parameter.shape}
            state.update({name: value.to(device) for name, value in moved.items()})


def state_of(run: Run) -> dict[str, Any]:
    """What `save` writes and `restore` reads; the tensors are the run's own."""
    return {
        "drafter": run.drafter.state_dict(),
        "average": run.average.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in run.optimizers],
        "step": run.step,
        "seconds": run.seconds,
        "best": run.best,
    }


def save(run: Run, folder: Path, state: Mapping[str, Any] | None = None) -> None:
    """Write the checkpoint that `restore` goes on from.

    Args:
        run: whole, unless its state is given.
        folder: of the run.
        state: of a run whose weights are split over processes, made whole.

    Raises:
        InputError: it cannot be written; the one before is still there.
    """
    _write(folder / LAST, state_of(run) if state is None else state)


def restore(run: Run, folder: Path) -> bool:
    """Go on from the folder's checkpoint, if it has one.

    Raises:
        InputError: the checkpoint is damaged, or of another drafter shape or optimiser.
    """
    path = folder / LAST
    if not path.exists():
        return False
    state = _read(path)
    try:
        run.drafter.load_state_dict(state["drafter"])
        run.average.load_state_dict(state["average"])
        for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        run.step, run.seconds, run.best = state["step"], state["seconds"], state["best"]
    except (RuntimeError, ValueError, KeyError) as error:
        raise InputError(
            f"{path} is a checkpoint of a drafter of another shape or another optimiser"
        ) from error
    return True


def save_best(run: Run, folder: Path) -> None:
    """Keep the averaged weights that did best on held-out chats."""
    _write(folder / BEST, {"average": run.average.state_dict(), "step": run.step, "best": run.best})


def read_best(folder: Path) -> Mapping[str, Tensor] | None:
    """The weights that did best, if there are any.

    Raises:
        InputError: the file is damaged.
    """
    if not (folder / BEST).exists():
        return None
    weights: Mapping[str, Tensor] = _read(folder / BEST)["average"]
    return weights


def _write(path: Path, state: Mapping[str, Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        torch.save(state, temporary)
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch turns a full disk into a RuntimeError
        temporary.unlink(missing_ok=True)
        raise InputError(f"cannot write the checkpoint {path}: {error}; the one before is kept") from error


def _read(path: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged archive may raise anything
        raise InputError(f"the checkpoint {path} cannot be read; remove it to begin anew") from error
    return state


def _optimizers(drafter: Drafter, options: TrainOptions) -> list[torch.optim.Optimizer]:
    """AdamW for all, or Muon for matrices and AdamW for norms."""
    matrices = [p for p in drafter.parameters() if p.ndim == 2]
    vectors = [p for p in drafter.parameters() if p.ndim != 2]
    adam = {"lr": options.peak_rate, "betas": (0.9, 0.95)}
    if options.optimizer == "adamw":
        groups = [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        return [torch.optim.AdamW(groups, **adam)]  # type: ignore[arg-type]
    low = choose_dtype(options.precision, matrices[0].device) == torch.bfloat16
    muon = Muon(matrices, lr=options.peak_rate, weight_decay=options.weight_decay, low_precision=low)
    return [muon, torch.optim.AdamW(vectors, weight_decay=0.0, **adam)]  # type: ignore[arg-type]
