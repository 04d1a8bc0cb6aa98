"""What the user gave, read: configs by path or hub id, acceptance, concurrency."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.core.command_options import PlanOptions
from slipstream.core.errors import InputError
from slipstream.plan.acceptance import check_profile, geometric

_NAME = "config.json"


def read_config(name: str) -> dict[str, Any]:
    """The object in a config file, in a folder's config.json, or in that of a hub repository.

    Raises:
        InputError: there is none, or it is damaged.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        path = path / _NAME
    if not path.is_file():
        path = _from_hub(name)
    raw = _read(path)
    if not isinstance(raw, dict):
        raise InputError(f"{path} must hold an object")
    return raw


def read_concurrency(text: str) -> list[int]:
    """Numbers such as 1,4,8.

    Raises:
        InputError: they are none.
    """
    try:
        return [int(word) for word in text.split(",")]
    except ValueError as error:
        raise InputError(f"--concurrency takes numbers such as 1,4,8, not {text!r}") from error


def read_acceptance(options: PlanOptions, block_size: int) -> tuple[float, ...]:
    """The profile that the options state, for blocks of so many slots.

    Raises:
        InputError: none is stated, two are, or it is no profile.
    """
    stated, of_length = bool(options.acceptance_profile), options.acceptance_length != 0
    if stated == of_length:
        raise InputError(
            "say how far drafts are kept: either --acceptance-length or --acceptance-profile "
            "(slipstream generate --json measures both)"
        )
    if of_length:
        return geometric(options.acceptance_length, block_size - 1)
    return _profile(options.acceptance_profile)


def _profile(text: str) -> tuple[float, ...]:
    path = Path(text).expanduser()
    if not path.is_file():
        try:
            return check_profile([float(word) for word in text.split(",")])
        except ValueError as error:
            raise InputError(f"{text!r} is neither a file nor a list of shares such as 0.8,0.7") from error
    raw = _read(path)
    if isinstance(raw, Mapping):
        raw = _shares(raw, path)
    if not isinstance(raw, list) or not all(isinstance(value, int | float) for value in raw):
        raise InputError(f"{path} must hold a list of shares, or accepted_per_position and rounds")
    return check_profile([float(value) for value in raw])


def _shares(raw: Mapping[str, Any], path: Path) -> list[float]:
    """Counts by position as shares of those that got so far."""
    counts, reached = raw.get("accepted_per_position"), raw.get("rounds")
    if not isinstance(counts, list) or not isinstance(reached, int) or reached < 1:
        raise InputError(f"{path} has no accepted_per_position and rounds")
    shares = []
    for count in counts:
        shares.append(count / reached if reached else 0.0)
        reached = count
    return shares


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no readable JSON") from error


def _from_hub(name: str) -> Path:
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise InputError(f"no config at {name}; give a config file, a model folder or a hub id")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, _NAME))
    except Exception as error:  # no such repository, no network: the hub's client raises of many kinds
        reason = str(error).strip().split("\n")[0]
        raise InputError(f"{name} is neither a path nor a repository with a config: {reason}") from error
