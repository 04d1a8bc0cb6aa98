"""Runs that are killed, lose a file or fill the disk: nothing is lost, and the curve stays the same."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.core.errors import InputError, TrainingError
from slipstream.model import Drafter
from slipstream.train.batches import Batches
from slipstream.train.checkpoint import LAST, new_run, place, restore, save
from slipstream.train.loop import METRICS_NAME, train
from slipstream.train.step import FrozenEnds
from tests.train.killing import OPTIONS, ends, sitting, store_in
from tests.train.tiny import tiny_config

ROOT = Path(__file__).parents[2]


def curve(path: Path) -> list[dict[str, Any]]:
    """Metrics without the clock."""
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in entry.items() if name != "seconds"} for entry in entries]


def test_fifty_kills_leave_no_trace_in_the_curve(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.train.killing", str(tmp_path), "50"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert int(done.stdout) == 50
    killed, whole = (curve(tmp_path / name / METRICS_NAME) for name in ("killed", "whole"))
    assert len(whole) == OPTIONS.max_steps
    assert killed == whole
    mine, theirs = (torch.load(tmp_path / name / "final.pt") for name in ("killed", "whole"))
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_batches_are_a_function_of_seed_and_step(tmp_path: Path) -> None:
    store = store_in(tmp_path / "features")
    one, other = Batches(store, OPTIONS, 3), Batches(store, OPTIONS, 3)
    later = other.batch(7)
    for step in (0, 3, 7):
        batch = one.batch(step)
        assert batch is not None
    assert batch is not None
    assert later is not None
    for name, value in vars(batch).items():
        assert torch.equal(getattr(later, name), value)
    epoch = [number for step in range(one.steps_per_epoch) for number in one.numbers(step)]
    assert sorted(epoch) == list(range(10))
    second = [number for step in range(4, 8) for number in one.numbers(step)]
    assert sorted(second) == list(range(10))
    assert second != epoch
    anchors = {tuple(b.anchor_BA.flatten().tolist()) for s in range(12) if (b := one.batch(s)) is not None}
    assert len(anchors) == 12
    parts = [one.batch(2, part, 2) for part in range(2)]
    whole = one.batch(2)
    assert whole is not None
    assert sum(part.blocks for part in parts if part is not None) == whole.blocks


def test_a_loss_that_is_not_a_number_names_its_chats(tmp_path: Path) -> None:
    store = store_in(tmp_path / "features")
    run = new_run(Drafter(tiny_config()), OPTIONS)
    table_VD = ends().output_VD.clone()
    short = replace(OPTIONS, max_steps=3, save_every=1)
    train(run, ends(), store, None, short, tmp_path / "run")
    before = (tmp_path / "run" / LAST).read_bytes()
    table_VD[3] = torch.nan
    broken = FrozenEnds(lambda ids: table_VD[ids], table_VD)
    with pytest.raises(TrainingError, match=r"loss of step \d is not a number; its chats are numbers \[\d"):
        train(run, broken, store, None, replace(short, max_steps=9, save_every=100), tmp_path / "run")
    assert (tmp_path / "run" / LAST).read_bytes() == before


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = new_run(Drafter(tiny_config()), OPTIONS)
    save(run, tmp_path)
    before = (tmp_path / LAST).read_bytes()

    def full(state: Any, path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(InputError, match=r"No space left on device.*the one before is kept"):
        save(run, tmp_path)
    assert (tmp_path / LAST).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


def test_what_the_optimisers_remember_moves_with_the_weights(tmp_path: Path) -> None:
    store = store_in(tmp_path / "features")
    for optimizer in ("muon", "adamw"):
        options = replace(OPTIONS, max_steps=1, optimizer=optimizer)
        run = new_run(Drafter(tiny_config()), options)
        train(run, ends(), store, None, options, tmp_path / optimizer)
        place(run, torch.device("meta"))
        for state in (state for one in run.optimizers for state in one.state.values()):
            assert all(v.device.type == "meta" for name, v in state.items() if name != "step")


def test_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    run = new_run(Drafter(tiny_config()), OPTIONS)
    assert not restore(run, tmp_path)
    save(run, tmp_path)
    other = new_run(Drafter(tiny_config(num_layers=1, causal=(False,), windows=(None,))), OPTIONS)
    with pytest.raises(InputError, match="another shape"):
        restore(other, tmp_path)
    with pytest.raises(InputError, match="another optimiser"):
        restore(new_run(Drafter(tiny_config()), replace(OPTIONS, optimizer="muon")), tmp_path)
    (tmp_path / LAST).write_bytes((tmp_path / LAST).read_bytes()[:500])
    with pytest.raises(InputError, match="cannot be read"):
        restore(run, tmp_path)


def test_metrics_of_steps_that_are_done_again_are_dropped(tmp_path: Path) -> None:
    store = store_in(tmp_path / "features")
    folder = tmp_path / "run"
    short = replace(OPTIONS, max_steps=8)
    sitting(store, folder, short)
    lines = (folder / METRICS_NAME).read_text()
    (folder / METRICS_NAME).write_text(lines + '{"step": 9, "loss": 1}\n{"step": 10, "lo')
    sitting(store, folder, short)
    assert (folder / METRICS_NAME).read_text() == lines
