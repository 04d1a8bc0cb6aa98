"""Run as a program: trains in a child process that is killed again and again, then to the end.

Usage: killing.py FOLDER KILLS. A forked child starts within milliseconds, so many kills fit into a test.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from slipstream.core.options import TrainOptions
from slipstream.data.features import FeatureIndex, FeatureStore, write_index, write_shard
from slipstream.model import Drafter
from slipstream.train.checkpoint import new_run, restore
from slipstream.train.evaluate import evaluate
from slipstream.train.loop import train
from slipstream.train.step import FrozenEnds
from tests.train.tiny import random_document, tiny_config

OPTIONS = TrainOptions(
    max_steps=1600,
    documents=3,
    anchors=4,
    precision="float32",
    vocabulary=20,
    feature_noise=0.1,
    evaluate_every=100,
    save_every=3,
    average=0.9,
)


def store_in(folder: Path) -> FeatureStore:
    """Features of random documents."""
    folder.mkdir(parents=True)
    documents = [random_document(12 + n, 3, seed=n) for n in range(10)]
    mark = write_shard(folder / "shard-0.safetensors", documents)
    write_index(folder, FeatureIndex("tiny", (0, 1), 16, 3, shards={"shard-0.safetensors": mark}))
    return FeatureStore(folder)


def ends() -> FrozenEnds:
    """A random embedding and head."""
    table_VD = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    return FrozenEnds(lambda ids: table_VD[ids], table_VD)


def sitting(store: FeatureStore, folder: Path, options: TrainOptions = OPTIONS) -> None:
    """From the last checkpoint to the end."""
    torch.manual_seed(5)
    run = new_run(Drafter(tiny_config()), options)
    restore(run, folder)
    frozen = ends()
    train(run, frozen, store, lambda run: evaluate(run.average, frozen, store, 3), options, folder)
    torch.save(run.average.state_dict(), folder / "final.pt")


def main(folder: Path, kills: int) -> None:
    """Kill a child `kills` times, let the last one finish."""
    torch.set_num_threads(1)
    store = store_in(folder / "features")
    draw, killed = random.Random(0), 0
    while True:
        child = os.fork()
        if child == 0:
            sitting(store, folder / "killed")
            os._exit(0)
        if killed < kills:
            time.sleep(draw.uniform(0.02, 0.25))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
            killed += 1
        elif status == 0:
            break
        else:
            raise SystemExit(f"the child ended with status {status}")
    print(killed)
    sitting(store, folder / "whole")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
