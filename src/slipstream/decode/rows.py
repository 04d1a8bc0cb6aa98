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

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Piece, Request, TokenLogprob
from slipstream.decode.draft_length import DraftLength
from slipstream.decode.grammar import permitted
from slipstream.decode.history import History
from slipstream.decode.logprobs import most_logprobs, read_logprobs
from slipstream.decode.prefix import Kept, PrefixCache
from slipstream.decode.propose import Proposer, make_chooser
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
        kept: per newcomer an earlier text that its prompt begins like, and how far.
        start_B: where reading begins, behind what is kept.
        length_B: of the rest of the prompts.
        parts: what reads them.
    """

    newcomers: dict[int, Tracker]
    row_B: Tensor
    kept: list[tuple[Kept | None, int]]
    start_B: Tensor
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
        prefixes: keys and values of earlier texts.
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
        track: Callable[[int, Request], Tracker],
    ) -> None:
        self.completions: dict[int, Completion] = {}
        self.ended = False
        self._target, self._options, self._block_size, self._track = target, options, block_size, track
        self._draft_length, self._prefixes = lengths, prefixes
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

    def _begin_reading(self, free: list[int]) -> _Reading:
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
        self._batch.length_B = self._batch.length_B.index_copy(0, row_B, start_B)
        part = max(_LEAST_PART, self._options.prefill_chunk // len(newcomers))
        parts = self._target.prefill_parts(
            *(ids_BL.to(device), length_B, cache, part, row_B, start_B, max(starts))
        )
        return _Reading(newcomers, row_B, kept, start_B, length_B, parts)

    def _newcomers(self, free: list[int]) -> tuple[dict[int, Tracker], list[tuple[Kept | None, int]]]:
        """Who is read together, by row: rests of prompts are padded, and all must end within the buffers."""
        newcomers: dict[int, Tracker] = {}
        kept: list[tuple[Kept | None, int]] = []
        start = rest = 0
        while self._waiting and len(newcomers) < len(free):
            prompt = self._waiting[0].request.prompt_ids
            text, shared = self._prefixes.find(prompt)
            start, rest = max(start, shared), max(rest, len(prompt) - shared)
            if newcomers and start + rest > self._batch.cache.slots:
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
            self._batch.length_B = self._batch.length_B.index_copy(0, row_B, reading.start_B + reached)
            return []
        length_B = reading.start_B + reading.length_B
        self._reading = None
        if self._batch.proposer is not None:
            catch_up(self._batch, self._visible())
            self._batch.proposer.admit(reached.features_BLE, row_B, reading.start_B)
            for row, (text, shared) in zip(newcomers, reading.kept, strict=True):
                if text is not None:
                    self._batch.proposer.restore(row, text.draft, shared)
        tokens_B = self._first_choice(list(newcomers.values()), reached.logits_BV, length_B)
        now = time.perf_counter()
        ids: list[int] = tokens_B.tolist()  # host: once per newcomers
        most = most_logprobs(tracker.request for tracker in newcomers.values())
        likely: list[list[TokenLogprob]] = [[] for _ in ids]
        if most is not None:
            likely = read_logprobs(reached.logits_BV[:, None], tokens_B[:, None], most)
        pieces = [
            tracker.first(token, now, logprobs)
            for tracker, token, logprobs in zip(newcomers.values(), ids, likely, strict=True)
            if not tracker.cancelled
        ]
        for row, tracker in newcomers.items():
            self._lengths[row] = len(tracker.request.prompt_ids)
        self._batch.anchor_B = self._batch.anchor_B.index_copy(0, row_B, tokens_B)
        self._batch.length_B = self._batch.length_B.index_copy(0, row_B, length_B)
        self._refresh()
        return pieces

    def _settings(self, requests: list[Request]) -> RowSettings:
        target = self._target
        options = [request.sampling for request in requests]
        return RowSettings.of(options, target.info.vocab_size, target.device, target.kernels)

    def _first_choice(self, newcomers: list[Tracker], logits_BV: Tensor, length_B: Tensor) -> Tensor:
        """The target's own choice in every mode."""
        info, device = self._target.info, self._target.device
        requests = [tracker.request for tracker in newcomers]
        history = History(requests, info.vocab_size, info.eos_token_ids, device)
        settings = self._settings(requests)
        position_BT = length_B[:, None]
        logits_BTV = history.adjust(logits_BV[:, None], length_B.new_empty(len(requests), 0), position_BT)
        guides = {
            place: tracker.guide for place, tracker in enumerate(newcomers) if tracker.guide is not None
        }
        if guides:
            permitted_BTV = permitted(guides, [[]] * len(requests), 1, info.vocab_size, device)
            logits_BTV = logits_BTV.masked_fill(~permitted_BTV, -torch.inf)
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
        drafts = 0
        if self._batch.drafting:
            drafts = self._draft_length.choose([tracker.index for tracker in running.values()])
        self._batch.num_drafts = drafts
        said = run_round(self._batch, visible)
        now = time.perf_counter()
        accepted = {tracker.index: len(said.tokens[row]) - 1 for row, tracker in running.items()}
        self._draft_length.note(accepted, drafts, now - begun)
        for row in running:
            self._lengths[row] += len(said.tokens[row])
        likely = said.logprobs or [[]] * len(said.tokens)
        return [t.round(said.tokens[row], now, drafts, likely[row]) for row, t in running.items()]

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
            self._keep(row, tracker)
            self._draft_length.forget(tracker.index)
            self._table[row], self._lengths[row] = None, 0

    def _keep(self, row: int, tracker: Tracker) -> None:
        """Copy what the row holds for prompts that begin with it; not its last token, which no pass has
        read.
        """
        ids = (*tracker.request.prompt_ids, *tracker.token_ids)[: self._lengths[row]]
        if not tracker.request.draft:
            return  # the proposer may not have seen it
        if self._prefixes.most_tokens and self._prefixes.wants(ids):
            proposer, length = self._batch.proposer, len(ids)
            draft = proposer.save(row, length) if proposer is not None else ()
            text = Kept(np.asarray(ids, dtype=np.int64), self._batch.cache.save(row, length), draft)
            self._prefixes.put(text)

    def _refresh(self) -> None:
        """Tell the device which rows decode and how; free rows stand still at position 0.

        A last block may overshoot a row's limit. Were the row to stay there, the blocks it still takes part
        in would pass the end of the buffers, and every pass would read slots that nobody needs.
        """
        info, device, batch = self._target.info, self._target.device, self._batch
        requests = [_NOBODY if tracker is None else tracker.request for tracker in self._table]
        said = [[] if tracker is None else tracker.token_ids for tracker in self._table]
        batch.settings = self._settings(requests)
        batch.history = History(requests, info.vocab_size, info.eos_token_ids, device, said)
        batch.chooser = make_chooser(
            batch.settings, self._options.acceptor, self._options.draft_noise, info.vocab_size
        )
        running = self._running()
        unfinished = {row for row, tracker in running.items() if not tracker.finish_reason}
        batch.guides = {row: guide for row in unfinished if (guide := running[row].guide) is not None}
        batch.logprobs = most_logprobs(running[row].request for row in unfinished)
        batch.drafting = any(running[row].request.draft for row in unfinished)
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
