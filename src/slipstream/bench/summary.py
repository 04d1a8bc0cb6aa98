"""From the records of a file to its figures: by system and workload, and by load. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from slipstream.bench import metrics
from slipstream.bench.marks import Mark, find_marks
from slipstream.bench.metrics import Interval, Load, Matched, Position
from slipstream.bench.records import Record, Results, Side

ALL: Final = "all"


@dataclass(frozen=True)
class Row:
    """One system on one workload, or on all of them.

    Attributes:
        system: its name.
        workload: its name, or `all`.
        requests: that were answered, and `tokens` emitted.
        tokens: emitted.
        acceptance: micro acceptance length; None where rounds are not known or there are no drafts.
        acceptance_macro: mean over requests.
        acceptance_stated: what a server that counts nothing said last, a mean over all that it has served.
        decode_tokens_per_s: decoding only.
        total_tokens_per_s: from the request on.
        decode_speedup: over the reference, decoding only; None for the reference.
        total_speedup: end to end.
        ttft_p50_s: median time to the first token, and so on.
        ttft_p90_s: 90 of 100 wait no longer.
        tpot_p50_s: median time per token after the first.
        tpot_p90_s: 90 of 100 need no longer.
        drafts_per_round: mean; parked rounds have none.
        parked: share of rounds without drafts.
        positions: acceptance by position.
        runs: in how many rounds so many drafts were kept.
        draft_share: of the time between first and last token; None where it was not taken.
        verify_share: likewise.
        ties: texts that part from the reference's at a tie.
        different: texts that part otherwise.
        peak_memory_bytes: most of all requests.
    """

    system: str
    workload: str
    requests: int
    tokens: int
    acceptance: Interval | None
    acceptance_macro: float | None
    acceptance_stated: float | None
    decode_tokens_per_s: float
    total_tokens_per_s: float
    decode_speedup: Interval | None
    total_speedup: Interval | None
    ttft_p50_s: float
    ttft_p90_s: float
    tpot_p50_s: float
    tpot_p90_s: float
    drafts_per_round: float
    parked: float
    positions: tuple[Position, ...]
    runs: Mapping[int, int]
    draft_share: float | None
    verify_share: float | None
    ties: int
    different: int
    peak_memory_bytes: int

    @property
    def length_words(self) -> str:
        """Tokens per round in a table; what a server only states is not shown as if it were counted."""
        if self.acceptance is not None:
            return f"{self.acceptance.value:.2f}"
        return "" if self.acceptance_stated is None else f"stated {self.acceptance_stated:.1f}"


@dataclass(frozen=True)
class Curve:
    """One system under all loads.

    Attributes:
        system: its name.
        loads: by number of users.
        matched: ratio of throughputs to the reference's at every interactivity that both were measured at.
    """

    system: str
    loads: tuple[Load, ...]
    matched: tuple[Matched, ...]


@dataclass(frozen=True)
class Summary:
    """All figures of a file.

    Attributes:
        verdict: in one sentence.
        reference: name of the system that the others are compared with.
        rows: by system, then workload, `all` last.
        curves: empty without several users.
        marks: what to know.
        sides: the systems.
    """

    verdict: str
    reference: str
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    marks: tuple[Mark, ...]
    sides: tuple[Side, ...]

    def row(self, system: str, workload: str) -> Row | None:
        """The figures of a system on a workload; None where it was not measured."""
        return next((row for row in self.rows if (row.system, row.workload) == (system, workload)), None)

    def whole(self, system: str) -> Row | None:
        """The figures of a system on all there is."""
        return next((row for row in reversed(self.rows) if row.system == system), None)

    @property
    def workloads(self) -> tuple[str, ...]:
        """Their names, `all` left out."""
        return tuple(dict.fromkeys(row.workload for row in self.rows if row.workload != ALL))


def summarise(results: Results) -> Summary:
    """All figures of a file."""
    sides = tuple(dict.fromkeys(side for run in results.runs for side in run.sides))
    reference = sides[0].name
    alone = [item for item in results.records if item.concurrency == 1]
    workloads = list(dict.fromkeys(item.workload for item in alone))
    rows = []
    for side in sides:
        for workload in [*workloads, ALL] if len(workloads) > 1 else workloads:
            of = [item for item in alone if workload in (ALL, item.workload)]
            own = [item for item in of if item.system == side.name]
            base = [item for item in of if item.system == reference]
            if own:
                rows.append(_row(side, workload, own, base if side.name != reference else None))
    marks = find_marks(results)
    return Summary(
        _verdict(rows, sides, marks), reference, tuple(rows), _curves(results, sides), marks, sides
    )


def document(summary: Summary) -> dict[str, Any]:
    """The JSON document of a summary."""
    found = asdict(summary)
    for row, source in zip(found["rows"], summary.rows, strict=True):
        row["positions"] = [
            {**asdict(p), "survived": p.survived, "conditional": p.conditional} for p in source.positions
        ]
        row["runs"] = {str(length): count for length, count in source.runs.items()}
    return found


def _row(side: Side, workload: str, own: Sequence[Record], base: Sequence[Record] | None) -> Row:
    measured = [item.measured for item in own]
    pairs = metrics.paired(own, base) if base is not None else []
    rounds = sum(item.rounds for item in measured)
    drafted = sum(sum(item.drafted_per_position) for item in measured)
    drafting = side.kind not in ("plain", "transformers") and rounds > 0
    splits = [(item.split, item.decode_s) for item in measured if item.split is not None]
    seconds = sum(spent for _, spent in splits)
    per_token = [each for item in measured if (each := metrics.time_per_token(item)) is not None]
    first = [item.ttft_s for item in measured]
    parted = [item.divergence for item in own if item.divergence is not None]
    return Row(
        system=side.name,
        workload=workload,
        requests=len(own),
        tokens=sum(item.tokens for item in measured),
        acceptance=metrics.acceptance_interval(own) if drafting else None,
        acceptance_macro=metrics.macro_acceptance(measured) if drafting else None,
        acceptance_stated=None if rounds else metrics.stated_acceptance(measured),
        decode_tokens_per_s=metrics.decode_rate(measured),
        total_tokens_per_s=metrics.total_rate(measured),
        decode_speedup=metrics.decode_speedup(pairs) if pairs else None,
        total_speedup=metrics.total_speedup(pairs) if pairs else None,
        ttft_p50_s=metrics.percentile(first, 0.5),
        ttft_p90_s=metrics.percentile(first, 0.9),
        tpot_p50_s=metrics.percentile(per_token, 0.5),
        tpot_p90_s=metrics.percentile(per_token, 0.9),
        drafts_per_round=drafted / rounds if rounds else 0.0,
        parked=sum(item.parked for item in measured) / rounds if rounds else 0.0,
        positions=metrics.acceptance_by_position(measured),
        runs=metrics.run_lengths(measured) if drafting else {},
        draft_share=sum(split.draft_s for split, _ in splits) / seconds if seconds else None,
        verify_share=sum(split.verify_s for split, _ in splits) / seconds if seconds else None,
        ties=sum(found.tie for found in parted),
        different=sum(not found.tie for found in parted),
        peak_memory_bytes=max(item.peak_memory_bytes for item in measured),
    )


def _curves(results: Results, sides: Sequence[Side]) -> tuple[Curve, ...]:
    loads: dict[str, tuple[Load, ...]] = {}
    for side in sides:
        by_users: dict[int, list[Record]] = {}
        for item in results.records:
            if item.system == side.name and item.turn == 0:  # as several users ask first turns alone
                by_users.setdefault(item.concurrency, []).append(item)
        if len(by_users) > 1:
            loads[side.name] = tuple(metrics.load_point(by_users[users]) for users in sorted(by_users))
    base = loads.get(sides[0].name, ())
    return tuple(
        Curve(name, found, metrics.matched(found, base) if name != sides[0].name else ())
        for name, found in loads.items()
    )


def _verdict(rows: Sequence[Row], sides: Sequence[Side], marks: Sequence[Mark]) -> str:
    """One sentence: the gain of the best of ours by workload, and whether it may be quoted."""
    ours = [side.name for side in sides[1:] if side.kind == "drafted"] or [side.name for side in sides[1:]]
    if not ours:
        whole = rows[-1].decode_tokens_per_s if rows else 0.0
        return f"{sides[0].name} decodes {whole:.1f} tokens/s; nothing was compared with it."
    of = {
        name: [row for row in rows if row.system == name and row.decode_speedup is not None] for name in ours
    }
    name = max(ours, key=lambda item: max((_speed(row) for row in of[item][-1:]), default=0.0))
    each = [row for row in of[name] if row.workload != ALL]
    if not each:
        return "Nothing was measured with two systems."
    better = sorted((row for row in each if _certain(row) > 0), key=_speed, reverse=True)
    worse = sorted((row for row in each if _certain(row) < 0), key=_speed)
    equal = [row for row in each if _certain(row) == 0]
    parts = []
    if better:
        speeds = [f"{_speed(row):.2f}x as fast on {row.workload}" for row in better]
        parts.append(f"{_list(speeds)} as {sides[0].name}")
    if worse:
        parts.append(_list([f"slower on {row.workload} ({_speed(row):.2f}x)" for row in worse]))
    if equal:
        parts.append(f"no clear gain on {_list([row.workload for row in equal])}")
    parked = [row.workload for row in (*worse, *equal) if row.parked > 0.5]
    if parked:
        parts.append(f"drafting parked itself on {_list(parked)}")
    stop = " Not to be quoted: see the marks." if any(mark.kind == "stop" for mark in marks) else ""
    return f"{name}: {'; '.join(parts)}.{stop}"


def _speed(row: Row) -> float:
    return row.decode_speedup.value if row.decode_speedup is not None else 0.0


def _certain(row: Row) -> int:
    return row.decode_speedup.certain if row.decode_speedup is not None else 0


def _list(words: Sequence[str]) -> str:
    """With commas, and an `and` before the last."""
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))
