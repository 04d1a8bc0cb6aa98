"""The engine: requests in, pieces and completions out; drafted and plain decoding are the same code."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions
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
        """Groups of rows, one after another."""
        self._calls += 1
        call = self._calls
        self.completions = []
        done: list[Completion] = []
        for first in range(0, len(requests), self.options.max_rows):
            started = time.perf_counter()
            group = requests[first : first + self.options.max_rows]
            trackers = [self._tracker(first + row, request) for row, request in enumerate(group)]
            for piece in self._decode(trackers):
                yield piece
                if self._calls != call:
                    # The buffers now hold the later call's text; reading on would give a wrong one.
                    raise InputError(
                        "a later call of the same engine has ended this stream; read it to its end first, "
                        "or give each stream an engine of its own"
                    )
            done += [tracker.completion(started) for tracker in trackers]
        self.completions = done

    @torch.no_grad()
    def _decode(self, trackers: list[Tracker]) -> Iterator[Piece]:
        """Prefill, then rounds until every row has finished."""
        batch, first_tokens = self._prefill([tracker.request for tracker in trackers])
        now = time.perf_counter()
        for tracker, token in zip(trackers, first_tokens, strict=True):
            yield tracker.first(token, now)
        lengths = [len(tracker.request.prompt_ids) for tracker in trackers]
        running = [tracker.finish_reason is None for tracker in trackers]
        self._freeze(batch, lengths, running)
        while any(running):
            # Whoever else used the target since the last piece may have set taps of their own.
            self._set_taps()
            longest = max(lengths) + self.block_size
            rows = run_round(batch, min(_rounded(longest), batch.cache.slots))
            now = time.perf_counter()
            stopped = False
            for row, (tracker, tokens) in enumerate(zip(trackers, rows, strict=True)):
                if not running[row]:
                    continue
                lengths[row] += len(tokens)
                yield tracker.round(tokens, now)
                running[row] = tracker.finish_reason is None
                stopped |= not running[row]
            if stopped:
                self._freeze(batch, lengths, running)

    def _prefill(self, requests: list[Request]) -> tuple[Batch, list[int]]:
        """Read the prompts and choose each row's first token."""
        target, device = self.target, self.target.device
        self._set_taps()
        length_B = torch.tensor([len(request.prompt_ids) for request in requests], device=device)
        longest = max(len(request.prompt_ids) for request in requests)
        ids_BL = torch.zeros(len(requests), longest, dtype=torch.int64)
        for row, request in enumerate(requests):
            ids_BL[row, : len(request.prompt_ids)] = torch.tensor(list(request.prompt_ids))
        batch = self._new_batch(requests, length_B)
        filled = target.prefill(ids_BL.to(device), length_B, batch.cache, self.options.prefill_chunk)
        if self.proposer is not None:
            self.proposer.extend(filled.features_BLE, torch.zeros_like(length_B))
        drafts_BK = length_B.new_empty(len(requests), 0)
        logits_BTV = batch.history.adjust(filled.logits_BV[:, None], drafts_BK, length_B[:, None])
        tokens_B1 = self._first_choice(batch, logits_BTV)
        batch.history.add(tokens_B1, torch.ones_like(length_B))
        batch.anchor_B = tokens_B1[:, 0]
        tokens: list[int] = batch.anchor_B.tolist()  # host: first tokens, once per prefill
        return batch, tokens

    def _first_choice(self, batch: Batch, logits_BTV: torch.Tensor) -> torch.Tensor:
        """The target's own choice in every mode; top-p sorts all tokens here, as it runs only once."""
        position_BT = batch.length_B[:, None]
        return choose(logits_BTV, position_BT, batch.settings, logits_BTV.shape[-1]).ids_BT

    def _new_batch(self, requests: list[Request], length_B: torch.Tensor) -> Batch:
        """Device state of a batch; buffers of an earlier call serve again where they fit."""
        info, device = self.target.info, self.target.device
        longest = max(len(request.prompt_ids) + self._limit(request) for request in requests)
        slots = _rounded(longest + self.block_size)
        if self._cache is None or self._cache.rows != len(requests) or self._cache.slots < slots:
            self._cache = None  # so that the old buffers are gone before the new ones are made
            self._cache = self.target.new_cache(len(requests), slots)
        else:
            self._cache.clear(slots)
        if self.proposer is not None:
            self.proposer.begin(len(requests), slots)
        settings = RowSettings.of([request.sampling for request in requests], info.vocab_size, device)
        return Batch(
            target=self.target,
            proposer=self.proposer,
            options=self.options,
            num_drafts=self.block_size - 1,
            cache=self._cache,
            settings=settings,
            history=History(requests, info.vocab_size, info.eos_token_ids, device),
            chooser=make_chooser(settings, self.options.acceptor, self.options.drafts),
            anchor_B=length_B,
            length_B=length_B,
            active_B=torch.ones_like(length_B),
        )

    def _set_taps(self) -> None:
        """Have the target read what this engine's proposer wants."""
        wanted = tuple(self.proposer.tap_ids) if self.proposer is not None else ()
        if self.target.tap_ids != wanted:
            self.target.set_taps(wanted)

    def _freeze(self, batch: Batch, lengths: list[int], running: list[bool]) -> None:
        """Tell the device which rows still decode, and send the others back to position 0.

        A last block may overshoot a row's limit. Were the row to stay there, the blocks it still takes part
        in would pass the end of the buffers, and every pass would read slots that nobody needs.
        """
        batch.active_B = torch.tensor(running, device=self.target.device).long()
        batch.length_B = batch.length_B * batch.active_B
        lengths[:] = [length if runs else 0 for length, runs in zip(lengths, running, strict=True)]

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
