"""The run folder: what was asked for, with what, and where its files lie; a later sitting is held to it."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from slipstream.core.errors import InputError
from slipstream.core.files import replacing

_PACKAGES = ("slipstream", "torch", "transformers", "accelerate", "safetensors")
# Options that may change from one sitting to the next: they say when to stop and what to show, not what is
# trained.
_FREE = frozenset(
    {"max_steps", "minutes", "epochs", "evaluate_every", "decode_prompts", "save_every", "tracker", "workers"}
)


@dataclass(frozen=True)
class RunFolder:
    """Paths of a run.

    Attributes:
        path: the folder.
    """

    path: Path

    @property
    def chats(self) -> Path:
        """Chats that the target wrote for this run."""
        return self.path / "chats.jsonl"

    @property
    def features(self) -> Path:
        """Features that are trained on."""
        return self.path / "features"

    @property
    def held_out(self) -> Path:
        """Features that are only looked at."""
        return self.path / "held-out"

    @property
    def drafter(self) -> Path:
        """The result."""
        return self.path / "drafter"

    def open(self, asked: Mapping[str, Any], resume: bool, force: bool) -> bool:
        """Begin the run, or go on with it.

        Args:
            asked: the resolved options, JSON.
            resume: go on with what is there.
            force: throw away what is there.

        Returns:
            Whether there is a run to go on with.

        Raises:
            InputError: there is a run and neither is set, or it was begun with other options.
        """
        record = self.path / "run.json"
        if record.exists() and not force:
            if not resume:
                raise InputError(
                    f"{self.path} holds a run already; --resume goes on with it, --force begins anew"
                )
            self._hold_to(_read(record)["options"], asked)
            return True
        if force:
            self._clear()
        self.path.mkdir(parents=True, exist_ok=True)
        with replacing(record, force=True) as file:
            file.write(json.dumps({"options": asked, **_circumstances()}, indent=2) + "\n")
        return False

    def record(self) -> dict[str, Any]:
        """What `open` wrote down."""
        return _read(self.path / "run.json")

    def _hold_to(self, before: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
        """Refuse to go on with other options."""
        for group, values in before.items():
            now = asked.get(group)
            pairs = (
                [(group, values, now)]
                if not isinstance(values, dict) or not isinstance(now, dict)
                else [(name, value, now.get(name)) for name, value in values.items()]
            )
            for name, was, is_now in pairs:
                if name not in _FREE and was != is_now:
                    raise InputError(
                        f"{self.path} was begun with {name} {was!r}, not {is_now!r}; "
                        "give the same or begin anew"
                    )

    def _clear(self) -> None:
        """Remove the files of an earlier run, and nothing else."""
        import shutil

        for name in ("features", "held-out", "drafter"):
            shutil.rmtree(self.path / name, ignore_errors=True)
        files = "run.json", "metrics.jsonl", "last.pt", "best.pt", "curve.png", "chats.jsonl"
        for name in (*files, "chats.jsonl.partial"):
            (self.path / name).unlink(missing_ok=True)


def _circumstances() -> dict[str, Any]:
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {"command": sys.argv, "versions": versions, "git": _git_state()}


def _git_state() -> str | None:
    """Commit of the working folder, marked where there are changes; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _read(path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read; --force begins anew") from error
    return record
