"""Tokens per second at 1, 2, 4, 8 and 16 streams, drafted and plain: all streams together, and each alone.

A closed load: every stream asks its next prompt as soon as the last one is answered. Plain and drafted take
turns in one process, each first in every other pass; ratios are within a pass. Prompts are read in that time
as well. A stream's own rate is the median over requests of tokens after the first per second of decoding.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import slipstream
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Request, total_acceptance
from slipstream.decode import DraftProposer, Engine

PROMPTS = Path(__file__).with_name("held_out_smollm2.jsonl")


@dataclass(frozen=True)
class Load:
    """One way of decoding at one number of streams, once.

    Attributes:
        seconds: from the first request to the end of the last one.
        completions: in the order of the requests.
    """

    seconds: float
    completions: list[Completion]

    @property
    def total(self) -> float:
        """Tokens per second of all streams together."""
        return sum(item.completion_tokens for item in self.completions) / self.seconds

    @property
    def own(self) -> float:
        """What one stream sees while it decodes, tokens per second."""
        return statistics.median(item.tokens_per_s for item in self.completions)


def main() -> None:
    """Print a table, and with --json one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("-d", "--draft", default="auto")
    parser.add_argument("--streams", default="1,2,4,8,16")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--passes", type=int, default=6)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    session = slipstream.load(options.target, options.draft)
    assert session.drafter is not None, "the comparison needs a drafter"
    sampling = SamplingOptions(max_tokens=options.max_tokens, temperature=options.temperature)
    turns = [json.loads(line)["user"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    requests = [Request(session.encode(turn), sampling) for turn in turns]
    rows = []
    for streams in map(int, options.streams.split(",")):
        engine_options = EngineOptions(max_rows=streams)
        proposer = DraftProposer(session.target, session.drafter)
        engines = {
            "plain": Engine(session.target, None, engine_options),
            "drafted": Engine(session.target, proposer, engine_options),
        }
        asked = requests[: max(4, 2 * streams)]
        for engine in engines.values():
            _run(engine, asked)
        names = list(engines)
        passes = [
            {name: _run(engines[name], asked) for name in (names, names[::-1])[number % 2]}
            for number in range(options.passes)
        ]
        rows.append(_row(streams, passes))
        print(_line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows))


def _run(engine: Engine, requests: list[Request]) -> Load:
    begun = time.perf_counter()
    completions = engine.generate(requests)
    return Load(time.perf_counter() - begun, completions)


def _row(streams: int, passes: list[dict[str, Load]]) -> dict[str, object]:
    """Medians over the passes."""

    def median(name: str, figure: str) -> float:
        return round(statistics.median(getattr(loads[name], figure) for loads in passes), 1)

    ratios = [loads["drafted"].total / loads["plain"].total for loads in passes]
    ids = [
        [[c.token_ids for c in loads[name].completions] for name in ("plain", "drafted")] for loads in passes
    ]
    drafted = [item for loads in passes for item in loads["drafted"].completions]
    rounds = sum(item.rounds for item in drafted)
    return {
        "streams": streams,
        "plain_total": median("plain", "total"),
        "plain_own": median("plain", "own"),
        "drafted_total": median("drafted", "total"),
        "drafted_own": median("drafted", "own"),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_spread": [round(min(ratios), 3), round(max(ratios), 3)],
        "acceptance_length": round(total_acceptance(drafted), 2),
        "drafts_mean": round(sum(item.drafts for item in drafted) / rounds, 2) if rounds else 0.0,
        "identical": all(plain == other for plain, other in ids),
    }


def _line(row: dict[str, object]) -> str:
    low, high = row["ratio_spread"]  # type: ignore[misc]
    return (
        f"{row['streams']:>3} streams: plain {row['plain_total']} tokens/s ({row['plain_own']} each), "
        f"drafted {row['drafted_total']} ({row['drafted_own']} each), "
        f"ratio {row['ratio']} ({low} to {high}), "
        f"acceptance length {row['acceptance_length']}, drafts {row['drafts_mean']}, "
        f"{'same texts' if row['identical'] else 'TEXTS DIFFER'}"
    )


if __name__ == "__main__":
    main()
