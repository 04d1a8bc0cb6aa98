"""Keys and values of texts that were read before, kept for the next prompt that begins alike.

Copies outside the rows: a row is free for anybody as soon as its request has finished, and several rows may
begin from one kept text. Reused numbers come from passes of other shapes than a fresh reading takes, so a
text may part from it where two tokens are equal up to rounding; that is why nothing is kept unless asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.target.cache import Saved

#: Shorter common beginnings are read again: copying would not pay.
_LEAST = 16

Ids = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Kept:
    """One text's keys and values.

    Attributes:
        ids: its tokens; every one of them has keys and values.
        target: per layer of the target.
        draft: per layer of the proposer, empty where it keeps none.
    """

    ids: Ids
    target: Saved
    draft: Saved


class PrefixCache:
    """Texts by last use; the oldest goes when there are too many tokens.

    Args:
        most_tokens: kept at once, over all texts; 0 keeps nothing.
    """

    def __init__(self, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self._texts: list[Kept] = []

    @property
    def tokens(self) -> int:
        """Kept now."""
        return sum(len(text.ids) for text in self._texts)

    def find(self, prompt_ids: Sequence[int]) -> tuple[Kept | None, int]:
        """The text that shares the longest beginning with a prompt, and how long that is.

        The prompt's last token is never taken: what follows it has to be computed.
        """
        prompt = np.asarray(prompt_ids, dtype=np.int64)[:-1]
        shared = [common(text.ids, prompt) for text in self._texts]
        if not shared or max(shared) < _LEAST:
            return None, 0
        place = int(np.argmax(shared))
        text = self._texts.pop(place)
        self._texts.append(text)
        return text, shared[place]

    def wants(self, ids: Sequence[int]) -> bool:
        """Whether a text of these tokens would be kept: it is neither too short or long nor known."""
        new = np.asarray(ids, dtype=np.int64)
        known = any(common(text.ids, new) == len(new) for text in self._texts)
        return _LEAST <= len(new) <= self.most_tokens and not known

    def put(self, text: Kept) -> None:
        """Keep a text; those that it continues go, and the oldest until the rest fits."""
        self._texts = [old for old in self._texts if common(old.ids, text.ids) < len(old.ids)]
        self._texts.append(text)
        while self.tokens > self.most_tokens:
            self._texts.pop(0)


def common(one: Ids, other: Ids) -> int:
    """Length of the common beginning of two sequences."""
    least = min(len(one), len(other))
    different = np.flatnonzero(one[:least] != other[:least])
    return int(different[0]) if len(different) else least
