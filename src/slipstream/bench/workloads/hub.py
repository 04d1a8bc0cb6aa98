"""Known sets of prompts by name: where they lie on the hub. Nothing of them comes with the package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from slipstream.core.errors import InputError
from slipstream.data.readers import hub_rows


@dataclass(frozen=True)
class HubSet:
    """Where a set lies.

    Attributes:
        place: repository on the hub, or the kind of file.
        column: of the prompt: a text, or a list of user turns.
        split: that is read.
        config: of the repository.
        data_files: address of a file outside the hub.
        ask: put before each prompt.
    """

    place: str
    column: str
    split: str = "test"
    config: str | None = None
    data_files: str | None = None
    ask: str = ""


#: In place of the prompts that SPEED-Bench may not pass on; more than half of its rows are such.
WITHHELD: Final = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
_SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"

HUB: Final[Mapping[str, HubSet]] = {
    "gsm8k": HubSet("openai/gsm8k", "question", config="main"),
    "math500": HubSet("HuggingFaceH4/MATH-500", "problem"),
    "humaneval": HubSet("openai/openai_humaneval", "prompt", ask="Complete this Python function:\n\n"),
    "mbpp": HubSet("google-research-datasets/mbpp", "prompt", config="sanitized"),
    "mt-bench": HubSet("HuggingFaceH4/mt_bench_prompts", "prompt", split="train"),
    "spec-bench": HubSet("json", "turns", split="train", data_files=_SPEC_BENCH),
    "speed-bench": HubSet("nvidia/SPEED-Bench", "turns", config="qualitative"),
}


def hub_turns(name: str, count: int) -> list[tuple[str, ...]]:
    """User turns of a set's first prompts; 0 takes all. Rows without their prompt are passed over.

    Raises:
        InputError: it cannot be fetched, or has another form than is known.
        MissingExtraError: there is no `datasets`.
    """
    known = HUB[name]
    rows = hub_rows(known.place, known.config, known.split, known.data_files)
    found = (_turns(name, known, row) for row in rows)
    held = (turns for turns in found if not any(WITHHELD in turn for turn in turns))
    return list(islice(held, count or None))


def _turns(name: str, known: HubSet, row: Mapping[str, Any]) -> tuple[str, ...]:
    found = row.get(known.column)
    turns = [found] if isinstance(found, str) else found
    if not turns or not all(isinstance(turn, str) for turn in turns):
        raise InputError(f"{name}: a row of {known.place} has no text in its column {known.column}")
    return (known.ask + turns[0], *turns[1:])
