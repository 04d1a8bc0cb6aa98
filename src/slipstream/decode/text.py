"""Token ids to text as they come: never half a character, never the whole text decoded again."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "\ufffd"


class Detokenizer:
    """Turns one token at a time into the text it completes.

    A token's text can depend on the tokens before it (leading spaces, bytes of one character), so a short
    tail of tokens is decoded with and without the newest, and the difference is the new text.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is of transformers, or None, which gives no text at all."""
        self._tokenizer = tokenizer
        self._tail: list[int] = []
        self._said = 0

    def add(self, token: int) -> str:
        """Text that this token completes; empty while a character is incomplete."""
        if self._tokenizer is None:
            return ""
        self._tail.append(token)
        before = self._decode(self._tail[: self._said])
        now = self._decode(self._tail)
        if now.endswith(_REPLACEMENT):
            return ""
        if len(now) <= len(before):
            if self._is_special(token):
                # A text of nothing but end tokens (ignore_eos) would else grow the tail with each.
                self._tail.pop()
            return ""
        self._tail = self._tail[self._said :]
        self._said = len(self._tail)
        return now[len(before) :]

    def finish(self) -> str:
        """What is left of an incomplete character."""
        if self._tokenizer is None:
            return ""
        return self._decode(self._tail)[len(self._decode(self._tail[: self._said])) :]

    def _is_special(self, token: int) -> bool:
        """Whether decoding leaves the token out for what it is, not for what it says."""
        shown = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return bool(shown) and not self._decode([token])

    def _decode(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text
