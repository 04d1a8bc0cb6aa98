"""A whole benchmark from names: workloads, systems, the file; what `slipstream bench` does."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from slipstream.api import Session
from slipstream.bench.machine import loaded, machine, versions, weights_bytes
from slipstream.bench.records import Run, Side, read_results
from slipstream.bench.run import Bench, Plan, Progress
from slipstream.bench.server import ServerSystem
from slipstream.bench.summary import Summary, summarise
from slipstream.bench.sweep import sweep
from slipstream.bench.systems import GenerateSystem, OwnSystem, System, generation_settings
from slipstream.bench.workloads import Task, load_tasks
from slipstream.core.command_options import BenchOptions, split_names
from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions
from slipstream.decode import LookupProposer

Say = Callable[[str], None]

SYSTEMS: Final = ("plain", "drafted", "lookup", "transformers")
#: Switches of other engines that have them accept drafts by a coin.
_SYNTHETIC: Final = ("SGLANG_SIMULATE_ACC_LEN",)


@dataclass(frozen=True)
class Wanted:
    """What is compared.

    Attributes:
        drafts: names of drafters; the session has the first.
        urls: of servers.
        url_model: name of the target there.
        api_key: of the servers.
        raw: prompts are continued as they are.
        command: as it was typed.
    """

    drafts: tuple[str, ...] = ("auto",)
    urls: tuple[str, ...] = ()
    url_model: str | None = None
    api_key: str | None = None
    raw: bool = False
    command: str = ""


def run_bench(
    session: Session,
    wanted: Wanted,
    options: BenchOptions,
    sampling: SamplingOptions,
    out: Path,
    force: bool,
    say: Say,
    progress: Progress,
) -> Summary:
    """Measure, and sum up all that the file holds then.

    Args:
        session: of the target and the first drafter.
        wanted: what is compared.
        options: what is measured.
        sampling: of every request.
        out: file of the results.
        force: begin an existing file anew.
        say: gets lines for people.
        progress: of the measuring.

    Raises:
        InputError: a name is unknown, the file is another benchmark's, or nothing fits the context.
    """
    tasks = [task for name in split_names(options.workload) for task in load_tasks(name, options.prompts)]
    systems = list(build_systems(session, wanted, options, sampling, say))
    plan = Plan(
        *(tuple(tasks), sampling, wanted.raw, options.repeats),
        *(options.users, options.rate, options.seed),
    )
    bench = Bench(session, systems, plan, out)
    fitting, marks = _fitting(bench, tasks)
    bench.plan = replace(plan, tasks=tuple(fitting))
    held = bench.open(_run(session, systems, sampling, wanted, options, marks), force)
    if held:
        say(f"{out} holds {held} requests already; going on")
    if options.warm_up:
        say("warming up")
        bench.warm_up()
    bench.measure(progress)
    if options.users:
        left_out = sweep(bench, progress)
        if left_out:
            say(f"note: {', '.join(left_out)} cannot serve several users, and is measured alone only")
    return summarise(read_results(out))


def build_systems(
    session: Session, wanted: Wanted, options: BenchOptions, sampling: SamplingOptions, say: Say
) -> Iterator[System]:
    """The systems by their names, in the order of the names, servers last.

    Raises:
        InputError: an unknown name, or no drafter.
    """
    target, engine = session.target, session.options
    for name in split_names(options.systems):
        if name == "plain":
            yield OwnSystem(
                Side("plain", "plain", True, "our engine without drafts", 1), target, None, engine
            )
        elif name == "drafted":
            yield from _drafted(session, wanted, say)
        elif name == "lookup":
            proposer = LookupProposer(engine.block_size or LookupProposer().block_size)
            exact = engine.acceptor == "match"
            side = Side("lookup", "lookup", exact, "copied from the text so far", proposer.block_size)
            yield OwnSystem(side, target, proposer, engine)
        elif name == "transformers":
            generation_settings(sampling, target.info.eos_token_ids)
            yield GenerateSystem(target)
        else:
            raise InputError(f"{name} is no system; known are {', '.join(SYSTEMS)}, and servers by --url")
    for url in wanted.urls:
        if target.tokenizer is None:
            raise InputError("a server's answers cannot be read without the target's tokenizer")
        ends = target.info.eos_token_ids
        yield ServerSystem(url, target.tokenizer, ends, wanted.url_model, wanted.api_key)


def _drafted(session: Session, wanted: Wanted, say: Say) -> Iterator[System]:
    for number, draft in enumerate(wanted.drafts):
        one = session if number == 0 else session.redraft(draft, say)
        if one.drafter is None:
            raise InputError(
                f"{one.note or 'there is no drafter'}; name one with -d, or leave drafted out of --systems"
            )
        name = "drafted" if len(wanted.drafts) == 1 else f"drafted:{Path(draft).name}"
        block = one.options.block_size or one.drafter.config.block_size
        detail = f"drafter {draft}, {one.drafter.config.num_layers} layers, blocks of {block}"
        side = Side(name, "drafted", one.exact(), detail, block, weights_bytes(one.drafter))
        yield OwnSystem(side, one.target, one.proposer, one.options)


def _fitting(bench: Bench, tasks: list[Task]) -> tuple[list[Task], tuple[str, ...]]:
    """Tasks whose prompt and answer fit the context, and a mark about the others."""
    fitting = [task for task in tasks if bench.fits(task)]
    if not fitting:
        raise InputError("no prompt fits the target's context together with an answer of max_tokens")
    gone = len(tasks) - len(fitting)
    words = (
        f"{gone} of {len(tasks)} prompts are left out: with their answer they are longer than the context."
    )
    return fitting, (words,) if gone else ()


def _run(
    session: Session,
    systems: list[System],
    sampling: SamplingOptions,
    wanted: Wanted,
    options: BenchOptions,
    marks: tuple[str, ...],
) -> Run:
    switches = [name for name in _SYNTHETIC if os.environ.get(name)]
    if switches:
        marks = (*marks, f"Synthetic acceptance is switched on here ({', '.join(switches)}).")
    chosen = {name: list(v) if isinstance(v, tuple) else v for name, v in asdict(sampling).items()}
    chosen["logit_bias"] = {str(token): value for token, value in sampling.logit_bias.items()}
    return Run(
        command=wanted.command,
        started=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions=versions(),
        machine=machine(session.target),
        target=loaded(session.target),
        target_bytes=weights_bytes(session.target.model),
        sides=tuple(system.side for system in systems),
        sampling=chosen,
        engine=asdict(session.options),
        seed=options.seed,
        marks=marks,
    )
