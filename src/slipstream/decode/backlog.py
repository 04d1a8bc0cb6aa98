"""Features that a proposer has not seen yet: while nothing is drafted, it need not read along.

Prompts and rounds wait here until drafts are wanted; a request that ends before has cost nothing. What
waits is bounded in bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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


@dataclass
class _Rounds:
    """Rounds without drafts, one after another, of the same requests in the same rows.

    Attributes:
        requests: which request of the batch's history each row had; None where it did not decode.
        rows: rows of the buffers.
        start_B: position of the first round's token.
        features: [B, 1, E] per round.
    """

    requests: tuple[int | None, ...]
    rows: tuple[int, ...]
    start_B: Tensor
    features: list[Tensor] = field(default_factory=list)


class Backlog:
    """Shows a proposer features in the order in which they came, as late as possible.

    Args:
        proposer: what drafts; None forgets everything.
        rows: of the buffers.
    """

    def __init__(self, proposer: Proposer | None, rows: int) -> None:
        self._proposer = proposer
        self._prompts: list[Prompts] = []
        self._rounds: list[_Rounds] = []
        self._request: list[int | None] = [None] * rows
        self._admitted = 0
        #: That wait, padding of prompts included.
        self.tokens = 0
        self._width = 0

    @property
    def full(self) -> bool:
        """Whether more waits than should."""
        return self.tokens * self._width > _MOST

    def admit(self, prompts: Prompts) -> None:
        """Newcomers begin to decode."""
        for row in prompts.rows:
            self._admitted += 1
            self._request[row] = self._admitted
        if self._proposer is not None:
            self._prompts.append(prompts)
            self._count(prompts.features_BLE)

    def park(self, features_B1E: Tensor, start_B: Tensor, rows: Sequence[int]) -> None:
        """A round without drafts: every row that decodes moves on by one token.

        Args:
            features_B1E: of the rows that the round was about.
            start_B: positions of its tokens.
            rows: of the buffers.
        """
        if self._proposer is None:
            return
        requests = tuple(self._request[row] for row in rows)
        if not self._rounds or self._rounds[-1].requests != requests:
            self._rounds.append(_Rounds(requests, tuple(rows), start_B.clone()))  # rounds may write over it
        self._rounds[-1].features.append(features_B1E)
        self._count(features_B1E)

    def leave(self, row: int) -> None:
        """The request in a row has ended; nobody will ask for its drafts."""
        self._request[row] = None
        self._prompts = [p for p in self._prompts if any(self._request[r] is not None for r in p.rows)]
        self._rounds = [r for r in self._rounds if self._present(r)]
        waiting = sum(len(rounds.rows) * len(rounds.features) for rounds in self._rounds)
        self.tokens = waiting + sum(p.features_BLE.shape[:-1].numel() for p in self._prompts)

    def flush(self, visible: int) -> None:
        """Show the proposer all that waits.

        Args:
            visible: slots before which every row ends.
        """
        for prompts in self._prompts:
            self._show_prompts(prompts)
        for rounds in self._rounds:
            self._show_rounds(rounds, visible)
        self._prompts, self._rounds, self.tokens = [], [], 0

    def _count(self, features_BLE: Tensor) -> None:
        """More tokens wait."""
        self.tokens += features_BLE.shape[:-1].numel()
        self._width = features_BLE.shape[-1] * features_BLE.element_size()

    def _show_prompts(self, prompts: Prompts) -> None:
        assert self._proposer is not None
        visible = max(shared for _, shared in prompts.kept) + prompts.features_BLE.shape[1]
        self._proposer.admit(prompts.features_BLE, prompts.row_B, prompts.start_B, visible)
        for row, (text, shared) in zip(prompts.rows, prompts.kept, strict=True):
            if text is not None:
                self._proposer.restore(row, text.draft, shared)

    def _show_rounds(self, rounds: _Rounds, visible: int) -> None:
        """Those of requests that are still there."""
        places = self._present(rounds)
        if not places or self._proposer is None:
            return
        device = rounds.start_B.device
        place_B = torch.tensor(places, device=device)
        row_B = torch.tensor([rounds.rows[place] for place in places], device=device)
        features_BLE = torch.cat(rounds.features, dim=1)[place_B]
        offset_L = torch.arange(features_BLE.shape[1], device=device)
        self._proposer.extend(features_BLE, rounds.start_B[place_B, None] + offset_L, visible, row_B)

    def _present(self, rounds: _Rounds) -> list[int]:
        """Places of requests that still decode."""
        pairs = enumerate(zip(rounds.requests, rounds.rows, strict=True))
        return [
            place for place, (number, row) in pairs if number is not None and number == self._request[row]
        ]
