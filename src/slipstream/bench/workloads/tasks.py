"""One prompt or conversation to be answered, and where a workload's come from, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from slipstream.bench.workloads.hub import HUB, hub_turns
from slipstream.core.errors import InputError
from slipstream.data.bundled import BUNDLED, bundled_turns
from slipstream.data.chats import from_record
from slipstream.data.readers import messages_of, records


@dataclass(frozen=True)
class Task:
    """What a user asks, turn by turn.

    Attributes:
        workload: that it belongs to.
        name: in that workload; stays the same however many prompts are taken.
        turns: user turns; the answers between them are those of the reference system.
        history: messages before the first turn.
        prompt_ids: in place of turns, a prompt that was recorded as token ids.
        source: who wrote it.
        language: where it is known.
    """

    workload: str
    name: str
    turns: tuple[str, ...] = ()
    history: tuple[Mapping[str, Any], ...] = ()
    prompt_ids: tuple[int, ...] = ()
    source: Literal["bundled", "file", "hub"] = "bundled"
    language: str = ""


def load_tasks(workload: str, count: int) -> list[Task]:
    """The first prompts of a workload.

    Args:
        workload: a bundled one, a set of the hub, or a JSONL file.
        count: most prompts; 0 takes all.

    Raises:
        InputError: unknown, unreadable, or without any prompt.
    """
    if workload in BUNDLED:
        rows = bundled_turns(workload)
        found = [
            Task(workload, f"{number:03d}", turns, language=language)
            for number, (language, turns) in enumerate(rows, start=1)
        ]
    elif workload in HUB:
        found = [
            Task(workload, f"{number:04d}", turns, source="hub")
            for number, turns in enumerate(hub_turns(workload, count), start=1)
        ]
    elif Path(workload).is_file():
        found = list(_of_file(Path(workload)))
    else:
        known = [*BUNDLED, *HUB]
        near = get_close_matches(workload, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
        raise InputError(f"{workload} is neither a workload nor a file; {hint}")
    if not found:
        raise InputError(f"{workload} holds no prompts")
    return found[:count] if count else found


def _of_file(path: Path) -> Iterator[Task]:
    for number, (where, record) in enumerate(records(path), start=1):
        try:
            yield _of_record(record, path.stem, f"{number:04d}")
        except (InputError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{where}, is not a prompt: {error}") from error


def _of_record(record: Mapping[str, Any], workload: str, name: str) -> Task:
    """Turns, a prompt as text or ids, or a recorded chat, whose last question is asked again."""
    turns = record.get("turns", record.get("prompt"))
    if isinstance(turns, str):
        turns = [turns]
    if turns:
        if not all(isinstance(turn, str) for turn in turns):
            raise InputError("its turns are not texts")
        return Task(workload, name, tuple(turns), source="file")
    if "token_ids" in record:
        chat = from_record(record)
        end = chat.answers[-1][0] if chat.answers else len(chat.token_ids)
        return Task(workload, name, prompt_ids=chat.token_ids[:end], source="file")
    if "prompt_ids" in record:
        return Task(workload, name, prompt_ids=tuple(map(int, record["prompt_ids"])), source="file")
    messages = messages_of(record) or []
    asked = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not asked:
        raise InputError("it has none of turns, prompt, messages, conversations, token_ids and prompt_ids")
    before = tuple(messages[: asked[-1]])
    return Task(workload, name, (str(messages[asked[-1]]["content"]),), before, source="file")
