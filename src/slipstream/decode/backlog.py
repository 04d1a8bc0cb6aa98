"""Features that a proposer has not seen yet: while nothing is drafted, it need not read along.

Prompts and rounds wait here until drafts are wanted; a request that ends before has cost nothing. What
waits is bounded in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.decode.prefix import Kept
from slipstream.decode.propose import Proposer

#: Most bytes that wait.
_MOST = 64 * 1024**2


@dataclass(frozen=True)
class Prompts:
    """What newcomers' prompts gave, which were read together.

    Attributes:
        features_BLE: from position start_B[b] on.
        row_B: their rows.
        start_B: positions before are in `kept`.
        rows: row_B on the host.
        kept: per newcomer an earlier text with the same beginning, and how far.
    """

    features_BLE: Tensor
    row_B: Tensor
    start_B: Tensor
    rows: tuple[int, ...]
    kept: tuple[tuple[Kept | None, int], ...]


class Backlog:
    """Shows a proposer features in the order in which they came, as late as possible.

    Args:
        proposer: what drafts; None forgets everything.
        rows: of the batch.
    """

    def __init__(self, proposer: Proposer | None, rows: int) -> None:
        self._proposer = proposer
        self._prompts: list[Prompts] = []
        self._rounds: list[Tensor] = []
        self._since: list[int | None] = [None] * rows
        self._bytes = 0

    @property
    def full(self) -> bool:
        """Whether more waits than should."""
        return self._bytes > _MOST

    def admit(self, prompts: Prompts) -> None:
        """Newcomers begin to decode."""
        if self._proposer is None:
            return
        self._prompts.append(prompts)
        self._bytes += _size(prompts.features_BLE)
        for row in prompts.rows:
            self._since[row] = len(self._rounds)

    def park(self, features_B1E: Tensor) -> None:
        """A round without drafts: every row that decodes moves on by one token."""
        if self._proposer is not None:
            self._rounds.append(features_B1E)
            self._bytes += _size(features_B1E)

    def leave(self, row: int) -> None:
        """The request in a row has ended; nobody will ask for its drafts."""
        self._since[row] = None
        self._prompts = [p for p in self._prompts if any(self._since[r] is not None for r in p.rows)]
        if all(since is None for since in self._since):
            self._rounds = []
        self._bytes = sum(map(_size, self._rounds)) + sum(_size(p.features_BLE) for p in self._prompts)

    def flush(self, length_B: Tensor, visible: int) -> None:
        """Show the proposer all that waits.

        Args:
            length_B: where the anchors stand; everything before is to be known.
            visible: slots before which length_B lies.
        """
        for prompts in self._prompts:
            self._show_prompts(prompts)
        if self._rounds and any(since is not None for since in self._since):
            self._show_rounds(length_B, visible)
        self._prompts, self._rounds, self._bytes = [], [], 0
        self._since = [None if since is None else 0 for since in self._since]

    def _show_prompts(self, prompts: Prompts) -> None:
        assert self._proposer is not None
        visible = max(shared for _, shared in prompts.kept) + prompts.features_BLE.shape[1]
        self._proposer.admit(prompts.features_BLE, prompts.row_B, prompts.start_B, visible)
        for row, (text, shared) in zip(prompts.rows, prompts.kept, strict=True):
            if text is not None:
                self._proposer.restore(row, text.draft, shared)

    def _show_rounds(self, length_B: Tensor, visible: int) -> None:
        """The last rounds, as many as the oldest row has waited for.

        Rows that have waited less were another request's, or nobody's, before: what is not theirs goes where
        the next round writes anyway.
        """
        assert self._proposer is not None
        every = len(self._rounds)
        waited = [0 if since is None else every - since for since in self._since]
        most = max(waited)
        if not most:
            return
        features_BLE = torch.cat(self._rounds[every - most :], dim=1)
        back_L = torch.arange(-most, 0, device=length_B.device)
        own_BL = back_L >= -torch.tensor(waited, device=length_B.device)[:, None]
        position_BL = torch.where(own_BL, length_B[:, None] + back_L, length_B[:, None])
        self._proposer.extend(features_BLE, position_BL, visible)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
