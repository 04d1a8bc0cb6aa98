"""The engine: requests in, pieces and completions out; drafted and plain decoding are the same code."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions
from slipstream.core.records import Completion, FollowUp, GraphReport, Piece, Request
from slipstream.decode.draft_length import DraftLength
from slipstream.decode.footprint import ANYTHING, Demands
from slipstream.decode.graphs import Recorder, graphs_of
from slipstream.decode.prefix import PrefixCache
from slipstream.decode.propose import NullProposer, Proposer
from slipstream.decode.round_cost import RoundCosts
from slipstream.decode.rows import Rows, rounded
from slipstream.decode.stopping import Tracker
from slipstream.target import Target
from slipstream.target.cache import TargetCache
from slipstream.target.memory import require


class Engine:
    """Decodes requests with a target and, if there is one, a proposer.

    Args:
        target: the model whose text it is.
        proposer: what drafts; None decodes plainly.
        options: block size, acceptor, limits.
        recorder: captures rounds; None takes CUDA's graphs on a CUDA device.
        costs: what rounds take, as far as an earlier run knows; None begins to learn it.

    Raises:
        InputError: the block is larger than the proposer can draft.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None = None,
        options: EngineOptions = EngineOptions(),
        recorder: Recorder | None = None,
        costs: RoundCosts | None = None,
    ) -> None:
        self.target = target
        self.proposer = None if options.block_size == 1 else proposer
        self.options = options
        self.block_size = 1 if self.proposer is None else (options.block_size or self.proposer.block_size)
        if self.proposer is not None and self.block_size > self.proposer.block_size:
            raise InputError(
                f"block_size {self.block_size} is larger than the drafter's {self.proposer.block_size}"
            )
        self._costs = costs or RoundCosts()
        self._draft_length = DraftLength(self.block_size - 1, self._fixed_drafts(), self._costs)
        own = target.info.max_context
        self.max_context = min(options.max_context, own) if options.max_context else own
        self.completions: list[Completion] = []
        self._cache: TargetCache | None = None
        self._rows: Rows | None = None
        self._prefixes = PrefixCache(options.prefix_tokens)
        self._graphs = graphs_of(target, options, self.block_size, recorder)
        self._round_bytes = 0  # that were planned for a round

    @property
    def graphs(self) -> GraphReport:
        """How many rounds were replayed as graphs, and why others were not."""
        return self._graphs.report

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
        self.completions = []
        if not requests:
            self._end()
            return
        longest = max(len(request.prompt_ids) + self._limit(request) for request in requests)
        rows = self._open(min(len(requests), self.options.max_rows), longest, longest, Demands.of(requests))
        for request in requests:
            rows.submit(request)
        while rows.busy:
            for piece in rows.step():
                yield piece
                rows.check()
        self.completions = [rows.completions[number] for number in range(len(requests))]
        self.rest()

    def converse(self, requests: Sequence[Request], follow: FollowUp) -> None:
        """Decode requests and whatever follows from their completions, at most `max_rows` side by side.

        Args:
            requests: the first ones.
            follow: called with a request's number and its completion as soon as it is there; what it returns
                is decoded next, under the same number.

        Raises:
            InputError: a request cannot be decoded; it is named.
        """
        for number, request in enumerate(requests):
            self._check(number, request)
        if not requests:
            return
        # Buffers grow with what is said, and how long that gets nobody knows.
        longest = max(len(request.prompt_ids) + self._limit(request) for request in requests)
        many = min(len(requests), self.options.max_rows)
        rows = self._open(many, self.max_context, longest, Demands.of(requests))
        numbers = {rows.submit(request): number for number, request in enumerate(requests)}
        while rows.busy:
            rows.step()
            for finished in list(rows.completions):
                number = numbers.pop(finished)
                further = follow(number, rows.completions.pop(finished))
                if further is not None:
                    self._check(number, further)
                    numbers[rows.submit(further)] = number
        self.rest()

    def open(self, rows: int | None = None) -> Rows:
        """Rows that requests join and leave at any time, as a server needs them.

        They use this engine's buffers: a later call of the engine ends them.

        Args:
            rows: most requests decoded side by side; None takes the options' own.

        Raises:
            InputError: buffers for so many rows of the longest context do not fit into memory.
        """
        return self._open(rows or self.options.max_rows, self.max_context, self.max_context, ANYTHING)

    def rest(self) -> None:
        """Write down what rounds cost, now that nothing decodes; nothing happens without a place for it."""
        self._costs.keep()

    def forget(self) -> None:
        """Keep nothing of earlier requests for prompts that begin alike."""
        self._prefixes = PrefixCache(self.options.prefix_tokens)

    def _open(self, rows: int, longest: int, planned: int, demands: Demands) -> Rows:
        """Free rows for sequences of at most `longest` tokens; buffers of an earlier call serve again where
        they fit. Memory is planned for `planned` tokens and what requests demand.
        """
        self._plan(rows, rounded(planned + self.block_size), demands)
        self._end()
        slots = rounded(longest + self.block_size)
        if self._cache is None or not self._cache.reuse(rows, slots):
            self._cache = None  # so that the old buffers are gone before the new ones are made
            self._graphs.drop()
            self._cache = self.target.new_cache(rows, slots)
        self._rows = Rows(
            *(self.target, self.proposer, self.options, self.block_size),
            *(self._cache, self._draft_length, self._prefixes),
            graphs=self._graphs,
            track=self._tracker,
        )
        return self._rows

    def _plan(self, rows: int, slots: int, demands: Demands) -> None:
        """Refuse buffers that do not fit into memory.

        Captured rounds share a pool of their own, which keeps what the largest of them takes. Rounds that run
        as they are need the same beside it: those that cannot be captured, and the first of every kind.
        """
        info, proposer, options = self.target.info, self.proposer, self.options
        logits = rows * self.block_size * info.vocab_size * 4
        round_bytes = demands.round_bytes(rows, self.block_size, info.vocab_size, options.acceptor)
        there = self._cache is not None and self._cache.rows >= rows and self._cache.slots >= slots
        if there and round_bytes <= self._round_bytes:
            return
        wide = info.width * (4 + len(proposer.tap_ids) if proposer is not None else 4)
        part = options.prefill_chunk * (wide + 3 * info.intermediate_size) * self.target.dtype.itemsize
        drafted = proposer.token_bytes if proposer is not None else 0
        parts = {
            "keys and values of the target": (not there) * rows * slots * self.target.token_bytes,
            "those of the drafter": (not there) * rows * slots * drafted,
            "a part of a prompt": part,
            "a round": round_bytes,
            # And logits and q for choices that have to be made again.
            "captured rounds": self._graphs.on * (round_bytes + 2 * logits),
        }
        limits = f"{rows} rows of {slots} tokens are asked for: lower max_rows or max_context"
        require(parts, self.target.device, limits)
        self._round_bytes = round_bytes

    def _end(self) -> None:
        """End what an earlier call has left open: the buffers will hold another text."""
        if self._rows is not None:
            self._rows.ended = True

    def _fixed_drafts(self) -> int | None:
        """Drafts of every round; None lets the rounds decide.

        With the acceptor `reject` a text depends on how its blocks were cut, so they are cut alike each time.
        """
        most, drafts = self.block_size - 1, self.options.drafts
        if self.proposer is None:
            return 0
        if (
            drafts == "auto"
            and self.options.acceptor == "match"
            and not isinstance(self.proposer, NullProposer)
        ):
            return None
        if isinstance(drafts, int) and drafts > most:
            raise InputError(f"drafts {drafts} are more than the {most} that a block of {most + 1} holds")
        return drafts if isinstance(drafts, int) else most

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
