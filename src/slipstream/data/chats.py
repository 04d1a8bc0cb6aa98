"""Chats on disk: JSONL records of what the target said; reading, writing and the chat template's seams."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import InputError

# A user's text that no template alters, so that the rendered text can be cut around it.
_SENTINEL = "SENTINEL-5f2d"


@dataclass(frozen=True)
class Chat:
    """One prompt and the target's answer, as the token ids that the target saw and said.

    Attributes:
        user: the user's text; empty where only ids are known.
        prompt_ids: template, user turn and the opening of the answer.
        answer_ids: what the target said, its end token included if it came.
        temperature: at which the answer was decoded.
    """

    user: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    temperature: float


@dataclass(frozen=True)
class Seams:
    """What the chat template puts around a first user turn."""

    before: str
    after: str


def template_seams(tokenizer: Any) -> Seams:
    """Cut the rendered template around the user's text.

    Raises:
        InputError: the tokenizer has no chat template, or the template changes the user's text.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        raise InputError("the target's tokenizer has no chat template, so it cannot write its own chats")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": _SENTINEL}], tokenize=False, add_generation_prompt=True
    )
    before, found, after = rendered.partition(_SENTINEL)
    if not found:
        raise InputError("the target's chat template changes the user's text, so its turns cannot be opened")
    return Seams(before, after)


def write_chats(path: Path, chats: Iterable[Chat], force: bool = False) -> None:
    """Write JSONL to a temporary name, then rename.

    Raises:
        InputError: the file exists and `force` is not set.
    """
    if path.exists() and not force:
        raise InputError(f"{path} exists already; --force overwrites it")
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8") as file:
        for chat in chats:
            file.write(json.dumps(asdict(chat), ensure_ascii=False) + "\n")
    os.replace(temporary, path)


def read_chats(path: Path) -> list[Chat]:
    """Read JSONL written by `write_chats`.

    Raises:
        InputError: the file or one of its lines cannot be read; the line is named.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise InputError(f"cannot read chats from {path}: {error.strerror}") from error
    return [_parse(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _parse(path: Path, number: int, line: str) -> Chat:
    """One line of JSON to a chat."""
    try:
        raw = json.loads(line)
        ids: Sequence[Sequence[int]] = (raw["prompt_ids"], raw["answer_ids"])
        return Chat(str(raw["user"]), tuple(ids[0]), tuple(ids[1]), float(raw["temperature"]))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}, line {number}, is not a chat record") from error
