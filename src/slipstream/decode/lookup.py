"""Prompt lookup: drafts copied from where the text's last words stood before. No drafter, no pass, same text.

Source: A. Saxena, "Prompt Lookup Decoding" (2023). Each text has an index of its n-grams that grows with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from slipstream.decode.accept import Proposal
from slipstream.decode.propose import DraftChooser, FeaturelessProposer


class TextIndex:
    """Where the n-grams of a growing text stood last.

    Args:
        longest: n of the longest n-grams.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._ids: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}

    def __len__(self) -> int:
        return len(self._ids)

    def extend(self, ids: Sequence[int]) -> None:
        """Add tokens. An n-gram is known once a token follows it, so that the end never finds itself."""
        for token in ids:
            place = len(self._ids)
            for n in range(1, min(self._longest, place) + 1):
                self._after[tuple(self._ids[place - n :])] = place
            self._ids.append(token)

    def continuation(self, count: int) -> list[int]:
        """What followed the longest end of the text that stood before, at its last place.

        Where the text before ends too soon it is repeated: a loop goes on.

        Args:
            count: tokens wanted.

        Returns:
            So many tokens, or none where not even the last token stood before.
        """
        for n in range(min(self._longest, len(self._ids)), 0, -1):
            place = self._after.get(tuple(self._ids[-n:]))
            if place is not None:
                period = len(self._ids) - place
                return [self._ids[place + k % period] for k in range(count)]
        return []


class LookupProposer(FeaturelessProposer):
    """Drafts by prompt lookup; a row whose end stood nowhere before drafts its anchor again.

    Args:
        block_size: T.
        longest: n of the longest n-grams that are looked up.
    """

    def __init__(self, block_size: int = 8, longest: int = 4) -> None:
        self.block_size = block_size
        self._longest = longest
        self._rows: dict[int, tuple[TextIndex, int, Sequence[int]]] = {}

    def begin(self, rows: int, slots: int) -> None:
        """Forget all texts."""
        self._rows = {}

    def read(self, row: int, prompt_ids: Sequence[int], said: Sequence[int]) -> None:
        """Index a prompt; what is said after it is added as it comes."""
        index = TextIndex(self._longest)
        index.extend(prompt_ids)
        self._rows[row] = (index, len(prompt_ids), said)

    def propose(
        self,
        anchor_B: Tensor,
        length_B: Tensor,
        num_drafts: int,
        visible: int,
        chooser: DraftChooser,
        row_B: Tensor | None = None,
    ) -> Proposal:
        """Copy; no pass of any model."""
        rows = range(len(anchor_B)) if row_B is None else row_B.tolist()  # host: rows of a CPU
        drafts = [self._draft(row, num_drafts) for row in rows]
        return Proposal(torch.tensor(drafts, dtype=torch.int64, device=anchor_B.device))

    def _draft(self, row: int, count: int) -> list[int]:
        if row not in self._rows:
            return [0] * count
        index, begun, said = self._rows[row]
        index.extend(list(islice(said, len(index) - begun, None)))
        return index.continuation(count) or [said[-1]] * count
