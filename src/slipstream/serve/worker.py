"""The one thread that decodes: calls come in by a queue, pieces go out to the event loop of the server.

No HTTP here, and no text: requests, pieces and completions.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from slipstream.core.errors import InputError
from slipstream.core.records import Completion, Piece, Request
from slipstream.decode import Engine
from slipstream.decode.rows import Rows
from slipstream.serve.errors import ApiError

_LOG = logging.getLogger("slipstream.serve")
#: Faults that a text may wait through before it is given up.
_TRIES = 3


@dataclass(frozen=True)
class Fault:
    """A text ends without being finished.

    Attributes:
        status: of HTTP.
        message: for the client.
    """

    status: int
    message: str


Event = Piece | Completion | Fault


@dataclass(eq=False)
class _Job:
    """One text: what is asked, and where its events go."""

    request: Request
    call: Call
    place: int
    number: int = -1
    over: bool = False
    tries: int = 0


@dataclass(eq=False)
class Call:
    """The texts of one call, side by side.

    Attributes:
        events: place of a text in the call, and what happened to it.
    """

    events: asyncio.Queue[tuple[int, Event]] = field(default_factory=asyncio.Queue)
    jobs: list[_Job] = field(default_factory=list)

    async def read(
        self, limit: float = 0.0, left: float | None = None
    ) -> AsyncIterator[tuple[int, Piece | Completion]]:
        """Events until every text has ended.

        Args:
            limit: seconds that the call has in all, for people.
            left: seconds that are left of them; None sets no limit.

        Raises:
            ApiError: the engine or the server gave up on a text, or the time is over.
        """
        end = None if left is None else time.perf_counter() + left
        open_ = len(self.jobs)
        while open_:
            try:
                rest = None if end is None else max(end - time.perf_counter(), 0.0)
                place, event = await asyncio.wait_for(self.events.get(), rest)
            except TimeoutError:
                raise ApiError(504, f"the request took longer than the {limit:g} seconds allowed") from None
            if isinstance(event, Fault):
                raise ApiError(event.status, event.message)
            yield place, event
            open_ -= isinstance(event, Completion)


@dataclass
class Load:
    """How busy the engine is, as of its last step.

    Attributes:
        running: texts that have a row.
        waiting: texts that wait for one.
        used: share of the buffers that is in use.
        faults: steps that failed.
    """

    running: int = 0
    waiting: int = 0
    used: float = 0.0
    faults: int = 0


class Worker:
    """Owns the engine; all methods are for the event loop's thread.

    Args:
        engine: to decode with; nobody else may use it.
        rows: texts decoded side by side.
        queue: texts that may wait.
    """

    def __init__(self, engine: Engine, rows: int, queue_limit: int) -> None:
        self.load = Load()
        self.capacity = rows + queue_limit
        self.draining = False
        self.broken = ""
        self._engine, self._rows_wanted = engine, rows
        self._rows = engine.open(rows)
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._active: set[_Job] = set()  # of the loop's thread
        self._jobs: dict[int, _Job] = {}  # of the engine's thread, by number
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)

    def start(self) -> None:
        """Begin to decode; called once, with the event loop running."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def active(self) -> int:
        """Texts that have not ended."""
        return len(self._active)

    def submit(self, requests: Sequence[Request], retry_after: int = 1) -> Call:
        """Put the texts of a call in line.

        Raises:
            ApiError: 429 where the queue is full, 503 where the server is stopping or its engine is broken.
        """
        if self.draining:
            raise ApiError(503, "the server is shutting down", retry_after=retry_after)
        if self.broken:
            raise ApiError(503, f"the engine does not work any more: {self.broken}")
        if len(requests) > self.capacity:
            raise ApiError(400, f"{len(requests)} texts are more than the {self.capacity} that fit", "n")
        if len(self._active) + len(requests) > self.capacity:
            raise ApiError(429, "the queue is full; try again later", retry_after=retry_after)
        call = Call()
        call.jobs = [_Job(request, call, place) for place, request in enumerate(requests)]
        self._active.update(call.jobs)
        self._commands.put(lambda: self._begin(call.jobs))
        return call

    def close(self, call: Call) -> None:
        """Whoever read the call is done with it: what has not ended is cancelled."""
        left = [job for job in call.jobs if job in self._active]
        self._active.difference_update(left)
        if left:
            self._commands.put(lambda: self._cancel(left))

    def drain(self) -> None:
        """Take no further calls."""
        self.draining = True

    def abandon(self) -> None:
        """End whatever still runs, so that its clients are told."""
        for job in list(self._active):
            self._receive([(job, Fault(503, "the server is shutting down"))])
            self._commands.put(lambda job=job: self._cancel([job]))  # type: ignore[misc]

    def stop(self) -> None:
        """End the thread; what still decodes is lost."""
        self.drain()
        self._commands.put(None)
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _receive(self, events: list[tuple[_Job, Event]]) -> None:
        """On the loop's thread: hand events to their calls; those of closed calls have no reader."""
        for job, event in events:
            if job in self._active:
                job.call.events.put_nowait((job.place, event))
                if not isinstance(event, Piece):
                    self._active.discard(job)

    # What follows runs on the engine's thread.

    def _run(self) -> None:
        while self._obey():
            try:
                self._step()
            except Exception as error:
                self._recover(error)

    def _obey(self) -> bool:
        """Carry out what was asked since; wait where nothing decodes. False once it is time to end."""
        while True:
            try:
                idle = bool(self.broken) or not self._rows.busy
                if idle:
                    self._engine.rest()
                command = self._commands.get() if idle else self._commands.get_nowait()
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            self._note()

    def _begin(self, jobs: Sequence[_Job]) -> None:
        failed: list[tuple[_Job, Event]] = []
        for job in jobs:
            if self.broken:
                failed.append((job, Fault(503, self.broken)))
            elif not job.over:
                job.number = self._rows.submit(job.request)
                self._jobs[job.number] = job
        self._send(failed)

    def _cancel(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            job.over = True
            if self._jobs.pop(job.number, None) is not None:
                self._rows.cancel(job.number)

    def _step(self) -> None:
        if self.broken or not self._rows.busy:
            return
        events: list[tuple[_Job, Event]] = []
        for piece in self._rows.step():
            job = self._jobs.get(piece.index)
            if job is not None:
                events.append((job, piece))
        for number in list(self._rows.completions):
            completion = self._rows.completions.pop(number)
            job = self._jobs.pop(number, None)
            if job is not None:
                events.append((job, completion))
        self._note()
        self._send(events)

    def _note(self) -> None:
        if not self.broken:
            rows = self._rows
            faults = self.load.faults
            self.load = Load(rows.running, rows.waiting, rows.used, faults)

    def _send(self, events: list[tuple[_Job, Event]]) -> None:
        assert self._loop is not None
        if events and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._receive, events)

    def _recover(self, error: Exception) -> None:
        """A step has failed: the texts that were decoding end with 500, those in line begin in new rows."""
        _LOG.error("a decoding step failed", exc_info=error)
        self.load.faults += 1
        waiting = self._rows.waiting_numbers
        again = [self._jobs[n] for n in waiting if n in self._jobs and self._jobs[n].tries < _TRIES]
        lost = [job for job in self._jobs.values() if job not in again]
        for job in again:
            job.tries += 1
        self._jobs.clear()
        try:
            self._rows = self._open()
        except Exception as second:
            _LOG.critical("the engine cannot be opened again", exc_info=second)
            self.broken = str(second) if isinstance(second, InputError) else type(second).__name__
            self.load = Load(faults=self.load.faults)
        self._send([(job, Fault(500, "the engine failed while decoding this text")) for job in lost])
        self._begin(again)

    def _open(self) -> Rows:
        """New rows on the buffers of the old ones; what was kept of earlier texts may be half written."""
        self._engine.forget()
        return self._engine.open(self._rows_wanted)
