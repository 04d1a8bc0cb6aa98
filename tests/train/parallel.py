"""Run by two processes at once: trains a few steps and leaves the losses; see test_parallel.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import PartialState

from slipstream.data.features import FeatureStore
from slipstream.model import Drafter
from slipstream.train.checkpoint import new_run
from slipstream.train.loop import accelerator_for, train
from tests.train.killing import OPTIONS, ends, store_in
from tests.train.tiny import tiny_config


def main(folder: Path, out: str, optimizer: str, accumulate: int) -> None:
    """Train and write the weights and losses of the main process."""
    torch.set_num_threads(1)
    state = PartialState(cpu=True)
    features = folder / "features"
    if state.is_main_process and not features.exists():
        store_in(features)
    state.wait_for_everyone()
    options = replace(
        OPTIONS,
        max_steps=6,
        documents=5,
        vocabulary=0,
        feature_noise=0.0,
        optimizer=optimizer,  # type: ignore[arg-type]
        accumulate=accumulate,
    )
    torch.manual_seed(5)
    run = new_run(Drafter(tiny_config()), options)
    losses: list[float] = []
    train(
        run,
        ends(),
        FeatureStore(features),
        None,
        options,
        folder / out,
        lambda progress: losses.append(progress.loss),
        accelerator_for(options, cpu=True),
    )
    if state.is_main_process:
        torch.save(run.drafter.state_dict(), folder / out / "weights.pt")
        (folder / out / "losses.json").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
