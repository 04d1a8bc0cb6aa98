"""Continuous batching: requests join and leave the rows of a batch between rounds.

Newcomers' prompts are read in parts, one part between two rounds, so that rows that decode never wait for
long. While a row is being read it stands where its next part begins: the rounds that it takes part in write
there, and the part writes over it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Piece, Request
from slipstream.decode.draft_length import DraftLength
from slipstream.decode.history import History
from slipstream.decode.propose import Proposer, Reader, make_chooser
from slipstream.decode.round import Batch, catch_up, run_round
from slipstream.decode.sampling import RowSettings, choose
from slipstream.decode.stopping import Tracker
from slipstream.target import Prefill, Target
from slipstream.target.cache import TargetCache

#: Buffers and visible slots come in such steps, so that shapes repeat.
_STEP = 64
#: Newcomers wait until one in so many rows is free, so that they are read together.
_ADMIT = 16
#: Least tokens of a prompt that are read at once: fewer cost a pass as much.
_LEAST_PART = 16
#: Stands in rows that nobody uses.
_NOBODY = Request((0,), SamplingOptions())


@dataclass
class _Reading:
    """Newcomers whose prompts are being read together.

    Attributes:
        newcomers: by row.
        row_B: the rows.
        length_B: of the prompts.
        parts: what reads them.
    """

    newcomers: dict[int, Tracker]
    row_B: Tensor
    length_B: Tensor
    parts: Iterator[int | Prefill]


class Rows:
    """Decodes whatever requests are handed in, at most so many side by side.

    Args:
        target: the model whose text it is.
        proposer: what drafts; None decodes plainly. Its state belongs to these rows from now on.
        options: acceptor, drafts, tokens of a prompt that are read at once.
        block_size: T.
        cache: of the target; its rows and slots are the batch's.
        lengths: how many drafts a round has.
        track: makes a tracker of a request and its number.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        options: EngineOptions,
        block_size: int,
        cache: TargetCache,
        lengths: DraftLength,
        track: Callable[[int, Request], Tracker],
    ) -> None:
        self.completions: dict[int, Completion] = {}
        self.ended = False
        self._target, self._options, self._block_size, self._track = target, options, block_size, track
        self._draft_length = lengths
        lengths.begin()
        self._waiting: deque[Tracker] = deque()
        self._table: list[Tracker | None] = [None] * cache.rows
        self._lengths = [0] * cache.rows
        self._reading: _Reading | None = None
        self._submitted = 0
        nothing_B = torch.zeros(cache.rows, dtype=torch.int64, device=target.device)
        self._batch = Batch(target, proposer, options, block_size - 1, cache, nothing_B, nothing_B, nothing_B)
        if proposer is not None:
            proposer.begin(cache.rows, cache.slots)

    @property
    def busy(self) -> bool:
        """Whether a request waits or decodes."""
        return bool(self._waiting) or any(self._table)

    def check(self) -> None:
        """Refuse to go on once the buffers are someone else's.

        Raises:
            InputError: a later call of the engine has begun.
        """
        if self.ended:
            raise InputError(
                "a later call of the same engine has ended this stream; read it to its end first, "
                "or give each stream an engine of its own"
            )

    def submit(self, request: Request) -> int:
        """Put a request in line; the number under which its pieces and its completion come."""
        number = self._submitted
        self._submitted += 1
        tracker = self._track(number, request)
        tracker.started_at = time.perf_counter()
        self._waiting.append(tracker)
        return number

    def cancel(self, number: int) -> None:
        """Forget a request: no more pieces of it and no completion. One that has finished stays so."""
        self._waiting = deque(tracker for tracker in self._waiting if tracker.index != number)
        for tracker in self._table:
            if tracker is not None and tracker.index == number:
                tracker.cancelled = True

    @torch.no_grad()
    def step(self) -> list[Piece]:
        """Read a part of what newcomers say, decode a round of the others; the pieces of both.

        Finished requests are in `completions` afterwards.

        Raises:
            InputError: a later call of the engine has begun.
        """
        self.check()
        # Whoever else used the target since the last step may have set taps of their own.
        self._set_taps()
        self._drop_cancelled()
        self._admit()
        pieces = self._advance()
        pieces += self._read()
        if self._release():
            self._refresh()
        return pieces

    def _admit(self) -> None:
        """Give free rows to those who wait, once there are enough of both to be worth a pass."""
        free = [row for row, tracker in enumerate(self._table) if tracker is None]
        wanted = max(1, len(self._table) // _ADMIT)
        if self._reading is not None or not self._waiting or len(free) < wanted:
            return
        newcomers = {row: self._waiting.popleft() for row in free[: len(self._waiting)]}
        for row, tracker in newcomers.items():
            self._table[row] = tracker
        device, prompts = self._target.device, [t.request.prompt_ids for t in newcomers.values()]
        row_B = torch.tensor(list(newcomers), device=device)
        length_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids_BL = torch.zeros(len(prompts), max(map(len, prompts)), dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            ids_BL[place, : len(prompt)] = torch.tensor(list(prompt))
        self._batch.cache.clear(row_B)
        part = max(_LEAST_PART, self._options.prefill_chunk // len(newcomers))
        parts = self._target.prefill_parts(ids_BL.to(device), length_B, self._batch.cache, part, row_B)
        self._reading = _Reading(newcomers, row_B, length_B, parts)

    def _read(self) -> list[Piece]:
        """Read on; the first pieces of newcomers whose prompts are read."""
        if self._reading is None:
            return []
        reading, reached = self._reading, next(self._reading.parts)
        row_B, length_B, newcomers = reading.row_B, reading.length_B, reading.newcomers
        if isinstance(reached, int):
            for row in newcomers:
                self._lengths[row] = reached
            self._batch.length_B = self._batch.length_B.index_fill(0, row_B, reached)
            return []
        self._reading = None
        if self._batch.proposer is not None:
            catch_up(self._batch, self._visible())
            self._batch.proposer.admit(reached.features_BLE, row_B)
        requests = [tracker.request for tracker in newcomers.values()]
        tokens_B = self._first_choice(requests, reached.logits_BV, length_B)
        now = time.perf_counter()
        ids: list[int] = tokens_B.tolist()  # host: once per newcomers
        pieces = [
            tracker.first(token, now)
            for tracker, token in zip(newcomers.values(), ids, strict=True)
            if not tracker.cancelled
        ]
        reader: object = self._batch.proposer
        for row, tracker in newcomers.items():
            self._lengths[row] = len(tracker.request.prompt_ids)
            if isinstance(reader, Reader):
                reader.read(row, tracker.request.prompt_ids, tracker.token_ids)
        self._batch.anchor_B = self._batch.anchor_B.index_copy(0, row_B, tokens_B)
        self._batch.length_B = self._batch.length_B.index_copy(0, row_B, length_B)
        self._refresh()
        return pieces

    def _first_choice(self, requests: list[Request], logits_BV: Tensor, length_B: Tensor) -> Tensor:
        """The target's own choice in every mode."""
        info, device = self._target.info, self._target.device
        history = History(requests, info.vocab_size, info.eos_token_ids, device)
        settings = RowSettings.of([request.sampling for request in requests], info.vocab_size, device)
        position_BT = length_B[:, None]
        logits_BTV = history.adjust(logits_BV[:, None], length_B.new_empty(len(requests), 0), position_BT)
        choice = choose(logits_BTV, position_BT, settings)
        if choice.short_B.any():  # host: once per newcomers
            choice = choose(logits_BTV, position_BT, settings, info.vocab_size)
        return choice.ids_BT[:, 0]

    def _advance(self) -> list[Piece]:
        """One round; the pieces of the rows that decode."""
        running = self._running()
        if not running:
            return []
        visible = self._visible()
        begun = time.perf_counter()
        drafts = self._draft_length.choose([tracker.index for tracker in running.values()])
        self._batch.num_drafts = drafts
        said = run_round(self._batch, visible)
        now = time.perf_counter()
        accepted = {tracker.index: len(said[row]) - 1 for row, tracker in running.items()}
        self._draft_length.note(accepted, drafts, now - begun)
        for row in running:
            self._lengths[row] += len(said[row])
        return [tracker.round(said[row], now, drafts) for row, tracker in running.items()]

    def _visible(self) -> int:
        """Leading slots that the next round may read or write."""
        return min(rounded(max(self._lengths) + self._block_size), self._batch.cache.slots)

    def _running(self) -> dict[int, Tracker]:
        """Requests whose prompt is read, by row."""
        reading = self._reading.newcomers if self._reading is not None else {}
        return {row: t for row, t in enumerate(self._table) if t is not None and row not in reading}

    def _drop_cancelled(self) -> None:
        """Free the rows of cancelled requests, but not in the middle of their prompt."""
        gone = {row: tracker for row, tracker in self._running().items() if tracker.cancelled}
        self._free(gone)
        if gone:
            self._refresh()

    def _release(self) -> bool:
        """Free the rows of finished requests; whether there were any."""
        finished = {row: tracker for row, tracker in self._running().items() if tracker.finish_reason}
        for tracker in finished.values():
            self.completions[tracker.index] = tracker.completion()
        self._free(finished)
        return bool(finished)

    def _free(self, rows: dict[int, Tracker]) -> None:
        """Their requests do not use these rows any more."""
        if rows:
            # While the lengths still say how far the rows reach.
            catch_up(self._batch, self._visible())
        for row, tracker in rows.items():
            self._draft_length.forget(tracker.index)
            self._table[row], self._lengths[row] = None, 0

    def _refresh(self) -> None:
        """Tell the device which rows decode and how; free rows stand still at position 0.

        A last block may overshoot a row's limit. Were the row to stay there, the blocks it still takes part
        in would pass the end of the buffers, and every pass would read slots that nobody needs.
        """
        info, device, batch = self._target.info, self._target.device, self._batch
        requests = [_NOBODY if tracker is None else tracker.request for tracker in self._table]
        said = [[] if tracker is None else tracker.token_ids for tracker in self._table]
        batch.settings = RowSettings.of([request.sampling for request in requests], info.vocab_size, device)
        batch.history = History(requests, info.vocab_size, info.eos_token_ids, device, said)
        batch.chooser = make_chooser(
            batch.settings, self._options.acceptor, self._options.draft_noise, info.vocab_size
        )
        unfinished = {row for row, tracker in self._running().items() if not tracker.finish_reason}
        active = [row in unfinished for row in range(len(self._table))]
        batch.active_B = torch.tensor(active, device=device).long()
        batch.length_B = batch.length_B * torch.tensor([t is not None for t in self._table], device=device)

    def _set_taps(self) -> None:
        """Have the target read what the proposer wants."""
        proposer = self._batch.proposer
        wanted = tuple(proposer.tap_ids) if proposer is not None else ()
        if self._target.tap_ids != wanted:
            self._target.set_taps(wanted)


def rounded(length: int) -> int:
    """Up to the next multiple of the step."""
    return -(-length // _STEP) * _STEP
