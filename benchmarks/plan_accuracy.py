"""The plan's predictions beside published measurements: fit three constants on one third, report the rest.

Rows are numbered in the order of `published.json`; every third one is fitted on, the others are held out. The
fit lowers the mean absolute logarithm of predicted over published speed-up by coordinate descent. Writes the
tables of docs/plan_accuracy.md with --write.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from slipstream.plan import (
    CARDS,
    Constants,
    Pair,
    Setting,
    described_drafter,
    find_card,
    geometric,
    read_shape,
)
from slipstream.plan.predict import row

PUBLISHED = Path(__file__).with_name("published.json")
PAGE = Path(__file__).parents[1] / "docs" / "plan_accuracy.md"
FITTED = ("flops_share", "graph_round_s", "eager_round_s")
#: Decoded tokens and prompt, on average; the sources do not say it.
CONTEXT = 1500
#: Of the paper's drafters, where a row does not say otherwise.
DRAFTER_LAYERS = 5
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
CARDS_PAGE = PAGE.with_name("does_it_pay.md")
CARDS_BEGIN, CARDS_END = "<!-- cards: begin -->", "<!-- cards: end -->"


@dataclass(frozen=True)
class Measured:
    """One published speed-up.

    Attributes:
        table: what it belongs to.
        concurrency: requests at once.
        speedup: drafted over plain.
    """

    table: dict[str, Any]
    concurrency: int
    speedup: float


def read() -> tuple[dict[str, Any], list[Measured]]:
    """Configs of targets, and every row in order."""
    raw = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    rows = [
        Measured(table, concurrency, speedup)
        for table in raw["tables"]
        for concurrency, speedup in zip(table["concurrency"], table["speedup"], strict=True)
    ]
    return raw["targets"], rows


def split(rows: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Fitted on, and held out."""
    return list(rows[::3]), [one for number, one in enumerate(rows) if number % 3]


def predicted(targets: dict[str, Any], one: Measured, constants: Constants) -> float:
    """The plan's speed-up for a row."""
    table = one.table
    target = read_shape(targets[table["target"]])
    drafter, fused = described_drafter(target, table.get("drafter_layers", DRAFTER_LAYERS))
    profile = geometric(table["acceptance_length"], table["block_size"] - 1)
    pair = Pair(target, drafter, fused, table["block_size"], profile)
    setting = Setting(
        find_card(table["card"]),
        context=CONTEXT,
        execution=table["execution"],
        precision=table.get("precision", "auto"),
        constants=constants,
    )
    return row(pair, setting, one.concurrency, table["block_size"]).speedup


def fit(targets: dict[str, Any], rows: Sequence[Measured], constants: Constants) -> Constants:
    """The three constants that bring predictions nearest to these rows."""

    def error(some: Constants) -> float:
        return statistics.mean(abs(math.log(predicted(targets, one, some) / one.speedup)) for one in rows)

    best, step = error(constants), 0.5
    while step > 0.01:
        moved = False
        for name in FITTED:
            for factor in (math.exp(step), math.exp(-step)):
                other = replace(constants, **{name: getattr(constants, name) * factor})
                found = error(other)
                if found < best - 1e-9:
                    constants, best, moved = other, found, True
        step = step if moved else step / 2
    return constants


def errors(targets: dict[str, Any], rows: Sequence[Measured], constants: Constants) -> list[float]:
    """Predicted over published, less one."""
    return [predicted(targets, one, constants) / one.speedup - 1 for one in rows]


def new_kind(targets: dict[str, Any], rows: Sequence[Measured]) -> list[float]:
    """Errors on hybrid targets, which the fit never saw: it has a third of the other rows."""
    hybrid = [one for one in rows if "linear_num_value_heads" in targets[one.table["target"]]]
    others, _ = split([one for one in rows if one not in hybrid])
    return errors(targets, hybrid, fit(targets, others, Constants()))


def table(targets: dict[str, Any], rows: Sequence[Measured], constants: Constants) -> str:
    """Every row, measured and predicted; held-out ones are marked."""
    _, held_out = split(rows)
    marked = {id(one) for one in held_out}
    lines = [
        "| source | target | workload | tokens a round | at once | measured | predicted | error | held out |",
        "|---|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for one in rows:
        t, found = one.table, predicted(targets, one, constants)
        cells = (
            *(
                t["source"].removeprefix("DFlash, arXiv 2602.06036, "),
                t["target"],
                t["workload"],
                t["acceptance_length"],
            ),
            *(one.concurrency, f"{one.speedup:g}", f"{found:.2f}", f"{found / one.speedup - 1:+.0%}"),
            "yes" if id(one) in marked else "",
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def groups(targets: dict[str, Any], rows: Sequence[Measured], constants: Constants) -> str:
    """Held-out errors by source and kind of target."""
    found: dict[str, list[float]] = {}
    for one, wrong in zip(rows, errors(targets, rows, constants), strict=True):
        kind = "experts" if "experts" in str(targets[one.table["target"]]) else "dense"
        found.setdefault(f"{one.table['card']}, {one.table['execution']}, {kind}", []).append(wrong)
    lines = ["| held out | rows | median absolute error | largest |", "|---|---:|---:|---:|"]
    for name, values in found.items():
        sizes = [abs(value) for value in values]
        lines.append(f"| {name} | {len(sizes)} | {statistics.median(sizes):.1%} | {max(sizes):.0%} |")
    every = [abs(value) for values in found.values() for value in values]
    lines.append(f"| **all** | {len(every)} | **{statistics.median(every):.1%}** | {max(every):.0%} |")
    return "\n".join(lines)


def by_card(targets: dict[str, Any]) -> str:
    """One pair on every card of the table: speed-ups at three concurrencies and two acceptance lengths."""
    target = read_shape(targets["Qwen3-8B"])
    drafter, fused = described_drafter(target, 5)
    lines = ["| card | chat, 1 / 8 / 32 at once | mathematics, 1 / 8 / 32 at once |", "|---|---:|---:|"]
    for card in CARDS:
        cells = []
        for wanted in (4.2, 8.0):
            pair = Pair(target, drafter, fused, 16, geometric(wanted, 15))
            gains = [row(pair, Setting(card), count, 16).speedup for count in (1, 8, 32)]
            cells.append(" / ".join(f"{gain:.1f}" for gain in gains))
        lines.append(f"| {card.name} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def put(page: Path, marks: tuple[str, str], text: str) -> None:
    """Replace what stands between two marks."""
    whole = page.read_text(encoding="utf-8")
    head, tail = whole.split(marks[0])[0], whole.split(marks[1])[1]
    page.write_text(f"{head}{marks[0]}\n{text}\n{marks[1]}{tail}", encoding="utf-8")


def main() -> None:
    """Fit, print, and write the page's tables where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the tables into the two pages of docs/")
    options = parser.parse_args()
    targets, rows = read()
    fitted_on, held_out = split(rows)
    constants = fit(targets, fitted_on, Constants())
    print({name: getattr(constants, name) for name in FITTED})
    unseen = [abs(value) for value in new_kind(targets, rows)]
    print(f"hybrids, fitted without them: median {statistics.median(unseen):.1%}, largest {max(unseen):.0%}")
    text = groups(targets, held_out, Constants()) + "\n\n" + table(targets, rows, Constants())
    print(text)
    if options.write:
        put(PAGE, (BEGIN, END), text)
        put(CARDS_PAGE, (CARDS_BEGIN, CARDS_END), by_card(targets))


if __name__ == "__main__":
    main()
