"""Which documents and anchors every step sees: a function of the seed and the step alone.

So a run that was stopped goes on with exactly the batches that it would have had, on any number of processes.
"""

from __future__ import annotations

import torch

from slipstream.core.errors import InputError
from slipstream.core.options import TrainOptions
from slipstream.data.blocks import BlockBatch, Row, build_batch, cut, draw_anchors, pack
from slipstream.data.features import Document, Features

# Streams of random numbers, so that no two purposes share one.
_ORDER, _ANCHORS, _NOISE = 1, 2, 3


class Batches:
    """The batches of a run.

    Args:
        store: training documents.
        options: batch settings and seed.
        num_drafts: K of a block.

    Raises:
        InputError: no document has an answer of two tokens.
    """

    def __init__(self, store: Features, options: TrainOptions, num_drafts: int) -> None:
        self._store, self._options, self._num_drafts = store, options, num_drafts
        self._usable = [number for number in range(len(store)) if store.longest_answer(number) > 1]
        if not self._usable:
            raise InputError(
                "no chat holds an answer of at least two tokens, so there is nothing to train on"
            )
        self._orders: dict[int, tuple[int, ...]] = {}

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one pass over the data; the last one may hold fewer documents."""
        return -(-len(self._usable) // self._options.documents)

    def numbers(self, step: int) -> list[int]:
        """Documents of a step."""
        epoch, place = divmod(step, self.steps_per_epoch)
        start = place * self._options.documents
        return list(self._order(epoch)[start : start + self._options.documents])

    def _order(self, epoch: int) -> tuple[int, ...]:
        """All usable documents, shuffled; two epochs are kept, as the next one may be looked at ahead."""
        known = self._orders.get(epoch)
        if known is None:
            shuffled = torch.randperm(len(self._usable), generator=self._generator(_ORDER, epoch))
            known = tuple(self._usable[number] for number in shuffled.tolist())  # host: a shuffle
            self._orders = {e: order for e, order in self._orders.items() if e >= epoch - 1} | {epoch: known}
        return known

    def lengths(self, step: int) -> list[int]:
        """Tokens of a step's documents, as far as they are read."""
        most = self._options.max_length
        return [min(self._store.length(number), most) for number in self.numbers(step)]

    def batch(self, step: int, part: int = 0, parts: int = 1) -> BlockBatch | None:
        """The share of a step's documents that one process, or one accumulated batch, computes.

        Args:
            step: from 0.
            part: which share.
            parts: shares of a step; each takes every so-manieth document.

        Returns:
            The batch; None where the share is empty.
        """
        numbers = self.numbers(step)
        mine = [place for place in range(len(numbers)) if place % parts == part]
        if not mine:
            return None
        answers = [self._store.answer_tokens_of(number) for number in numbers]
        # In proportion to what is said, so that every answer token is as likely an anchor, and rows fill
        # evenly.
        share = self._options.anchors * len(numbers) / sum(answers)
        documents: list[Document] = []
        kept: dict[int, torch.Tensor] = {}
        whole = self._store.documents([numbers[place] for place in mine])
        for place, found in zip(mine, whole, strict=True):
            # One generator per document, so that what is drawn does not depend on how a step is shared out.
            generator = self._generator(_ANCHORS, step, place)
            document = cut(found, self._options.max_length, generator)
            kept[id(document)] = draw_anchors(document, max(1, round(answers[place] * share)), generator)
            documents.append(document)
        rows = pack(documents)
        return build_batch(rows, [_in_row(row, kept) for row in rows], self._num_drafts)

    def noise(self, step: int, part: int) -> torch.Generator:
        """Generator of a step's feature noise."""
        return self._generator(_NOISE, step, part)

    def _generator(self, purpose: int, *numbers: int) -> torch.Generator:
        seed = self._options.seed
        for number in (purpose, *numbers):
            seed = (seed * 1_000_003 + number) % (2**61 - 1)
        return torch.Generator().manual_seed(seed)


def _in_row(row: Row, anchors: dict[int, torch.Tensor]) -> torch.Tensor:
    """Anchors of a row's documents at their places in the row."""
    return torch.cat([anchors[id(document)] + start for document, start in row.parts])
