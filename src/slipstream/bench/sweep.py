"""Several users at a time: closed loads, where each asks again at once, and open ones, where they come."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Final

from slipstream.bench.records import Measured
from slipstream.bench.run import WARM_UP_TOKENS, Bench, Progress
from slipstream.bench.server import ServerSystem
from slipstream.bench.systems import OwnSystem
from slipstream.bench.watch import Trail, forget_peak, peak_memory
from slipstream.bench.workloads import Task
from slipstream.core.records import Request

#: Requests per user, at least, so that more than the start and the end of a load is seen.
PER_USER: Final = 2
_IDLE_S: Final = 0.001


@dataclass(frozen=True)
class _Job:
    task: Task
    repeat: int
    request: Request


def sweep(bench: Bench, progress: Progress) -> list[str]:
    """Every system under every load that the file does not hold yet; a load is written when it has ended.

    Returns:
        Names of systems that cannot serve several users, for people.
    """
    left_out: list[str] = []
    plan = bench.plan
    done = {(item.system, item.concurrency, item.rate) for item in bench.records.values()}
    total = len(plan.users) * len(bench.systems)
    for place, users in enumerate(plan.users):
        jobs = _jobs(bench, users)
        # The order moves on with each load, as it does with each prompt.
        shift = place % len(bench.systems)
        for number, system in enumerate((*bench.systems[shift:], *bench.systems[:shift])):
            name = system.side.name
            progress(place * len(bench.systems) + number, total, f"{users} users, {name}")
            if not isinstance(system, OwnSystem | ServerSystem):
                left_out += [] if name in left_out else [name]
            elif (name, users, plan.rate) not in done:
                _load(bench, system, users, jobs)
    progress(total, total, "")
    return left_out


def _jobs(bench: Bench, users: int) -> list[_Job]:
    """First turns of all tasks, again and again until there are enough for so many users."""
    tasks = bench.plan.tasks
    count = max(len(tasks), users * PER_USER)
    requests = [bench.request(task, 0, ()) for task in tasks]
    return [
        _Job(tasks[number % len(tasks)], number // len(tasks), requests[number % len(tasks)])
        for number in range(count)
    ]


def _load(bench: Bench, system: OwnSystem | ServerSystem, users: int, jobs: Sequence[_Job]) -> None:
    """One system under one load; its records are written together."""
    requests = [job.request for job in jobs]
    due = _due(len(jobs), bench.plan.rate, bench.plan.seed)
    if isinstance(system, OwnSystem):
        measured = serve(system, requests, users, due, bench.origin)
    else:
        measured = ask(system, requests, users, due, bench.origin)
    records = []
    for job, one in zip(jobs, measured, strict=True):
        # The text of the reference alone is the text under load, too.
        key = (bench.systems[0].side.name, job.task.workload, job.task.name, 0, 0, 1, 0.0)
        records.append(
            replace(
                bench.record(system, job.task, 0, job.repeat, job.request, one),
                concurrency=users,
                rate=bench.plan.rate,
                divergence=bench.divergence(system, job.request, one, bench.records[key].measured.token_ids),
            )
        )
    bench.keep(records)


def _due(count: int, rate: float, seed: int) -> list[float] | None:
    """Seconds from the start at which requests come, by a Poisson process; None for a closed load."""
    if not rate:
        return None
    draw, now, times = random.Random(seed), 0.0, []
    for _ in range(count):
        now += draw.expovariate(rate)
        times.append(now)
    return times


def serve(
    system: OwnSystem, requests: Sequence[Request], users: int, due: Sequence[float] | None, origin: float
) -> list[Measured]:
    """Requests through the rows of one engine.

    Args:
        system: ours.
        requests: in the order in which they are asked.
        users: rows; in a closed load as many requests are under way at any time.
        due: when each comes (open load), in seconds from the start.
        origin: start of the run.
    """
    longest = max(len(item.prompt_ids) + item.sampling.max_tokens for item in requests)
    engine = system.engine(users, longest)
    short = [replace(item, sampling=item.sampling.at_most(WARM_UP_TOKENS)) for item in requests[:users]]
    engine.generate(short)
    forget_peak(engine.target.device)
    rows = engine.open(users)
    begun = time.perf_counter()
    trails: list[Trail] = []
    while len(trails) < len(requests) or rows.busy:
        under_way = sum(not trail.reason for trail in trails)
        while len(trails) < len(requests):
            now = time.perf_counter()
            if due is None and under_way >= users:
                break
            if due is not None and begun + due[len(trails)] > now:
                break
            rows.submit(requests[len(trails)])
            # Who comes while all rows are taken waits; that is part of their time.
            trails.append(Trail(now if due is None else begun + due[len(trails)], engine.block_size - 1))
            under_way += 1
        if not rows.busy:
            time.sleep(_IDLE_S)
            continue
        for piece in rows.step():
            trails[piece.index].add(piece, time.perf_counter())
    memory = peak_memory(engine.target.device)
    return [trail.measured(origin, None, memory) for trail in trails]


def ask(
    system: ServerSystem, requests: Sequence[Request], users: int, due: Sequence[float] | None, origin: float
) -> list[Measured]:
    """Requests to a server, by so many users at a time (closed load) or as they come (open load)."""
    short = [replace(item, sampling=item.sampling.at_most(WARM_UP_TOKENS)) for item in requests[:users]]
    with ThreadPoolExecutor(users) as pool:  # as our own engine is warmed with so many at once
        list(pool.map(lambda item: system.answer(item, origin, alone=False), short))
    begun = time.perf_counter()

    def one(number: int) -> Measured:
        if due is not None:
            time.sleep(max(begun + due[number] - time.perf_counter(), 0.0))
        return system.answer(requests[number], origin, alone=False)

    with ThreadPoolExecutor(users if due is None else len(requests)) as pool:
        return list(pool.map(one, range(len(requests))))
