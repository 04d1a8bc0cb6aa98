"""A benchmark: every prompt by every system, one after the other, and a line of results for each.

Systems take turns on every prompt, in an order that moves on with each, after a warm-up of all, so that a
machine that grows slower does so for all of them. What was measured is kept when it stops; a later call with
the same settings goes on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from slipstream.api import Session
from slipstream.bench.prompts import looks_random
from slipstream.bench.records import (
    Divergence,
    Measured,
    Record,
    RecordKey,
    Run,
    append,
    digest,
    digest_ids,
    mend,
    read_results,
)
from slipstream.bench.systems import System
from slipstream.bench.workloads import Task
from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.decode.lossless import first_difference

#: Done, all, and what is being measured.
Progress = Callable[[int, int, str], None]

WARM_UP_TOKENS: Final = 32
_WARM_UP = "Say in a few words what makes a good cup of tea."
RANDOM_PROMPT: Final = "random-tokens"


@dataclass(frozen=True)
class Plan:
    """What is to be measured.

    Attributes:
        tasks: of all workloads.
        sampling: of every request.
        raw: prompts are continued as they are, without the chat template.
        repeats: of every request.
        users: numbers of users above 1.
        rate: arrivals per second of an open load; 0.0 for closed ones.
        seed: of arrivals.
    """

    tasks: tuple[Task, ...]
    sampling: SamplingOptions
    raw: bool = False
    repeats: int = 1
    users: tuple[int, ...] = ()
    rate: float = 0.0
    seed: int = 0


class Bench:
    """Measures systems on one target.

    Args:
        session: of the target; its tokenizer and template make the prompts of all systems.
        systems: compared; the first one is the reference for texts and for speed.
        plan: what is measured.
        path: of the results.

    Raises:
        InputError: there is nothing to compare.
    """

    def __init__(self, session: Session, systems: Sequence[System], plan: Plan, path: Path) -> None:
        names = [system.side.name for system in systems]
        if not names:
            raise InputError("there is no system to measure")
        if len(set(names)) < len(names):
            raise InputError(f"a system is named twice: {', '.join(names)}")
        self.session, self.systems, self.plan, self.path = session, tuple(systems), plan, path
        self.origin = time.perf_counter()
        template = getattr(session.target.tokenizer, "chat_template", None)
        self.template_hash = digest("raw" if plan.raw else str(template))
        self.records: dict[RecordKey, Record] = {}
        self._random: dict[str, bool] = {}
        self._warm: set[str] = set()

    def open(self, run: Run, force: bool = False) -> int:
        """Begin a file, or go on with one.

        Returns:
            Records that it holds already.

        Raises:
            InputError: the file has other settings or systems.
        """
        if self.path.exists() and not force:
            mend(self.path)
            before = read_results(self.path)
            if any(run.settings != old.settings or run.sides != old.sides for old in before.runs):
                raise InputError(
                    f"{self.path} was measured with other settings, systems or versions; give another file, "
                    "or --force to begin it anew"
                )
            self.records = {record.key: record for record in before.records}
        elif self.path.exists():
            self.path.unlink()
        append(self.path, [run])
        return len(self.records)

    def warm_up(self) -> None:
        """Every system answers two prompts that are in no workload, so that none pays for first times.

        One is short, one as long as the longest first turn, as kernels and graphs depend on lengths.
        """
        short = self.plan.sampling.at_most(WARM_UP_TOKENS)
        tokenizer = self.session.target.tokenizer
        ids = [1, 2, 3] if tokenizer is None else list(tokenizer(_WARM_UP)["input_ids"])
        longest = max((len(self.request(task, 0, ()).prompt_ids) for task in self.plan.tasks), default=0)
        for system in self.systems:
            system.answer(Request(ids, short), self.origin)
            if longest > len(ids):
                long = (ids * (longest // len(ids) + 1))[:longest]
                system.answer(Request(long, short), self.origin)
            self._warm.add(system.side.name)

    def measure(self, progress: Progress) -> None:
        """All requests that the file does not hold yet, alone."""
        tasks, repeats = self.plan.tasks, self.plan.repeats
        total = sum(max(len(task.turns), 1) for task in tasks) * repeats * len(self.systems)
        done = 0
        for repeat in range(repeats):
            for number, task in enumerate(tasks):
                for turn, request in self._turns(task, repeat):
                    progress(done, total, f"{task.workload} {task.name}")
                    self._answer(task, turn, repeat, request, number + repeat)
                    done += len(self.systems)
        progress(total, total, "")

    def fits(self, task: Task) -> bool:
        """Whether a task's first prompt leaves room for an answer in every context."""
        ids = self.request(task, 0, ()).prompt_ids
        return len(ids) + self.plan.sampling.max_tokens <= self.session.plain.max_context

    def request(self, task: Task, turn: int, answers: Sequence[str]) -> Request:
        """The prompt of a turn, after these answers."""
        if task.prompt_ids:
            return Request(task.prompt_ids, self.plan.sampling)
        if self.plan.raw:
            return Request(self.session.encode(task.turns[0], raw=True), self.plan.sampling)
        messages: list[Mapping[str, Any]] = list(task.history)
        for place in range(turn + 1):
            messages.append({"role": "user", "content": task.turns[place]})
            if place < turn:
                messages.append({"role": "assistant", "content": answers[place]})
        return Request(self.session.encode(messages), self.plan.sampling)

    def marks(self, task: Task, request: Request) -> tuple[str, ...]:
        """What a reader must know about a prompt."""
        if task.source != "file":
            return ()
        key = digest_ids(request.prompt_ids)
        if key not in self._random:
            self._random[key] = looks_random(self.session.target, request.prompt_ids)
        return (RANDOM_PROMPT,) if self._random[key] else ()

    def record(
        self, system: System, task: Task, turn: int, repeat: int, request: Request, measured: Measured
    ) -> Record:
        """A record of a request alone."""
        return Record(
            system=system.side.name,
            workload=task.workload,
            prompt=task.name,
            turn=turn,
            repeat=repeat,
            prompt_tokens=len(request.prompt_ids),
            prompt_hash=digest_ids(request.prompt_ids),
            template_hash="ids" if task.prompt_ids else self.template_hash,
            measured=measured,
            warm=system.side.name in self._warm,
            marks=self.marks(task, request),
        )

    def _turns(self, task: Task, repeat: int) -> Iterator[tuple[int, Request]]:
        """A conversation turn by turn: what comes next depends on what the reference system has said."""
        reference = self.systems[0].side.name
        answers: list[str] = []
        for turn in range(1 if self.plan.raw or task.prompt_ids else len(task.turns)):
            request = self.request(task, turn, answers)
            if len(request.prompt_ids) + self.plan.sampling.max_tokens > self.session.plain.max_context:
                return  # the conversation has outgrown the context
            yield turn, request
            key = (reference, task.workload, task.name, turn, repeat, 1, 0.0)
            answers.append(self.records[key].measured.text)

    def _answer(self, task: Task, turn: int, repeat: int, request: Request, shift: int) -> None:
        """One request by all systems that have not answered it, written at once."""
        shift %= len(self.systems)
        new: dict[str, Record] = {}
        for system in (*self.systems[shift:], *self.systems[:shift]):
            key = (system.side.name, task.workload, task.name, turn, repeat, 1, 0.0)
            if key in self.records:
                new[system.side.name] = self.records[key]
                continue
            measured = system.answer(request, self.origin)
            new[system.side.name] = self.record(system, task, turn, repeat, request, measured)
            self._warm.add(system.side.name)
        first = new[self.systems[0].side.name]
        fresh = []
        for system in self.systems:
            record = new[system.side.name]
            if record.key not in self.records:
                ids = first.measured.token_ids
                fresh.append(
                    replace(record, divergence=self.divergence(system, request, record.measured, ids))
                )
        self.keep(fresh)

    def keep(self, records: Sequence[Record]) -> None:
        """Write new records, all together, and remember them."""
        append(self.path, records)
        self.records |= {record.key: record for record in records}

    def divergence(
        self, system: System, request: Request, measured: Measured, reference: Sequence[int]
    ) -> Divergence | None:
        """Where a text parts from the reference's, where both promise the same one."""
        promised = request.sampling.temperature == 0 or (system.side.exact and self.systems[0].side.exact)
        if not promised or measured.token_ids == tuple(reference):
            return None
        found = first_difference(self.session.target, request, measured.token_ids, reference)
        if found is None:
            return None
        gap = found.gap if found.gap != float("inf") else None
        return Divergence(found.position, gap, found.bound, found.is_tie)
