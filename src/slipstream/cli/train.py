"""`slipstream train`: a drafter from nothing but its target, or from data."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.session import say
from slipstream.core.options import DrafterOptions, SynthesisOptions, TargetOptions, TrainOptions


def train(
    *,
    target: Annotated[str, Parameter(alias="-t")] = "smollm2",
    out: Annotated[Path, Parameter(alias="-o")],
    data: str | None = None,
    chats: int | None = None,
    start: Annotated[Path | None, Parameter(name="--from")] = None,
    resume: bool = False,
    force: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    drafter: Annotated[DrafterOptions, Parameter(name="*", group="Drafter")] = DrafterOptions(),
    synthesis: Annotated[SynthesisOptions, Parameter(name="chat", group="Chats")] = SynthesisOptions(),
    training: Annotated[TrainOptions, Parameter(name="*", group="Training")] = TrainOptions(),
    loading: Annotated[TargetOptions, Parameter(name="*", group="Models")] = TargetOptions(),
) -> int:
    """Train a drafter; without data the target writes its own chats first.

    Args:
        target: the model to draft for: smollm2 (bundled), a hub id, a folder or a GGUF file.
        out: run folder: chats, features, checkpoints, metrics, and the drafter in OUT/drafter.
        data: chats: a JSONL or Parquet file or a data set of the hub, in the layouts that `data` shows.
        chats: most chats; 20000 where the target writes them, all where they are read.
        start: begin from this drafter (a folder) instead of a new one.
        resume: go on with the run in OUT.
        force: throw away the run in OUT.
        as_json: print the final figures as JSON.
    """
    from slipstream.cli.progress import TrainingBar
    from slipstream.train.pipeline import Plan, is_main_process, train_drafter

    most = chats if chats is not None else (Plan.chats if data is None else 0)
    plan = Plan(target, out, data, most, start, resume, force, drafter, synthesis, training, loading)
    with TrainingBar(sys.stderr) as bar:
        result = train_drafter(plan, say, bar.observe)
    if not is_main_process():
        return 0
    if as_json:
        print(json.dumps(asdict(result) | {"drafter": str(result.drafter)}))
        return 0
    held = "no chat was held out"
    if result.acceptance_length is not None:
        held = f"acceptance length {result.acceptance_length:.2f} on held-out chats, teacher-forced"
        if result.decoded is not None:
            held += f"; {result.decoded:.2f} tokens per round by greedy decoding of held-out prompts"
    print(f"{result.drafter}: {held}; {result.steps} steps, {result.seconds / 60:.1f} minutes")
    if result.workloads:
        figures = ", ".join(f"{name} {length:.2f}" for name, length in result.workloads.items())
        print(f"tokens per round by workload: {figures}")
    return 0
