"""Rounds captured once and replayed: on CUDA one launch instead of some hundred.

What is captured is a list of kernels with their addresses, shapes and scalars; Python does not run again. So
all that outlives a round lies in tensors that do not move (`Fixed`), and a round is captured for every number
of drafts, of visible slots and kind of settings. When a buffer is made anew, what was captured with the old
one is dropped. Rounds that need the host in their middle run as they are; why is counted and reported.

Not tied to CUDA: a `Recorder` captures. `tape.TapeRecorder` does it on any device, to test all of this.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.core.options import EngineOptions
from slipstream.core.records import GraphReport
from slipstream.decode.accept import Proposal
from slipstream.decode.history import History
from slipstream.decode.round import (
    Batch,
    Said,
    choose_again,
    commit,
    finish_round,
    pack,
    pass_round,
    propose,
    read,
    run_round,
)
from slipstream.decode.sampling import RowSettings
from slipstream.target import Target

#: Rounds that are kept captured; the one that was used least recently goes first.
_MOST = 32
#: Least slots of a captured round, and from where on there are two sizes to every doubling.
_FEWEST, _FINER = 256, 2048


@dataclass(frozen=True)
class Replayed:
    """What a captured round leaves for the host to look at, until the next replay of any round.

    Attributes:
        packed: tokens, how many count, who fell short; see `pack`.
        features_B1E: of a round without drafts, for a proposer that reads them later.
        proposal: where a choice may have to be made again.
        logits_BTV: likewise.
    """

    packed: Tensor
    features_B1E: Tensor | None
    proposal: Proposal | None
    logits_BTV: Tensor | None


class Recorder(Protocol):
    """Captures work on the device."""

    def record(self, work: Callable[[], Replayed]) -> tuple[Replayed, Callable[[], None]]:
        """Capture.

        Args:
            work: may be called several times, and is not called for a replay. Nothing on the host may decide
                what it does.

        Returns:
            What `work` returned, in tensors that every replay fills anew; and what replays.

        Raises:
            RuntimeError: the device refuses.
        """

    def forget(self) -> None:
        """Nothing captured before will be replayed."""


class CudaRecorder:
    """CUDA graphs of one device that share their memory: no two are replayed at once, and what a replay
    leaves is read before the next.

    Args:
        device: with its index or without.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def record(self, work: Callable[[], Replayed]) -> tuple[Replayed, Callable[[], None]]:
        """Once for real on the stream of all captures, so that libraries set themselves up; then captured."""
        with torch.cuda.device(self._device):
            current = torch.cuda.current_stream()
            if self._stream is None:
                self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                work()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    found = work()
            finally:
                # A capture that fails at its end leaves its own stream current.
                torch.cuda.set_stream(current)
        return found, graph.replay

    def forget(self) -> None:
        """A pool whose graphs are all gone must not be used again."""
        self._pool = None


class Fixed:
    """Tensors by name that stay where they are.

    Attributes:
        generation: another number whenever one had to be made anew.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._tensors: dict[str, Tensor] = {}

    def keep(self, name: str, value: Tensor) -> Tensor:
        """A copy of the value at the place of its name."""
        place = self.room(name, value, tuple(value.shape))
        return place if place is value else place.copy_(value)

    def within(self, name: str, value: Tensor, slots: int) -> Tensor:
        """The same at the beginning of a place that has room for so many slots on the second axis."""
        place = self.room(name, value, (value.shape[0], slots, *value.shape[2:]))
        return place[:, : value.shape[1]].copy_(value)

    def room(self, name: str, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The place of a name, zeros at first; made anew where it has another shape or dtype."""
        place = self._tensors.get(name)
        if place is None or tuple(place.shape) != shape or place.dtype != like.dtype:
            if place is not None:
                self.generation += 1  # a new name cannot be in anything captured
            place = self._tensors[name] = like.new_zeros(shape)
        return place


@dataclass(frozen=True)
class _Captured:
    """One captured round; `drafts_outside` has the proposer run before it."""

    result: Replayed
    replay: Callable[[], None]
    drafts_outside: bool


class Graphs:
    """The rounds of an engine: replayed where they can be captured, run as they are elsewhere.

    Args:
        recorder: captures; None runs every round as it is.
        reason: why there is no recorder, in words.
        block_size: T of the largest block.
    """

    def __init__(self, recorder: Recorder | None, reason: str, block_size: int) -> None:
        self._recorder, self._reason, self._block_size = recorder, reason, block_size
        self._fixed = Fixed()
        self._captured: OrderedDict[tuple[object, ...], _Captured] = OrderedDict()
        self._generations: tuple[int, ...] = ()
        self._captures = self._replays = 0
        self._as_they_are: Counter[str] = Counter()

    @property
    def on(self) -> bool:
        """Whether rounds are captured at all."""
        return self._recorder is not None

    @property
    def report(self) -> GraphReport:
        """What was captured so far, and what was not and why."""
        return GraphReport(self._captures, self._replays, self._reason, dict(self._as_they_are))

    def place(self, settings: RowSettings, history: History) -> RowSettings:
        """The settings of a batch, and its history, where captured rounds look for them."""
        if not self.on:
            return settings
        history.place(lambda name, value: self._fixed.keep(f"history {name}", value))
        return settings.placed(lambda name, value: self._fixed.keep(f"settings {name}", value))

    def visible(self, slots: int) -> int:
        """Slots that a round reads which needs so many: few sizes where rounds are captured."""
        if not self.on:
            return slots
        doubled = max(_FEWEST, 1 << (slots - 1).bit_length())
        between = doubled * 3 // 4
        return between if doubled > _FINER and slots <= between else doubled

    def drop(self) -> None:
        """Forget every captured round."""
        self._captured.clear()
        if self._recorder is not None:
            self._recorder.forget()

    def prepare(self, batch: Batch, visible: int) -> Callable[[], Said]:
        """The next round, ready to be run: what has to be captured is captured before, as it takes its time.

        Args:
            batch: as for `run_round`.
            visible: likewise.
        """
        reason = self._why_not(batch)
        captured = None if reason else self._find(batch, visible)
        if captured is None:
            self._as_they_are[reason or self._reason] += 1
            return partial(run_round, batch, visible)
        self._replays += 1
        return partial(self._replay, captured, batch, visible)

    def _why_not(self, batch: Batch) -> str:
        if not self.on:
            return self._reason
        if batch.row_B is not None:
            return "a round is about some rows only"
        if batch.guides:
            return "a request has a grammar"
        return "a request wants log-probabilities" if batch.logprobs is not None else ""

    def _find(self, batch: Batch, visible: int) -> _Captured | None:
        """The captured round that does what this one has to do, captured now if need be; None where it cannot
        be.
        """
        batch.anchor_B = self._fixed.keep("anchor", batch.anchor_B)
        batch.length_B = self._fixed.keep("length", batch.length_B)
        batch.active_B = self._fixed.keep("active", batch.active_B)
        self._drop_stale(batch)
        key = (batch.num_drafts, visible, batch.settings.kind, batch.history.kind)
        captured = self._captured.get(key)
        if captured is None:
            captured = self._capture(batch, visible)
            if captured is None:
                return None
            self._captured[key] = captured
            if len(self._captured) > _MOST:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        return captured

    def _drop_stale(self, batch: Batch) -> None:
        """Forget everything if any buffer is another one than when it was captured."""
        proposer = batch.proposer.generation or 0 if batch.proposer is not None else 0
        generations = batch.cache.generation, proposer, self._fixed.generation
        if generations != self._generations:
            self._generations = generations
            self.drop()

    def _capture(self, batch: Batch, visible: int) -> _Captured | None:
        """Capture a round and try it once: it must say what the round says that is run as it is.

        Meanwhile no row is active, so that nobody moves.
        """
        assert self._recorder is not None
        outside = bool(batch.num_drafts) and batch.proposer is not None and batch.proposer.generation is None
        work = partial(self._work, batch, visible, outside)
        anchor_B, length_B, active_B = batch.anchor_B, batch.length_B, batch.active_B.clone()
        batch.active_B.zero_()
        try:
            expected = work().packed.clone()  # buffers that have to grow grow here
            self._drop_stale(batch)
            try:
                result, replay = self._recorder.record(work)
                replay()
                if not torch.equal(expected, result.packed):  # host: once per captured round
                    raise RuntimeError("a replayed round says something else than the round itself")
            except RuntimeError as error:
                self._give_up(error)
                return None
        finally:
            batch.anchor_B, batch.length_B = anchor_B, length_B
            batch.active_B.copy_(active_B)
        self._captures += 1
        return _Captured(result, replay, outside)

    def _give_up(self, error: RuntimeError) -> None:
        """Nothing more is captured; what the error says is the reason."""
        said = str(error).strip().splitlines()
        self._reason = f"capturing failed: {said[0] if said else type(error).__name__}"
        self.drop()
        self._recorder = None

    def _work(self, batch: Batch, visible: int, outside: bool) -> Replayed:
        """A round over fixed tensors, up to what the host has to look at."""
        anchor_B, length_B = batch.anchor_B, batch.length_B
        proposal = self._drafts(batch) if outside else propose(batch, visible)
        passed = pass_round(batch, visible, proposal)
        short_B = passed.short_B & (batch.active_B > 0)
        packed = pack(passed.verdict, short_B)
        # Where anybody has to choose again nobody moves: the host lets them choose and moves all.
        emitted_B = passed.verdict.emitted_B * (~short_B.any())
        commit(batch, replace(passed.verdict, emitted_B=emitted_B))
        batch.anchor_B, batch.length_B = anchor_B.copy_(batch.anchor_B), length_B.copy_(batch.length_B)
        parked = batch.proposer is not None and not batch.num_drafts
        features = passed.features_BTE if parked else None
        if not batch.settings.may_fall_short:
            return Replayed(packed, features, None, None)
        # Large, and the same place serves every captured round.
        logits_BTV = self._fixed.within("logits", passed.logits_BTV, self._block_size)
        return Replayed(packed, features, self._held(passed.proposal), logits_BTV)

    def _drafts(self, batch: Batch) -> Proposal:
        """Where a proposer that runs before the round has left its drafts."""
        place = self._fixed.room("drafts", batch.anchor_B, (len(batch.anchor_B), self._block_size))
        return Proposal(place[:, : batch.num_drafts])

    def _held(self, proposal: Proposal) -> Proposal:
        """The proposal in places that serve every captured round."""
        drafts_BK = self._fixed.within("held drafts", proposal.drafts_BK, self._block_size)
        q_BKV = proposal.q_BKV
        if q_BKV is not None:
            q_BKV = self._fixed.within("held q", q_BKV, self._block_size)
        return replace(proposal, drafts_BK=drafts_BK, q_BKV=q_BKV)

    def _replay(self, captured: _Captured, batch: Batch, visible: int) -> Said:
        """One replay, one copy to the host."""
        if captured.drafts_outside:
            proposal = propose(batch, visible)
            if proposal.q_BKV is not None or not proposal.offered:
                return finish_round(batch, visible, proposal)
            self._fixed.within("drafts", proposal.drafts_BK, self._block_size)
        result = captured.result
        before_B = batch.length_B if result.features_B1E is None else batch.length_B.clone()
        captured.replay()
        if result.features_B1E is not None:
            batch.backlog.park(result.features_B1E.clone(), before_B, batch.rows)
        rows = read(result.packed)
        if any(row[-1] for row in rows):
            assert result.proposal is not None
            assert result.logits_BTV is not None
            verdict, rows = choose_again(batch, result.proposal, result.logits_BTV)
            commit(batch, verdict)
        return Said([row[: row[-2]] for row in rows])


def graphs_of(
    target: Target, options: EngineOptions, block_size: int, recorder: Recorder | None = None
) -> Graphs:
    """How an engine runs its rounds.

    Args:
        target: whose passes are captured.
        options: whether to capture.
        block_size: T of the largest block.
        recorder: None takes CUDA's graphs on a CUDA device and captures nothing elsewhere.
    """
    if options.graphs == "off":
        return Graphs(None, "turned off", block_size)
    if recorder is None and target.device.type != "cuda":
        return Graphs(None, f"a {target.device.type} has no CUDA graphs", block_size)
    reason = target.uncapturable
    if reason:
        return Graphs(None, reason, block_size)
    return Graphs(recorder or CudaRecorder(target.device), "", block_size)
