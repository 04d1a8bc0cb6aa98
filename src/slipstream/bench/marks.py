"""What makes a comparison misleading, found in the records: each as a sentence.

A stop is a mark after which a ratio must not be quoted; a note is one that a reader should know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from slipstream.bench.metrics import paired, slow_start
from slipstream.bench.records import Record, Results
from slipstream.bench.run import RANDOM_PROMPT

#: Prompts of a workload below which an interval says little, and tokens below which a text hardly begins.
FEW_PROMPTS: Final = 20
SHORT_TEXT: Final = 64


@dataclass(frozen=True)
class Mark:
    """One thing to know.

    Attributes:
        kind: `stop` or `note`.
        text: a sentence.
    """

    kind: Literal["stop", "note"]
    text: str


def find_marks(results: Results) -> tuple[Mark, ...]:
    """All marks of a file, the stops first; each once."""
    found = dict.fromkeys(
        (
            *_texts(results),
            *_prompts(results),
            *_counts(results),
            *_means(results),
            *_cold(results),
            *_conditions(results),
        )
    )
    return tuple(sorted(found, key=lambda mark: mark.kind != "stop"))


def between(one: Results, other: Results) -> tuple[Mark, ...]:
    """What keeps two files from being compared."""
    found = []
    for what, values in (
        ("chat templates", [{item.template_hash for item in side.records} for side in (one, other)]),
        ("targets", [{run.target["name"] for run in side.runs} for side in (one, other)]),
        ("sampling options", [{str(dict(run.sampling)) for run in side.runs} for side in (one, other)]),
    ):
        if values[0] != values[1]:
            found.append(Mark("stop", f"The two files have different {what}."))
    prompts = [{item.prompt_hash for item in side.records if item.turn == 0} for side in (one, other)]
    if prompts[0] != prompts[1]:
        shared = len(prompts[0] & prompts[1])
        found.append(
            Mark("stop", f"Only {shared} of {len(prompts[0] | prompts[1])} prompts are in both files.")
        )
    if [dict(run.machine) for run in one.runs[:1]] != [dict(run.machine) for run in other.runs[:1]]:
        found.append(Mark("note", "The two files were measured on different machines."))
    return tuple(found)


def _texts(results: Results) -> Iterator[Mark]:
    """Do all say the same?"""
    compared = Counter(item.system for item in results.records)
    for system in compared:
        parted = [item for item in results.records if item.system == system and item.divergence is not None]
        real = [item for item in parted if item.divergence is not None and not item.divergence.tie]
        if real:
            yield _different(system, real, compared[system])
        if len(parted) > len(real):
            yield Mark(
                "note",
                f"{len(parted) - len(real)} of {compared[system]} texts of {system} part from the "
                "reference's where two tokens are equal up to rounding; from there on they are other texts.",
            )
    sampled = any(float(run.sampling.get("temperature", 0)) > 0 for run in results.runs)
    others = sorted({side.name for run in results.runs for side in run.sides if not side.exact})
    if sampled and others:
        yield Mark("note", f"Texts of {', '.join(others)} are drawn with noise of their own, so they differ.")


def _different(system: str, records: list[Record], of: int) -> Mark:
    first = records[0]
    assert first.divergence is not None
    gap = "one text ends" if first.divergence.gap is None else f"gap {first.divergence.gap:.3g} logits"
    return Mark(
        "stop",
        f"{len(records)} of {of} texts of {system} differ from the reference's by more than rounding "
        f"explains (first: {first.workload} {first.prompt}, token {first.divergence.position}, {gap}), so "
        "their times are times of other texts.",
    )


def _prompts(results: Results) -> Iterator[Mark]:
    """What was asked?"""
    templates: dict[tuple[str, str, int], set[str]] = {}
    prompts: dict[str, set[str]] = {}
    for item in results.records:
        templates.setdefault((item.workload, item.prompt, item.turn), set()).add(item.template_hash)
        prompts.setdefault(item.workload, set()).add(item.prompt)
    if any(len(hashes) > 1 for hashes in templates.values()):
        yield Mark("stop", "The systems were asked with different chat templates.")
    random = {item.workload for item in results.records if RANDOM_PROMPT in item.marks}
    if random:
        yield Mark(
            "stop",
            f"Prompts of {', '.join(sorted(random))} look like random tokens; what is accepted after "
            "them says nothing about real text.",
        )
    few = [f"{name} ({len(names)})" for name, names in prompts.items() if len(names) < FEW_PROMPTS]
    if few:
        yield Mark(
            "note",
            f"Fewer than {FEW_PROMPTS} prompts: {', '.join(few)}. Their intervals are uncertain themselves.",
        )


def _counts(results: Results) -> Iterator[Mark]:
    """Is what was counted possible, and is it text?"""
    blocks = {side.name: side.block_size for run in results.runs for side in run.sides}
    past = Counter(item.system for item in results.records if item.measured.past_end)
    for system, count in past.items():
        yield Mark("note", f"{system} counts tokens past the end of {count} texts; they are left out here.")
    for system in dict.fromkeys(item.system for item in results.records):
        of = [item.measured for item in results.records if item.system == system]
        rounds, emitted = sum(m.rounds for m in of), sum(m.emitted_in_rounds for m in of)
        most = blocks.get(system) or max(len(m.drafted_per_position) for m in of) + 1
        impossible = any(
            kept > made
            for m in of
            for kept, made in zip(m.accepted_per_position, m.drafted_per_position, strict=False)
        )
        if impossible or (most > 1 and rounds and emitted / rounds > most):
            yield Mark(
                "stop",
                f"{system} reports more accepted drafts than it can have made: its acceptance is synthetic, "
                "or counted wrongly.",
            )


def _means(results: Results) -> Iterator[Mark]:
    """Is a figure that of these requests?"""
    stated: dict[str, float] = {}
    for item in results.records:
        if item.measured.stated_acceptance is not None:
            stated[item.system] = item.measured.stated_acceptance
    for system, mean in stated.items():
        yield Mark(
            "note",
            f"{system} counts no rounds of a request; it states {mean:.2f} tokens per round as a mean over "
            "all that it has served, so that figure is not one of these texts and has no interval.",
        )


def _cold(results: Results) -> Iterator[Mark]:
    """Was everybody warm? By what was recorded, and by requests that took longer than all later ones."""
    cold = sorted({item.system for item in results.records if not item.warm})
    if cold:
        yield Mark(
            "stop",
            f"{', '.join(cold)} answered without a warm-up: what is done once, such as compiling and "
            "capturing graphs, is in the times of the first requests.",
        )
    alone = [item for item in results.records if item.concurrency == 1]
    names = list(dict.fromkeys(item.system for item in alone))
    for system in names:
        other = names[0] if system != names[0] else names[-1]
        if system in cold or other == system:
            continue
        for workload in dict.fromkeys(item.workload for item in alone):
            one, base = (
                [item for item in alone if (item.system, item.workload) == (name, workload)]
                for name in (system, other)
            )
            pairs = paired(one, base)
            count = slow_start([a for _, a, _ in pairs], [b for _, _, b in pairs])
            if count:
                yield Mark(
                    "stop",
                    f"{system} took at least twice as long for its first {count} of {len(pairs)} requests of "
                    f"{workload} as for any later one, and {other} did not: it was cold. Measure again.",
                )


def _conditions(results: Results) -> Iterator[Mark]:
    """Was it fair?"""
    for run in results.runs:
        yield from (Mark("stop", text) for text in run.marks if text.startswith("Synthetic"))
        yield from (Mark("note", text) for text in run.marks if not text.startswith("Synthetic"))
        if run.sampling.get("ignore_eos"):
            yield Mark(
                "note", "With ignore_eos texts go on past their end, where acceptance is not that of text."
            )
        if int(run.sampling.get("max_tokens", SHORT_TEXT)) < SHORT_TEXT:
            yield Mark("note", f"Texts are cut at {run.sampling['max_tokens']} tokens: hardly begun.")
    cached = Counter(item.system for item in results.records if item.measured.cached_tokens)
    for system, count in cached.items():
        yield Mark(
            "stop",
            f"{system} had read the prompts of {count} requests before (prefix cache), so its times to the "
            "first token, and end-to-end times, cannot be compared.",
        )
