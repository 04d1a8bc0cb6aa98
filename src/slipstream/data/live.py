"""Features computed when they are asked for: nothing on disk, the target runs beside the drafter.

The same interface as `FeatureStore`; which of the two a run uses is a question of disk against computing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.core.errors import InputError
from slipstream.data.chats import Chat
from slipstream.data.extract import documents_of, index_of
from slipstream.data.features import Document, FeatureIndex
from slipstream.target import Target


class LiveFeatures:
    """Documents of chats, one target pass each time.

    Args:
        target: the model that wrote the chats.
        chats: at least one.
        target_layer_ids: 0-based ids of the layers whose output is wanted.
        candidates: likeliest next tokens per position (J).

    Raises:
        InputError: there are no chats.
    """

    def __init__(
        self,
        target: Target,
        chats: Sequence[Chat],
        target_layer_ids: tuple[int, ...],
        candidates: int = 16,
    ) -> None:
        if not chats:
            raise InputError("there are no chats to compute features of")
        self._target, self._chats, self._candidates = target, list(chats), candidates
        self.index: FeatureIndex = index_of(target, chats, target_layer_ids, candidates)

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._chats)

    def length(self, number: int) -> int:
        """Tokens of one document."""
        return len(self._chats[number].token_ids)

    def answer_tokens(self) -> int:
        """Answer tokens of all documents together."""
        return sum(chat.answer_tokens for chat in self._chats)

    def answer_tokens_of(self, number: int) -> int:
        """Answer tokens of one document."""
        return self._chats[number].answer_tokens

    def longest_answer(self, number: int) -> int:
        """Tokens of a document's longest answer; 0 where it has none."""
        return max((end - start for start, end in self._chats[number].answers), default=0)

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs, shape [V]."""
        counts_V = torch.zeros(vocab_size, dtype=torch.int64)
        for chat in self._chats:
            counts_V += torch.bincount(torch.tensor(chat.token_ids), minlength=vocab_size)
        return counts_V

    def documents(self, numbers: Sequence[int]) -> list[Document]:
        """Some documents, in passes over many at once."""
        taps = self._target.tap_ids
        self._target.set_taps(self.index.target_layer_ids)
        try:
            return documents_of(self._target, [self._chats[n] for n in numbers], self._candidates)
        finally:
            self._target.set_taps(taps)

    def __getitem__(self, number: int) -> Document:
        """One document."""
        return self.documents([number])[0]
