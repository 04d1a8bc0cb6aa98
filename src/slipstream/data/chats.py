"""Chats on disk: JSONL records of what the target read and said, as token ids.

Not a reader of other people's layouts (`readers`), and not a view of templates (`render`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import InputError
from slipstream.core.files import replacing
from slipstream.data.render import Message, Span


@dataclass(frozen=True)
class Chat:
    """One token sequence with the spans that the target said.

    Attributes:
        token_ids: prompt and answers as the target saw them.
        answers: spans of the answers, ascending.
        messages: the same as text; empty where only ids are known.
        temperature: at which the answers were decoded; None where that is not known.
        thinking: the template's thinking mode; None where none was stated.
        number: of the chat in what made it; resumption goes on after it.
    """

    token_ids: tuple[int, ...]
    answers: tuple[Span, ...]
    messages: tuple[Message, ...] = ()
    temperature: float | None = None
    thinking: bool | None = None
    number: int = 0

    def __post_init__(self) -> None:
        """Refuse spans that are empty, overlap or leave the sequence.

        Raises:
            InputError: names the span.
        """
        last = 1  # the first token has nothing before it that could predict it
        for start, end in self.answers:
            if not last <= start < end <= len(self.token_ids):
                raise InputError(
                    f"answer span [{start}, {end}] is empty, out of order, at the very start or outside "
                    f"a sequence of {len(self.token_ids)} tokens"
                )
            last = end

    @property
    def answer_tokens(self) -> int:
        """Tokens that the target said."""
        return sum(end - start for start, end in self.answers)


def to_line(chat: Chat) -> str:
    """One line of JSON, its end included."""
    return json.dumps(asdict(chat), ensure_ascii=False, separators=(",", ":")) + "\n"


def from_record(raw: Any) -> Chat:
    """A chat from its parsed line.

    Raises:
        InputError: a span does not fit.
        ValueError, KeyError, TypeError: it is not a record of ours.
    """
    return Chat(
        tuple(int(token) for token in raw["token_ids"]),
        tuple((int(start), int(end)) for start, end in raw["answers"]),
        tuple(dict(message) for message in raw.get("messages", ())),
        raw.get("temperature"),
        raw.get("thinking"),
        int(raw.get("number", 0)),
    )


def write_chats(path: Path, chats: Iterable[Chat], force: bool = False) -> None:
    """Write JSONL to a temporary name, then rename.

    Raises:
        InputError: the file exists and `force` is not set.
    """
    with replacing(path, force) as file:
        for chat in chats:
            file.write(to_line(chat))
