"""`slipstream bench`: measure what drafting gains, on prompts like yours, against what else there is."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from slipstream.cli.flags import Decoding, Loading, ModelFlags, Sampling, SamplingFlags
from slipstream.cli.progress import counting
from slipstream.cli.session import open_session, say
from slipstream.cli.show import print_json
from slipstream.core.command_options import BenchOptions
from slipstream.core.options import EngineOptions, TargetOptions

if TYPE_CHECKING:
    from slipstream.bench.summary import Summary


@dataclass(frozen=True)
class BenchModels:
    """Which models are measured.

    Attributes:
        target: the model that speaks: smollm2 (bundled), a hub id, a folder or a GGUF file.
        draft: a drafter, given as often as there are some: auto (the bundled one), a folder or a hub id.
        url: an OpenAI-compatible server of the same target, given as often as there are some.
        url_model: its name there; the first one listed if not given.
        api_key: of the server.
    """

    target: Annotated[str, Parameter(alias="-t")] = "smollm2"
    draft: Annotated[tuple[str, ...], Parameter(alias="-d")] = ("auto",)
    url: tuple[str, ...] = ()
    url_model: str | None = None
    api_key: str | None = None


def bench(
    *,
    out: Annotated[Path, Parameter(alias="-o")],
    raw: bool = False,
    force: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    models: Annotated[BenchModels, Parameter(name="*", group="Models")] = BenchModels(),
    measure: Annotated[BenchOptions, Parameter(name="*", group="Benchmark")] = BenchOptions(),
    sampling: Sampling = SamplingFlags(),
    loading: Loading = TargetOptions(),
    decoding: Decoding = EngineOptions(),
) -> int:
    """Measure systems on the same prompts, in turns; a stopped call goes on where it was.

    Then: slipstream report RESULTS.

    Args:
        out: JSONL file of the results.
        raw: continue prompts as they are, without the chat template.
        force: begin an existing file anew.
        as_json: print the summary as one JSON document.
    """
    first = ModelFlags(models.target, models.draft[0])
    no_draft = "drafted" not in measure.systems
    session = open_session(first, loading, decoding, no_draft=no_draft)
    from slipstream.bench.command import Wanted, run_bench

    wanted = Wanted(
        models.draft,
        models.url,
        models.url_model,
        models.api_key,
        raw,
        _command(sys.argv[1:], models.api_key),
    )
    with counting(sys.stderr) as progress:
        summary = run_bench(session, wanted, measure, replace(sampling), out, force, say, progress)
    if as_json:
        print_json(_document(summary, out))
    else:
        _print(summary, out)
    return 0


def _command(words: list[str], secret: str | None) -> str:
    """The call as it was typed, for results that others will see: so without a key."""
    line = shlex.join(["slipstream", *words])
    return line.replace(secret, "...") if secret else line


def _document(summary: Summary, out: Path) -> dict[str, object]:
    from slipstream.bench.summary import document

    return {"out": str(out), **document(summary)}


def _print(summary: Summary, out: Path) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"times as fast as {summary.reference}")
    for heading in ("workload", "system", "tokens/s", "decoding only", "end to end", "tokens/round"):
        table.add_column(
            heading, justify="left" if heading in ("workload", "system") else "right", no_wrap=True
        )
    for workload in (*summary.workloads, "all"):
        for side in summary.sides:
            row = summary.row(side.name, workload)
            if row is None:
                continue
            speeds = [
                "" if one is None else f"{one.value:.2f} ({one.low:.2f}-{one.high:.2f})"
                for one in (row.decode_speedup, row.total_speedup)
            ]
            table.add_row(workload, side.name, f"{row.decode_tokens_per_s:.1f}", *speeds, row.length_words)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(table, markup=False)
    for mark in summary.marks:
        console.print(f"{mark.kind}: {mark.text}", markup=False, soft_wrap=True)
    console.print(summary.verdict, markup=False, soft_wrap=True)
    console.print(f"slipstream report {out}", markup=False, soft_wrap=True)
