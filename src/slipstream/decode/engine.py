"""The engine: requests in, pieces and completions out; drafted and plain decoding are the same code."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Piece, Request
from slipstream.decode.history import History
from slipstream.decode.propose import Proposer, make_chooser
from slipstream.decode.round import Batch, run_round
from slipstream.decode.sampling import RowSettings, choose
from slipstream.decode.stopping import Tracker
from slipstream.target import Target
from slipstream.target.cache import TargetCache

#: Buffers and visible slots come in such steps, so that shapes repeat.
_STEP = 64
#: Newcomers wait until one in so many rows is free, so that they are read together.
_ADMIT = 16
#: Stands in rows that nobody uses.
_NOBODY = Request((0,), SamplingOptions())


class Engine:
    """Decodes requests with a target and, if there is one, a proposer.

    Args:
        target: the model whose text it is.
        proposer: what drafts; None decodes plainly.
        options: block size, acceptor, limits.

    Raises:
        InputError: the block is larger than the proposer can draft.
    """

    def __init__(
        self, target: Target, proposer: Proposer | None = None, options: EngineOptions = EngineOptions()
    ) -> None:
        self.target = target
        self.proposer = None if options.block_size == 1 else proposer
        self.options = options
        self.block_size = 1 if self.proposer is None else (options.block_size or self.proposer.block_size)
        if self.proposer is not None and self.block_size > self.proposer.block_size:
            raise InputError(
                f"block_size {self.block_size} is larger than the drafter's {self.proposer.block_size}"
            )
        own = target.info.max_context
        self.max_context = min(options.max_context, own) if options.max_context else own
        self.completions: list[Completion] = []
        self._cache: TargetCache | None = None
        self._calls = 0

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Decode all requests, at most `max_rows` side by side; completions in the order of the requests.

        Raises:
            InputError: a request cannot be decoded; it is named and nothing is decoded.
        """
        for _ in self.stream(requests):
            pass
        return self.completions

    def stream(self, requests: Sequence[Request] | Request) -> Iterator[Piece]:
        """Yield every request's text as it comes; afterwards `completions` holds the whole.

        An engine decodes one call at a time: a later call ends a stream that was not read to its end.

        Raises:
            InputError: a request cannot be decoded; it is named and nothing is decoded. While reading: a
                later call of the same engine has ended this stream.
        """
        every = [requests] if isinstance(requests, Request) else list(requests)
        for number, request in enumerate(every):
            self._check(number, request)
        return self._stream(every)

    def _stream(self, requests: list[Request]) -> Iterator[Piece]:
        """Decode until every request has finished; a row that falls free is given to the next in line."""
        self._calls += 1
        call = self._calls
        self.completions = []
        if not requests:
            return
        done: dict[int, Completion] = {}
        for piece in self._decode(requests, done):
            yield piece
            if self._calls != call:
                # The buffers now hold the later call's text; reading on would give a wrong one.
                raise InputError(
                    "a later call of the same engine has ended this stream; read it to its end first, "
                    "or give each stream an engine of its own"
                )
        self.completions = [done[number] for number in range(len(requests))]

    @torch.no_grad()
    def _decode(self, requests: list[Request], done: dict[int, Completion]) -> Iterator[Piece]:
        """Rounds over all rows; between them newcomers are read into rows that are free."""
        trackers = deque(self._tracker(number, request) for number, request in enumerate(requests))
        rows = min(len(requests), self.options.max_rows)
        batch = self._new_batch(requests, rows)
        table: list[Tracker | None] = [None] * rows
        lengths = [0] * rows
        while trackers or any(table):
            # Whoever else used the target since the last piece may have set taps of their own.
            self._set_taps()
            free = [row for row, tracker in enumerate(table) if tracker is None]
            pieces = []
            if trackers and len(free) >= max(1, rows // _ADMIT):
                admitted = free[: len(trackers)]
                for row in admitted:
                    table[row] = trackers.popleft()
                pieces = self._admit(batch, table, admitted, lengths)
            elif len(free) < rows:
                visible = min(_rounded(max(lengths) + self.block_size), batch.slots)
                pieces = self._advance(batch, table, lengths, visible)
            yield from pieces
            if self._release(table, lengths, done):
                self._refresh(batch, table)

    def _admit(
        self, batch: Batch, table: list[Tracker | None], admitted: list[int], lengths: list[int]
    ) -> list[Piece]:
        """Read the prompts of the rows just filled and choose their first tokens."""
        started, device = time.perf_counter(), self.target.device
        newcomers = [tracker for row in admitted if (tracker := table[row]) is not None]
        prompts = [tracker.request.prompt_ids for tracker in newcomers]
        row_B = torch.tensor(admitted, device=device)
        length_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
        ids_BL = torch.zeros(len(prompts), int(max(map(len, prompts))), dtype=torch.int64)
        for place, prompt in enumerate(prompts):
            ids_BL[place, : len(prompt)] = torch.tensor(list(prompt))
        batch.cache.clear(row_B)
        filled = self.target.prefill(
            ids_BL.to(device), length_B, batch.cache, self.options.prefill_chunk, row_B
        )
        if self.proposer is not None:
            self.proposer.admit(filled.features_BLE, row_B)
        tokens = self._first_choice([tracker.request for tracker in newcomers], filled.logits_BV, length_B)
        now = time.perf_counter()
        pieces = []
        ids: list[int] = tokens.tolist()  # host: once per newcomers
        for row, tracker, token in zip(admitted, newcomers, ids, strict=True):
            tracker.started_at = started
            lengths[row] = len(tracker.request.prompt_ids)
            pieces.append(tracker.first(token, now))
        batch.anchor_B = batch.anchor_B.index_copy(0, row_B, tokens)
        batch.length_B = batch.length_B.index_copy(0, row_B, length_B)
        self._refresh(batch, table)
        return pieces

    def _first_choice(
        self, requests: list[Request], logits_BV: torch.Tensor, length_B: torch.Tensor
    ) -> torch.Tensor:
        """The target's own choice in every mode."""
        info, device = self.target.info, self.target.device
        history = History(requests, info.vocab_size, info.eos_token_ids, device)
        settings = RowSettings.of([request.sampling for request in requests], info.vocab_size, device)
        position_BT = length_B[:, None]
        logits_BTV = history.adjust(logits_BV[:, None], length_B.new_empty(len(requests), 0), position_BT)
        choice = choose(logits_BTV, position_BT, settings)
        if choice.short_B.any():  # host: once per newcomers
            choice = choose(logits_BTV, position_BT, settings, info.vocab_size)
        return choice.ids_BT[:, 0]

    def _advance(
        self, batch: Batch, table: list[Tracker | None], lengths: list[int], visible: int
    ) -> list[Piece]:
        """One round; the pieces of the rows that decode."""
        rows = run_round(batch, visible)
        now = time.perf_counter()
        pieces = []
        for row, (tracker, tokens) in enumerate(zip(table, rows, strict=True)):
            if tracker is not None:
                lengths[row] += len(tokens)
                pieces.append(tracker.round(tokens, now))
        return pieces

    def _release(self, table: list[Tracker | None], lengths: list[int], done: dict[int, Completion]) -> bool:
        """Free the rows of finished requests; whether there were any."""
        finished = [row for row, tracker in enumerate(table) if tracker is not None and tracker.finish_reason]
        for row in finished:
            tracker = table[row]
            assert tracker is not None
            done[tracker.index] = tracker.completion(tracker.started_at)
            table[row], lengths[row] = None, 0
        return bool(finished)

    def _new_batch(self, requests: list[Request], rows: int) -> Batch:
        """Device state of a batch of free rows; buffers of an earlier call serve again where they fit."""
        device = self.target.device
        longest = max(len(request.prompt_ids) + self._limit(request) for request in requests)
        slots = _rounded(longest + self.block_size)
        if self._cache is None or self._cache.rows != rows or self._cache.slots < slots:
            self._cache = None  # so that the old buffers are gone before the new ones are made
            self._cache = self.target.new_cache(rows, slots)
        else:
            self._cache.clear()
        if self.proposer is not None:
            self.proposer.begin(rows, slots)
        nothing_B = torch.zeros(rows, dtype=torch.int64, device=device)
        return Batch(
            target=self.target,
            proposer=self.proposer,
            options=self.options,
            num_drafts=self.block_size - 1,
            slots=slots,
            cache=self._cache,
            anchor_B=nothing_B,
            length_B=nothing_B,
            active_B=nothing_B,
        )

    def _refresh(self, batch: Batch, table: list[Tracker | None]) -> None:
        """Tell the device which rows decode and how; the others stand still at position 0.

        A last block may overshoot a row's limit. Were the row to stay there, the blocks it still takes part
        in would pass the end of the buffers, and every pass would read slots that nobody needs.
        """
        info, device = self.target.info, self.target.device
        requests = [_NOBODY if tracker is None else tracker.request for tracker in table]
        said = [[] if tracker is None else tracker.token_ids for tracker in table]
        running = [tracker is not None and tracker.finish_reason is None for tracker in table]
        batch.settings = RowSettings.of([request.sampling for request in requests], info.vocab_size, device)
        batch.history = History(requests, info.vocab_size, info.eos_token_ids, device, said)
        batch.chooser = make_chooser(batch.settings, self.options.acceptor, self.options.drafts)
        batch.active_B = torch.tensor(running, device=device).long()
        batch.length_B = batch.length_B * batch.active_B

    def _set_taps(self) -> None:
        """Have the target read what this engine's proposer wants."""
        wanted = tuple(self.proposer.tap_ids) if self.proposer is not None else ()
        if self.target.tap_ids != wanted:
            self.target.set_taps(wanted)

    def _limit(self, request: Request) -> int:
        """Most tokens that a request may emit."""
        return min(request.sampling.max_tokens, self.max_context - len(request.prompt_ids))

    def _tracker(self, index: int, request: Request) -> Tracker:
        """Follow one request."""
        ends = request.sampling.end_ids(self.target.info.eos_token_ids)
        return Tracker(index, request, self._limit(request), ends, self.block_size, self.target.tokenizer)

    def _check(self, number: int, request: Request) -> None:
        """Refuse what cannot be decoded."""
        info, ids, sampling = self.target.info, request.prompt_ids, request.sampling
        if not len(ids):
            raise InputError(f"request {number} has an empty prompt")
        fields = {
            "prompt": ids,
            "stop_token_ids": sampling.stop_token_ids,
            "logit_bias": sampling.logit_bias,
        }
        for name, named in fields.items():
            wrong = next((token for token in named if not 0 <= token < info.vocab_size), None)
            if wrong is not None:
                raise InputError(
                    f"request {number}: token {wrong} in {name} is outside the vocabulary "
                    f"of {info.vocab_size}"
                )
        if len(ids) >= self.max_context:
            raise InputError(
                f"request {number}: a prompt of {len(ids)} tokens leaves no room in a context "
                f"of {self.max_context}"
            )
        if sampling.stop and self.target.tokenizer is None:
            raise InputError(f"request {number}: stop strings need a tokenizer, and {info.name} has none")


def _rounded(length: int) -> int:
    """Up to the next multiple of the step."""
    return -(-length // _STEP) * _STEP
