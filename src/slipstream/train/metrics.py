"""metrics.jsonl: one line per step, in step with the checkpoint that a run goes on from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slipstream.core.errors import InputError
from slipstream.core.files import replacing
from slipstream.train.checkpoint import Run
from slipstream.train.evaluate import Forecast

METRICS_NAME = "metrics.jsonl"


def log_step(path: Path, run: Run, loss: float, acceptance: float, forecast: Forecast | None) -> None:
    """One JSON line per step."""
    entry: dict[str, Any] = {"step": run.step, "seconds": round(run.seconds, 3), "loss": loss}
    entry["acceptance_length"] = acceptance
    if forecast is not None:
        entry["held_out"] = asdict(forecast)
    try:
        with path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; the last checkpoint is whole") from error


def drop_later_metrics(path: Path, step: int) -> None:
    """Remove lines of steps that will be done again, and a last line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text().splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError):
            continue
    with replacing(path, force=True) as file:
        file.writelines(line + "\n" for line in kept)
