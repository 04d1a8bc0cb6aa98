"""Single tokens as text and as bytes, for log-probabilities."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenTexts:
    """What each token says by itself.

    Args:
        tokenizer: of the target, or None; only vocabulary look-ups, which any thread may do.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def text(self, token: int) -> str:
        """The token's text; a part of a character shows as the replacement character."""
        return self._look(token)[0]

    def bytes(self, token: int) -> list[int] | None:
        """Its bytes in UTF-8; None where the vocabulary does not say them."""
        return self._look(token)[1]

    def _look(self, token: int) -> tuple[str, list[int] | None]:
        if token not in self._known:
            self._known[token] = self._read(token)
        return self._known[token]

    def _read(self, token: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return str(token), None
        shown = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a row of the embedding that no token uses
            return "", None
        if "\ufffd" not in shown:
            return shown, list(shown.encode())
        if match := _BYTE.fullmatch(piece):
            return shown, [int(match[1], 16)]
        alphabet = _byte_alphabet()
        if all(symbol in alphabet for symbol in piece):
            return shown, [alphabet[symbol] for symbol in piece]
        return shown, None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Symbols of byte-level vocabularies to bytes: printable ones stand for themselves, the others follow
    from U+0100 on (GPT-2).
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(0x100 + number): byte for number, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted
