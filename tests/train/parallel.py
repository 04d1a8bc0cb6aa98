"""Run by one process or two at once: trains and leaves the losses; see test_parallel.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState

from slipstream.data.features import FeatureStore
from slipstream.model import Drafter
from slipstream.train.checkpoint import new_run, restore
from slipstream.train.evaluate import evaluate
from slipstream.train.loop import accelerator_for, train
from tests.train.killing import OPTIONS, ends, store_in
from tests.train.tiny import tiny_config


def job(folder: Path, out: str, wishes: dict[str, Any]) -> None:
    """Train, from the folder's checkpoint if it has one; the main process writes weights and figures."""
    options = replace(
        OPTIONS,
        **{"max_steps": 6, "documents": 5, "vocabulary": 0, "feature_noise": 0.0, "evaluate_every": 2}
        | wishes,
    )
    torch.manual_seed(5)
    run = new_run(Drafter(tiny_config(intermediate_size=33)), options)
    restore(run, folder / out)
    store = FeatureStore(folder / "features")
    losses, held, rows = [], [], []
    frozen = ends()
    accelerator = accelerator_for(options, cpu=True)
    accelerator.end_training = accelerator.wait_for_everyone  # the next job needs the processes together

    def observe(progress: Any) -> None:
        losses.append(progress.loss)
        rows.append(
            [len(getattr(d.fc.weight, "_local_tensor", d.fc.weight)) for d in (run.drafter, run.average)]
        )
        if progress.forecast is not None:
            held.append(progress.forecast.acceptance_length)

    train(
        run,
        frozen,
        store,
        lambda run: evaluate(run.average, frozen, store, 3),
        options,
        folder / out,
        observe,
        accelerator,
    )
    if PartialState().is_main_process:
        weights = {"drafter": run.drafter.state_dict(), "average": run.average.state_dict()}
        torch.save(weights, folder / out / "weights.pt")
        sittings = folder / out / "sittings.json"
        figures = {"losses": losses, "held_out": held, "rows": rows}
        before = json.loads(sittings.read_text()) if sittings.exists() else {name: [] for name in figures}
        sittings.write_text(json.dumps({name: before[name] + new for name, new in figures.items()}))


def main(folder: Path, jobs: list[tuple[str, dict[str, Any]]]) -> None:
    """All jobs one after another, as a process takes long to start."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    if state.is_main_process and not (folder / "features").exists():
        store_in(folder / "features")
    state.wait_for_everyone()
    for out, wishes in jobs:
        job(folder, out, wishes)


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
