"""The definitions: every number of a benchmark as a pure function of its records.

Micro-averages pool all rounds, macro-averages are means over requests. A rate counts tokens after the first
per second between first and last token (decoding only), or all tokens per second from the request on (end to
end). A speed-up is a ratio of two rates over the same requests.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from slipstream.bench.records import Measured, Record

RESAMPLES: Final = 2000
#: A slow start: at most so many requests, so many times dearer than any of at least so many later ones.
_HEAD: Final = 3
_DEARER: Final = 2.0
_LATER: Final = 5
#: Of the intervals.
CONFIDENCE: Final = 0.95


@dataclass(frozen=True)
class Interval:
    """A value with the bounds of its bootstrap interval."""

    value: float
    low: float
    high: float

    @property
    def certain(self) -> int:
        """1 where all of the interval lies above 1, -1 where all lies below, else 0."""
        return 1 if self.low > 1 else -1 if self.high < 1 else 0


@dataclass(frozen=True)
class Position:
    """How drafts at one position fared.

    Attributes:
        number: k, from 1.
        drafted: rounds that had a draft there.
        tried: rounds in which it was looked at.
        accepted: rounds that kept it.
    """

    number: int
    drafted: int
    tried: int
    accepted: int

    @property
    def survived(self) -> float:
        """Kept, of all drafts made there."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def conditional(self) -> float:
        """Kept, of those looked at: this does not depend on how many drafts a round has."""
        return self.accepted / self.tried if self.tried else 0.0


@dataclass(frozen=True)
class Load:
    """One system under one load.

    Attributes:
        concurrency: users at a time.
        interactivity: tokens/s that a user sees: mean over requests of the decode-only rate.
        throughput: tokens/s in all, from the first request to the end of the last; of one user alone the
            end-to-end rate, as other systems have their turns between the requests.
    """

    concurrency: int
    interactivity: float
    throughput: float


@dataclass(frozen=True)
class Matched:
    """Two systems at the same interactivity, and the ratio of their throughputs there."""

    interactivity: float
    ratio: float


def micro_acceptance(measured: Sequence[Measured]) -> float:
    """Tokens emitted by rounds over their number, all requests pooled; 1.0 without rounds."""
    rounds = sum(item.rounds for item in measured)
    return sum(item.emitted_in_rounds for item in measured) / rounds if rounds else 1.0


def macro_acceptance(measured: Sequence[Measured]) -> float:
    """Mean over requests that had rounds of tokens per round; 1.0 without rounds."""
    each = [item.emitted_in_rounds / item.rounds for item in measured if item.rounds]
    return sum(each) / len(each) if each else 1.0


def acceptance_by_position(measured: Sequence[Measured]) -> tuple[Position, ...]:
    """Counts of all requests, by position."""
    longest = max((len(item.drafted_per_position) for item in measured), default=0)

    def total(pick: Callable[[Measured], tuple[int, ...]], place: int) -> int:
        return sum(counts[place] for item in measured if place < len(counts := pick(item)))

    return tuple(
        Position(
            place + 1,
            total(lambda item: item.drafted_per_position, place),
            total(lambda item: item.tried_per_position, place),
            total(lambda item: item.accepted_per_position, place),
        )
        for place in range(longest)
    )


def by_position(
    rounds: Sequence[tuple[int, int, bool]], most: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Rounds to counts by position.

    Args:
        rounds: of each its drafts, how many were kept, and whether the text ended with the last kept
            draft, so that nobody looked at the next one.
        most: positions.

    Returns:
        Drafted, tried and accepted per position.
    """
    drafted, tried, accepted = [0] * most, [0] * most, [0] * most
    for drafts, kept, ended in rounds:
        for place in range(drafts):
            drafted[place] += 1
            tried[place] += place < kept + (not ended)
            accepted[place] += place < kept
    return tuple(drafted), tuple(tried), tuple(accepted)


def stated_acceptance(measured: Sequence[Measured]) -> float | None:
    """The last mean that a server stated; None where it did not. Not a figure of these requests alone."""
    said = [item.stated_acceptance for item in measured if item.stated_acceptance is not None]
    return said[-1] if said else None


def run_lengths(measured: Sequence[Measured]) -> dict[int, int]:
    """In how many rounds so many drafts were kept, ascending; from totals by position where need be."""
    counts: Counter[int] = Counter()
    for item in measured:
        counts.update(item.accepted_runs)
        if not item.accepted_runs and item.accepted_per_position:
            reached = (item.rounds, *item.accepted_per_position, 0)
            counts.update({place: reached[place] - reached[place + 1] for place in range(len(reached) - 1)})
    return {length: count for length, count in sorted(counts.items()) if count}


def decode_rate(measured: Sequence[Measured]) -> float:
    """Tokens after the first per second between first and last token; 0.0 without time."""
    seconds = sum(item.decode_s for item in measured)
    return sum(max(item.tokens - 1, 0) for item in measured) / seconds if seconds > 0 else 0.0


def total_rate(measured: Sequence[Measured]) -> float:
    """Tokens per second from the request to its end; 0.0 without time."""
    seconds = sum(item.total_s for item in measured)
    return sum(item.tokens for item in measured) / seconds if seconds > 0 else 0.0


def time_per_token(measured: Measured) -> float | None:
    """Seconds per token after the first; None for a text of one token.

    Over the whole request, as a round brings several tokens at once.
    """
    return measured.decode_s / (measured.tokens - 1) if measured.tokens > 1 else None


def percentile(values: Sequence[float], share: float) -> float:
    """The value below which a share of them lies, on the line between neighbours; 0.0 of none."""
    return float(np.quantile(np.asarray(values, dtype=float), share)) if values else 0.0


def slow_start(one: Sequence[Measured], other: Sequence[Measured]) -> int:
    """How many of a system's first requests it paid for something once, such as compiling: 0 for none.

    Their times per token and per round, as ratios to those of another system for the same requests, were each
    at least twice the greatest of all later requests. Ratios cancel how hard a prompt is.

    Args:
        one: requests in the order in which they were made.
        other: the same requests by the other system.
    """
    per_token = [_cost(a, a.tokens) / _cost(b, b.tokens) for a, b in zip(one, other, strict=True)]
    per_round = [_cost(a, _steps(a)) / _cost(b, _steps(b)) for a, b in zip(one, other, strict=True)]
    for count in range(_HEAD, 0, -1):
        if len(one) - count >= _LATER and all(
            min(costs[:count]) >= _DEARER * max(costs[count:]) for costs in (per_token, per_round)
        ):
            return count
    return 0


def _steps(measured: Measured) -> int:
    """Passes of the target that a text took; its tokens where they are not known."""
    return measured.rounds + 1 if measured.rounds else measured.tokens


def _cost(measured: Measured, count: int) -> float:
    return max(measured.total_s, 1e-9) / max(count, 1)


def paired(
    records: Sequence[Record], baseline: Sequence[Record]
) -> list[tuple[Hashable, Measured, Measured]]:
    """Requests that both systems answered: (prompt, one, other), a conversation's turns under one prompt."""
    others = {item.key[1:]: item.measured for item in baseline}
    return [
        ((item.workload, item.prompt), item.measured, others[item.key[1:]])
        for item in records
        if item.key[1:] in others
    ]


def decode_speedup(pairs: Sequence[tuple[Hashable, Measured, Measured]]) -> Interval:
    """Ratio of decode-only rates, with its interval."""
    return _speedup(pairs, lambda item: max(item.tokens - 1, 0), lambda item: item.decode_s)


def total_speedup(pairs: Sequence[tuple[Hashable, Measured, Measured]]) -> Interval:
    """Ratio of end-to-end rates, with its interval."""
    return _speedup(pairs, lambda item: item.tokens, lambda item: item.total_s)


def acceptance_interval(records: Sequence[Record]) -> Interval:
    """Micro acceptance length with its interval."""
    sums = _sums(
        [(item.workload, item.prompt) for item in records],
        [(item.measured.emitted_in_rounds, item.measured.rounds) for item in records],
    )
    return _interval(sums, lambda sums_P: _ratio(sums_P[:, 0], sums_P[:, 1], 1.0))


def _speedup(
    pairs: Sequence[tuple[Hashable, Measured, Measured]],
    tokens: Callable[[Measured], float],
    seconds: Callable[[Measured], float],
) -> Interval:
    """Ratio of rates; resampled are prompts, both systems' requests together (paired bootstrap)."""
    rows = [(tokens(one), seconds(one), tokens(other), seconds(other)) for _, one, other in pairs]
    sums = _sums([name for name, _, _ in pairs], rows)
    return _interval(sums, lambda s: _ratio(s[:, 0] * s[:, 3], s[:, 1] * s[:, 2], 0.0))


def _sums(names: Sequence[Hashable], rows: Sequence[Sequence[float]]) -> np.ndarray:
    """Rows added up by name, as the requests of one prompt are not independent of each other."""
    places = {name: place for place, name in enumerate(dict.fromkeys(names))}
    sums = np.zeros((len(places), len(rows[0]) if rows else 4))
    for name, row in zip(names, rows, strict=True):
        sums[places[name]] += row
    return sums


def _ratio(above: np.ndarray, below: np.ndarray, otherwise: float) -> np.ndarray:
    return np.divide(above, below, out=np.full(len(above), otherwise), where=below > 0)


def _interval(sums: np.ndarray, value: Callable[[np.ndarray], np.ndarray]) -> Interval:
    """Percentile bootstrap (Efron and Tibshirani 1993, chapter 13) over prompts."""
    whole = float(value(sums.sum(0)[None])[0])
    if len(sums) < 2:
        return Interval(whole, whole, whole)
    drawn = resamples(len(sums))
    counts = np.stack([np.bincount(row, minlength=len(sums)) for row in drawn]).astype(float)
    each = value(counts @ sums)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(each, [tail, 1 - tail])
    return Interval(whole, float(low), float(high))


def resamples(count: int) -> np.ndarray:
    """Which prompts each resample holds; the same in every call, so that a report can be made again."""
    return np.random.default_rng(0).integers(0, count, (RESAMPLES, count))


def load_point(records: Sequence[Record]) -> Load:
    """A system under one load, from all its requests under it.

    Raises:
        ValueError: there are none.
    """
    if not records:
        raise ValueError("no requests")
    measured = [item.measured for item in records]
    rates = [1 / spent for item in measured if (spent := time_per_token(item))]
    each = sum(rates) / len(rates) if rates else 0.0
    if records[0].concurrency == 1:
        return Load(1, each, total_rate(measured))
    begun = min(item.started_s for item in measured)
    ended = max(item.started_s + item.total_s for item in measured)
    tokens = sum(item.tokens for item in measured)
    return Load(records[0].concurrency, each, tokens / (ended - begun) if ended > begun else 0.0)


def frontier(loads: Sequence[Load]) -> tuple[Load, ...]:
    """Loads that no other beats in both, by rising interactivity (so by falling throughput)."""
    best: list[Load] = []
    for load in sorted(loads, key=lambda item: (-item.interactivity, -item.throughput)):
        if not best or load.throughput > best[-1].throughput:
            best.append(load)
    return tuple(reversed(best))


def throughput_at(loads: Sequence[Load], interactivity: float) -> float | None:
    """Throughput of a system that gives its users at least so many tokens/s.

    On the line between neighbouring loads of the frontier; the largest where even that load gives users more;
    None where no load gives them so much.
    """
    line = frontier(loads)
    if not line or interactivity > line[-1].interactivity:
        return None
    x = [load.interactivity for load in line]
    return float(np.interp(interactivity, x, [load.throughput for load in line]))


def matched(loads: Sequence[Load], baseline: Sequence[Load], points: int = 33) -> tuple[Matched, ...]:
    """The ratio of throughputs at every interactivity that both systems were measured at.

    "N times" at matched interactivity is one of these values, often the largest; it means little without the
    others. Where the baseline cannot reach an interactivity at all, there is no ratio.

    Args:
        loads: of the system.
        baseline: of the one it is compared with.
        points: evenly spaced, besides those that were measured.
    """
    first, second = frontier(loads), frontier(baseline)
    if not first or not second:
        return ()
    low = max(first[0].interactivity, second[0].interactivity)
    high = min(first[-1].interactivity, second[-1].interactivity)
    if low > high:
        return ()
    between = [load.interactivity for load in (*first, *second) if low <= load.interactivity <= high]
    grid = sorted({low, high, *between, *np.linspace(low, high, points).tolist()})
    found = []
    for x in grid:
        above, below = throughput_at(first, x), throughput_at(second, x)
        if above is not None and below:
            found.append(Matched(x, above / below))
    return tuple(found)
