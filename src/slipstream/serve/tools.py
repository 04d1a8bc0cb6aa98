"""Tool calls in what a model says: JSON within `<tool_call>` marks, as the Hermes templates have it."""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from typing import Any

BEGIN, END = "<tool_call>", "</tool_call>"


@dataclass
class ToolReader:
    """Separates tool calls from text as it comes.

    Text that may be the beginning of a mark is held back; what looks like a call but is none stays text.

    Attributes:
        most: calls that are read; later ones are dropped.
        calls: how many there were.
    """

    most: int | None = None
    calls: int = 0
    _held: str = field(default="", repr=False)
    _after: bool = field(default=False, repr=False)

    def feed(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """Deltas of OpenAI's kind: pieces of content, and whole tool calls.

        Args:
            text: what was said since.
            last: whether nothing follows.
        """
        self._held += text
        self._drop_line_ends()
        deltas: list[dict[str, Any]] = []
        while (begin := self._held.find(BEGIN)) >= 0:
            end = self._held.find(END, begin)
            if end < 0:
                break
            self._say(deltas, self._held[:begin])
            inside = self._held[begin + len(BEGIN) : end]
            call = self._read(inside)
            if call is None:
                self._say(deltas, BEGIN + inside + END)
            elif self.most is None or self.calls < self.most:
                deltas.append({"tool_calls": [{"index": self.calls, **call}]})
                self.calls += 1
            self._held, self._after = self._held[end + len(END) :], True
            self._drop_line_ends()
        keep = len(self._held) if last else self._certain()
        self._say(deltas, self._held[:keep])
        self._held = self._held[keep:]
        return deltas

    def _drop_line_ends(self) -> None:
        """The template's own, behind a call."""
        if self._after:
            self._held = self._held.lstrip("\n")
            self._after = not self._held

    def _certain(self) -> int:
        """Length of the text that cannot belong to a mark."""
        begin = self._held.find(BEGIN)
        if begin >= 0:
            return begin
        for length in range(min(len(BEGIN) - 1, len(self._held)), 0, -1):
            if BEGIN.startswith(self._held[-length:]):
                return len(self._held) - length
        return len(self._held)

    @staticmethod
    def _say(deltas: list[dict[str, Any]], text: str) -> None:
        if text:
            deltas.append({"content": text})

    @staticmethod
    def _read(text: str) -> dict[str, Any] | None:
        """A call, or None."""
        try:
            said = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(said, dict) or not isinstance(said.get("name"), str):
            return None
        arguments = said.get("arguments", said.get("parameters", {}))
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": said["name"], "arguments": written},
        }
