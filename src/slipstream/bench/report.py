"""A file of results as a page that people read, and as Markdown. What is said is decided in `summary`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from slipstream.bench import metrics, plots
from slipstream.bench.marks import Mark, between
from slipstream.bench.metrics import Interval
from slipstream.bench.records import Record, Results, Run
from slipstream.bench.summary import ALL, Row, Summary, summarise
from slipstream.core.files import replacing


@dataclass(frozen=True)
class Change:
    """One system on one workload in two files.

    Attributes:
        system: its name.
        workload: its name.
        now: figures of this file.
        before: of the other.
        ratio: of the decode-only rates, over the prompts that both files hold, paired by prompt.
        length: acceptance length now less before; None without drafts.
    """

    system: str
    workload: str
    now: Row
    before: Row
    ratio: Interval
    length: float | None


def write_report(
    results: Results, out: Path, markdown: Path | None, against: Results | None, force: bool
) -> Summary:
    """Write the page, and the Markdown if it is wanted.

    Raises:
        InputError: a file exists and `force` is not set.
        MissingExtraError: there is no matplotlib.
    """
    summary = summarise(results)
    page = html(results, summary, against)
    table = to_markdown(results, summary, against)
    with replacing(out, force) as file:
        file.write(page)
    if markdown is not None:
        with replacing(markdown, force) as file:
            file.write(table)
    return summary


def html(results: Results, summary: Summary, against: Results | None = None) -> str:
    """One self-contained page."""
    return _render("report.html.j2", results, summary, against, pictures=_pictures(summary))


def to_markdown(results: Results, summary: Summary, against: Results | None = None) -> str:
    """Verdict, marks and tables."""
    text = _render("report.md.j2", results, summary, against, pictures={})
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def changes(results: Results, against: Results) -> list[Change]:
    """What has changed from one file to the other, where both have the system and the workload."""
    now, before = summarise(results), summarise(against)
    found = []
    for row in now.rows:
        other = before.row(row.system, row.workload)
        if other is None:
            continue
        own, base = (
            [
                item
                for item in side.records
                if item.system == row.system
                and item.concurrency == 1
                and row.workload in (ALL, item.workload)
            ]
            for side in (results, against)
        )
        pairs = metrics.paired(own, base)
        if not pairs:
            continue
        lengths = (row.acceptance, other.acceptance)
        gained = None if None in lengths else lengths[0].value - lengths[1].value  # type: ignore[union-attr]
        found.append(Change(row.system, row.workload, row, other, metrics.decode_speedup(pairs), gained))
    return found


def example(results: Results) -> Record | None:
    """The text of a drafting system whose tokens per round are nearest to the median of its own."""
    kinds = {side.name: side.kind for run in results.runs for side in run.sides}
    found = [
        item
        for item in results.records
        if kinds.get(item.system) in ("drafted", "lookup") and item.measured.spans and item.measured.rounds
    ]
    preferred = [item for item in found if kinds[item.system] == "drafted"] or found
    if not preferred:
        return None
    length = {item.key: item.measured.emitted_in_rounds / item.measured.rounds for item in preferred}
    middle = metrics.percentile(sorted(length.values()), 0.5)
    # Of equally typical ones the longest text shows most.
    return min(preferred, key=lambda item: (round(abs(length[item.key] - middle), 2), -item.measured.tokens))


def colours(summary: Summary) -> dict[str, str]:
    """A colour per system, the same in every plot; the reference is grey."""
    return {
        side.name: plots.COLOURS[number % len(plots.COLOURS)] for number, side in enumerate(summary.sides)
    }


def _pictures(summary: Summary) -> dict[str, str]:
    """The plots that there is something to show in."""
    found: dict[str, str] = {}
    shade, reference = colours(summary), summary.reference
    names = [name for name in (*summary.workloads, ALL) if summary.row(reference, name) is not None]
    speeds: dict[str, dict[str, Interval]] = {name: {} for name in names}
    for one in summary.rows:
        if one.decode_speedup is not None and one.workload in speeds:
            speeds[one.workload][one.system] = one.decode_speedup
    if any(speeds.values()):
        found["speedups"] = plots.speedups(speeds, reference, shade)
    whole = [every for side in summary.sides if (every := summary.whole(side.name)) is not None]
    positions = {row.system: row.positions for row in whole if any(p.drafted for p in row.positions)}
    if positions:
        found["positions"] = plots.positions(positions, shade)
    kept = {row.system: row.runs for row in whole if row.runs}
    if kept:
        found["runs"] = plots.runs(kept, shade)
    splits = {
        row.system: (row.draft_share, row.verify_share)
        for row in whole
        if row.draft_share is not None and row.verify_share is not None
    }
    if splits:
        found["splits"] = plots.splits(splits)
    if summary.curves:
        found["curves"] = plots.curves({curve.system: curve.loads for curve in summary.curves}, shade)
        matched = {curve.system: curve.matched for curve in summary.curves if curve.matched}
        if matched:
            found["ratios"] = plots.ratios(matched, reference, shade)
    return found


def _render(
    template: str, results: Results, summary: Summary, against: Results | None, pictures: Mapping[str, str]
) -> str:
    environment = Environment(
        loader=PackageLoader("slipstream.bench"),
        autoescape=template.endswith("html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"interval": _interval, "milliseconds": _milliseconds, "size": _size}
    sides = {side.name: side for side in summary.sides}
    extra: Sequence[Mark] = between(results, against) if against is not None else ()
    return environment.get_template(template).render(
        run=results.runs[-1],
        runs=results.runs,
        summary=summary,
        marks=(*extra, *summary.marks),
        sides=sides,
        rows=[row for name in (*summary.workloads, ALL) for row in summary.rows if row.workload == name],
        whole=[row for side in summary.sides if (row := summary.whole(side.name)) is not None],
        best={
            curve.system: max(curve.matched, key=lambda m: m.ratio)
            for curve in summary.curves
            if curve.matched
        },
        pictures=pictures,
        example=example(results),
        warm=all(item.warm for item in results.records),
        changes=changes(results, against) if against is not None else [],
        against=against,
        shade=colours(summary),
        facts=_facts(results.runs[-1]),
        least_tries=plots.LEAST_TRIES,
    )


def _facts(run: Run) -> list[tuple[str, str]]:
    """What has to be the same for these numbers to come again."""

    def words(pairs: Mapping[str, Any]) -> str:
        return ", ".join(f"{name} {value}" for name, value in pairs.items())

    stated = {name: value for name, value in run.sampling.items() if value not in (None, [], {}, ())}
    return [
        ("Command", run.command or "(from Python)"),
        ("Measured", run.started),
        ("Target", words(run.target)),
        ("Machine", words(run.machine)),
        ("Versions", words(run.versions)),
        ("Sampling", json.dumps(stated, ensure_ascii=False)),
        ("Engine", json.dumps(dict(run.engine), ensure_ascii=False)),
    ]


def _interval(value: Interval | None) -> str:
    return "" if value is None else f"{value.value:.2f}x ({value.low:.2f}-{value.high:.2f})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f}" if seconds >= 0.1 else f"{seconds * 1000:.1f}"


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return "" if count == 0 else f"{count} B"
