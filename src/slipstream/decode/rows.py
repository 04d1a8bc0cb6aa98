"""Continuous batching: requests join and leave the rows of a batch between rounds.

Newcomers' prompts are read in parts, one part between two rounds, so that rows that decode never wait for
long. While a row is being read it stands where its next part begins: the rounds that it takes part in write
there, and the part writes over it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Piece, Request
from slipstream.decode.backlog import Prompts
from slipstream.decode.draft_length import DraftLength
from slipstream.decode.graphs import Graphs
from slipstream.decode.history import History
from slipstream.decode.logprobs import most_logprobs
from slipstream.decode.newcomers import Reading, first_tokens, settings_of
from slipstream.decode.prefix import Kept, PrefixCache
from slipstream.decode.propose import Proposer, Reader, make_chooser
from slipstream.decode.round import Batch
from slipstream.decode.stopping import Tracker
from slipstream.target import Target
from slipstream.target.cache import TargetCache
from slipstream.target.lean import FEW

#: Buffers and visible slots come in such steps, so that shapes repeat.
_STEP = 64
#: Newcomers wait until one in so many rows is free, so that they are read together.
_ADMIT = 16
#: Least tokens of a prompt that are read at once: fewer cost a pass as much.
_LEAST_PART = 16
#: Stands in rows that nobody uses.
_NOBODY = Request((0,), SamplingOptions())


class Rows:
    """Decodes whatever requests are handed in, at most so many side by side.

    Args:
        target: the model whose text it is.
        proposer: what drafts; None decodes plainly. Its state belongs to these rows from now on.
        options: acceptor, drafts, tokens of a prompt that are read at once.
        block_size: T.
        cache: of the target; its rows and slots are the batch's.
        lengths: how many drafts a round has.
        prefixes: keys and values of earlier texts.
        graphs: run the rounds.
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
        prefixes: PrefixCache,
        graphs: Graphs,
        track: Callable[[int, Request], Tracker],
    ) -> None:
        self.completions: dict[int, Completion] = {}
        self.ended = False
        self._target, self._options, self._block_size, self._track = target, options, block_size, track
        self._draft_length, self._prefixes, self._graphs = lengths, prefixes, graphs
        lengths.begin()
        self._waiting: deque[Tracker] = deque()
        self._table: list[Tracker | None] = [None] * cache.rows
        self._lengths = [0] * cache.rows
        self._reading: Reading | None = None
        self._submitted = 0
        nothing_B = torch.zeros(cache.rows, dtype=torch.int64, device=target.device)
        self._anchor_R, self._length_R = nothing_B, nothing_B
        self._batch = Batch(
            *(target, proposer, options, block_size - 1, cache),
            *(tuple(range(cache.rows)), None, nothing_B, nothing_B, nothing_B),
        )
        if proposer is not None:
            proposer.begin(cache.rows, cache.slots)

    @property
    def busy(self) -> bool:
        """Whether a request waits or decodes."""
        return bool(self._waiting) or any(self._table)

    @property
    def waiting(self) -> int:
        """Requests whose turn has not come."""
        return len(self._waiting)

    @property
    def waiting_numbers(self) -> list[int]:
        """Their numbers, first come first."""
        return [tracker.index for tracker in self._waiting]

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(tracker is not None for tracker in self._table)

    @property
    def used(self) -> float:
        """Share of the buffers that holds tokens of running requests."""
        return sum(self._lengths) / (len(self._lengths) * self._batch.cache.slots)

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
        self._reading = self._begin_reading(free)

    def _begin_reading(self, free: list[int]) -> Reading:
        """Give rows to those who wait, with what is kept of their prompts; the rest is to be read."""
        cache, device = self._batch.cache, self._target.device
        newcomers, kept = self._newcomers(free)
        starts = [shared for _, shared in kept]
        rests = [t.request.prompt_ids[start:] for t, start in zip(newcomers.values(), starts, strict=True)]
        row_B, start_B = torch.tensor(list(newcomers), device=device), torch.tensor(starts, device=device)
        length_B = torch.tensor([len(rest) for rest in rests], device=device)
        ids_BL = torch.zeros(len(rests), max(map(len, rests)), dtype=torch.int64)
        for place, rest in enumerate(rests):
            ids_BL[place, : len(rest)] = torch.tensor(list(rest))
        cache.clear(row_B)
        for (row, tracker), (text, shared) in zip(newcomers.items(), kept, strict=True):
            self._table[row], self._lengths[row], tracker.cached_tokens = tracker, shared, shared
            tracker.admitted_at = time.perf_counter()
            if text is not None:
                cache.restore(row, text.target, shared)
        self._stand(row_B, start_B)
        part = max(_LEAST_PART, self._options.prefill_chunk // len(newcomers))
        parts = self._target.prefill_parts(
            *(ids_BL.to(device), length_B, cache, part, row_B, start_B, max(starts))
        )
        return Reading(newcomers, row_B, kept, start_B, length_B, parts)

    def _newcomers(self, free: list[int]) -> tuple[dict[int, Tracker], list[tuple[Kept | None, int]]]:
        """Who is read together, by row: rests of prompts are padded, and all must end within the buffers.

        Compiled kernels give a token the same bits whatever shares its pass; where they run, nobody's prompt
        shares a longer pass either, so that no text depends on its company.
        """
        together = FEW if self._target.kernels is not None else self._batch.cache.slots * len(free)
        newcomers: dict[int, Tracker] = {}
        kept: list[tuple[Kept | None, int]] = []
        start = rest = 0
        while self._waiting and len(newcomers) < len(free):
            prompt = self._waiting[0].request.prompt_ids
            text, shared = self._prefixes.find(prompt)
            start, rest = max(start, shared), max(rest, len(prompt) - shared)
            fits = start + rest <= self._batch.cache.slots and rest * (len(newcomers) + 1) <= together
            if newcomers and not fits:
                break
            newcomers[free[len(newcomers)]] = self._waiting.popleft()
            kept.append((text, shared))
        return newcomers, kept

    def _read(self) -> list[Piece]:
        """Read on; the first pieces of newcomers whose prompts are read."""
        if self._reading is None:
            return []
        reading, reached = self._reading, next(self._reading.parts)
        row_B, newcomers = reading.row_B, reading.newcomers
        if isinstance(reached, int):
            for row, (_, shared) in zip(newcomers, reading.kept, strict=True):
                self._lengths[row] = shared + reached
            self._stand(row_B, reading.start_B + reached)
            return []
        length_B = reading.start_B + reading.length_B
        self._reading = None
        self._batch.backlog.admit(
            Prompts(reached.features_BLE, row_B, reading.start_B, tuple(newcomers), tuple(reading.kept))
        )
        tokens_B, said = first_tokens(self._target, list(newcomers.values()), reached.logits_BV, length_B)
        now = time.perf_counter()
        pieces = [
            tracker.first(token, now, logprobs)
            for tracker, (token, logprobs) in zip(newcomers.values(), said, strict=True)
            if not tracker.cancelled
        ]
        reader: object = self._batch.proposer
        for row, tracker in newcomers.items():
            self._lengths[row] = len(tracker.request.prompt_ids)
            if isinstance(reader, Reader):
                reader.read(row, tracker.request.prompt_ids, tracker.token_ids)
        self._stand(row_B, length_B, tokens_B)
        self._refresh()
        return pieces

    def _advance(self) -> list[Piece]:
        """One round; the pieces of the rows that decode."""
        running = self._running()
        if not running:
            return []
        visible = self._visible()
        drafts = 0
        if self._batch.drafting:
            left = {tracker.index: tracker.left for tracker in running.values()}
            drafts = self._draft_length.choose(list(left), left.values(), self._batch.backlog.tokens)
        self._batch.num_drafts = drafts
        if drafts or self._batch.backlog.full:
            self._catch_up(visible)
        run = self._graphs.prepare(self._batch, visible)
        # What a round takes, not what earlier ones have left to it.
        begun = time.perf_counter()
        said = run()
        now = time.perf_counter()
        tokens = dict(zip(self._batch.rows, said.tokens, strict=True))
        accepted = {tracker.index: len(tokens[row]) - 1 for row, tracker in running.items()}
        self._draft_length.note(accepted, drafts, now - begun)
        for row in running:
            self._lengths[row] += len(tokens[row])
        likely = dict(zip(self._batch.rows, said.logprobs, strict=False))
        return [t.round(tokens[row], now, drafts, likely.get(row, [])) for row, t in running.items()]

    def _catch_up(self, visible: int) -> None:
        """Have the proposer read what waits, and note what that took."""
        tokens, begun = self._batch.backlog.tokens, time.perf_counter()
        self._batch.backlog.flush(visible)
        if tokens:
            self._draft_length.read(tokens, time.perf_counter() - begun)

    def _visible(self) -> int:
        """Leading slots that the next round may read or write."""
        needed = self._graphs.visible(rounded(max(self._lengths) + self._block_size))
        return min(needed, self._batch.cache.slots)

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
        if rows and self._prefixes.most_tokens:
            # While the lengths still say how far the rows reach.
            self._catch_up(self._visible())
        for row, tracker in rows.items():
            self._keep(row, tracker)
            self._batch.backlog.leave(row)
            self._draft_length.forget(tracker.index)
            self._table[row], self._lengths[row] = None, 0

    def _keep(self, row: int, tracker: Tracker) -> None:
        """Copy what the row holds for prompts that begin with it; not its last token, which no pass has
        read.
        """
        if not self._prefixes.most_tokens or not tracker.request.draft:
            return  # without drafts the proposer may not have seen it
        ids = (*tracker.request.prompt_ids, *tracker.token_ids)[: self._lengths[row]]
        if self._prefixes.wants(ids):
            proposer, length = self._batch.proposer, len(ids)
            draft = proposer.save(row, length) if proposer is not None else ()
            text = Kept(np.asarray(ids, dtype=np.int64), self._batch.cache.save(row, length), draft)
            self._prefixes.put(text)

    def _stand(self, row_B: Tensor, length_B: Tensor, anchor_B: Tensor | None = None) -> None:
        """Say how long the context of some rows is, and what was said last."""
        self._settle()
        self._length_R = self._length_R.index_copy(0, row_B, length_B)
        if anchor_B is not None:
            self._anchor_R = self._anchor_R.index_copy(0, row_B, anchor_B)
        self._take()

    def _settle(self) -> None:
        """Note where the rounds have brought their rows."""
        batch = self._batch
        if batch.row_B is None:
            self._anchor_R, self._length_R = batch.anchor_B, batch.length_B
        else:
            self._anchor_R = self._anchor_R.index_copy(0, batch.row_B, batch.anchor_B)
            self._length_R = self._length_R.index_copy(0, batch.row_B, batch.length_B)

    def _take(self) -> None:
        """Hand anchors and lengths to the rounds."""
        batch = self._batch
        batch.anchor_B, batch.length_B = self._anchor_R, self._length_R
        if batch.row_B is not None:
            batch.anchor_B, batch.length_B = batch.anchor_B[batch.row_B], batch.length_B[batch.row_B]

    def _refresh(self) -> None:
        """Tell the device which rows decode and how.

        Where companions do not change a token's bits, the rounds are about those rows alone. Elsewhere their
        shape stays, and free rows stand still at position 0: a last block may overshoot a row's limit, and
        were the row to stay there, the blocks it still takes part in would pass the end of the buffers.
        """
        info, device, batch = self._target.info, self._target.device, self._batch
        self._settle()
        running, every = self._running(), range(len(self._table))
        alone = self._target.kernels is not None and 0 < len(running) < len(every)
        batch.rows = tuple(running) if alone else tuple(every)
        batch.row_B = torch.tensor(batch.rows, device=device) if alone else None
        self._length_R = self._length_R * torch.tensor([t is not None for t in self._table], device=device)
        self._take()
        trackers = [self._table[row] for row in batch.rows]
        requests = [_NOBODY if tracker is None else tracker.request for tracker in trackers]
        said = [[] if tracker is None else tracker.token_ids for tracker in trackers]
        batch.history = History(requests, info.vocab_size, info.eos_token_ids, device, said)
        batch.settings = self._graphs.place(settings_of(self._target, requests), batch.history)
        batch.chooser = make_chooser(
            batch.settings, self._options.acceptor, self._options.draft_noise, info.vocab_size
        )
        decoding = {row: t for row, t in running.items() if not t.finish_reason}
        guides = {place: decoding[row].guide for place, row in enumerate(batch.rows) if row in decoding}
        batch.guides = {place: guide for place, guide in guides.items() if guide is not None}
        batch.logprobs = most_logprobs(tracker.request for tracker in decoding.values())
        batch.drafting = any(tracker.request.draft for tracker in decoding.values())
        active = [row in decoding for row in batch.rows]
        batch.active_B = torch.tensor(active, device=device).long()

    def _set_taps(self) -> None:
        """Have the target read what the proposer wants."""
        proposer = self._batch.proposer
        wanted = tuple(proposer.tap_ids) if proposer is not None else ()
        if self._target.tap_ids != wanted:
            self._target.set_taps(wanted)


def rounded(length: int) -> int:
    """Up to the next multiple of the step."""
    return -(-length // _STEP) * _STEP
