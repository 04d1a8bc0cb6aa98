"""What is seen of a request while it decodes: when its tokens came, its rounds, where their time went.

One clock for all systems, read outside of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream.bench.metrics import by_position
from slipstream.bench.records import Measured, TimeSplit
from slipstream.core.records import Piece
from slipstream.target import Target

_STATM = Path("/proc/self/statm")
_PAGE = 4096


@dataclass
class Trail:
    """The pieces of one request of our own engine.

    Attributes:
        begun: when it was asked.
        positions: most drafts of a round.
    """

    begun: float
    positions: int
    first: float = 0.0
    last: float = 0.0
    ids: list[int] = field(default_factory=list)
    spans: list[tuple[str, bool]] = field(default_factory=list)
    rounds: list[tuple[int, int, bool]] = field(default_factory=list)
    emitted: int = 0
    reason: str = ""

    def add(self, piece: Piece, now: float) -> None:
        """What a round brought."""
        if not self.ids:
            self.first = now
        else:
            ended = piece.finish_reason is not None and piece.accepted == len(piece.token_ids)
            self.rounds.append((piece.drafts, piece.accepted, ended))
            self.emitted += len(piece.token_ids)
        self.last = now
        self.ids += piece.token_ids
        for text, drafted in piece.spans:
            if self.spans and self.spans[-1][1] == drafted:
                self.spans[-1] = (self.spans[-1][0] + text, drafted)
            else:
                self.spans.append((text, drafted))
        self.reason = piece.finish_reason or ""

    def measured(self, origin: float, split: TimeSplit | None = None, memory: int = 0) -> Measured:
        """The whole of it; `origin` is the start of the run."""
        drafted, tried, accepted = by_position(self.rounds, self.positions)
        return Measured(
            token_ids=tuple(self.ids),
            text="".join(text for text, _ in self.spans),
            stop_reason=self.reason,
            started_s=self.begun - origin,
            ttft_s=self.first - self.begun,
            decode_s=self.last - self.first,
            total_s=self.last - self.begun,
            spans=tuple(self.spans),
            rounds=len(self.rounds),
            emitted_in_rounds=self.emitted,
            drafted_per_position=drafted,
            tried_per_position=tried,
            accepted_per_position=accepted,
            accepted_runs=tuple(kept for _, kept, _ in self.rounds),
            parked=sum(drafts == 0 for drafts, _, _ in self.rounds) if self.positions else 0,
            split=split,
            peak_memory_bytes=memory,
        )


class Stopwatch:
    """Times the passes of the rounds: on a CPU by the clock, on CUDA by events, which stop nothing.

    Args:
        device: where the passes run; on others than these two nothing is timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._kind = device.type
        self._spans: dict[str, list[tuple[Any, Any]]] = {"draft": [], "verify": []}

    @contextmanager
    def watching(self, target: Target, proposer: Any) -> Iterator[None]:
        """Time what they do in the block; they are as before after it."""
        watched = [(target, "verify", "verify")]
        if proposer is not None:
            watched += [(proposer, "propose", "draft"), (proposer, "extend", "draft")]
        if self._kind not in ("cpu", "cuda"):
            watched = []
        for owner, name, label in watched:
            setattr(owner, name, self._timed(getattr(owner, name), label))
        try:
            yield
        finally:
            for owner, name, _ in watched:
                delattr(owner, name)  # the class's own shows again

    def split(self, decode_s: float) -> TimeSplit | None:
        """Where the time between first and last token went; None where nothing was timed."""
        if self._kind not in ("cpu", "cuda"):
            return None
        if self._kind == "cuda":
            torch.cuda.synchronize()
        draft, verify = (self._seconds(label) for label in ("draft", "verify"))
        return TimeSplit(draft, verify, max(decode_s - draft - verify, 0.0))

    def _seconds(self, label: str) -> float:
        if self._kind == "cuda":
            return sum(begun.elapsed_time(ended) for begun, ended in self._spans[label]) / 1000
        return float(sum(ended - begun for begun, ended in self._spans[label]))

    def _timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        def timed(*args: Any, **named: Any) -> Any:
            begun = self._now()
            result = function(*args, **named)
            self._spans[label].append((begun, self._now()))
            return result

        return timed

    def _now(self) -> Any:
        if self._kind == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return event
        return time.perf_counter()


def forget_peak(device: torch.device) -> None:
    """Begin a new peak of memory."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Bytes: the peak since `forget_peak` on CUDA; elsewhere what the process holds now, 0 if not known."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(_STATM.read_text().split()[1]) * _PAGE if _STATM.exists() else 0
