"""The prompts that come with the package, all of our own writing, in several languages."""

from __future__ import annotations

import json
from importlib.resources import files
from typing import Any, Final

BUNDLED: Final = (
    *("chat", "reasoning", "code", "summarise"),
    *("translation", "extraction", "long", "multiturn"),
)


def bundled_turns(workload: str) -> list[tuple[str, tuple[str, ...]]]:
    """Language and user turns of every prompt of a bundled workload."""
    rows = packaged("summarise" if workload == "long" else workload)
    if workload == "summarise":
        return [(row["language"], (f"{row['ask']}\n\n{row['text']}",)) for row in rows]
    if workload == "long":
        return [(row["language"], (_long(rows, number),)) for number, row in enumerate(rows)]
    return [(row["language"], tuple(row["turns"])) for row in rows]


def _long(rows: list[dict[str, Any]], number: int) -> str:
    """All texts, beginning with another one each time, and a question about one in the middle."""
    texts = [*rows[number:], *rows[:number]]
    notes = "\n\n".join(f"Note {place}:\n{row['text']}" for place, row in enumerate(texts, start=1))
    question = texts[len(texts) // 2]["question"]
    return (
        f"Here are {len(texts)} notes from several people.\n\n{notes}\n\n"
        "Answer the following question from the notes, in the language of the question. Name the number of "
        f"the note and quote the sentences that you rely on.\n\n{question}"
    )


def packaged(name: str) -> list[dict[str, Any]]:
    """The records of a file of prompts that comes with the package, by its stem."""
    text = (files("slipstream.data") / "prompts" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]
