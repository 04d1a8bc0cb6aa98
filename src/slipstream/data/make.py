"""From a target's name to a file of its chats: written by itself, after given prompts, or taken as they are.

A file that is not finished is called `*.partial`; a later sitting with the same options goes on with it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from slipstream.core.errors import InputError
from slipstream.core.files import refuse_existing
from slipstream.core.options import SynthesisOptions
from slipstream.data.chats import Chat, from_record, to_line
from slipstream.data.readers import messages_of, read_chats, records
from slipstream.data.render import Renderer
from slipstream.data.synthesize import WAVE, Decoder, Writer, answer, continue_text, synthesize
from slipstream.target import Target


@dataclass(frozen=True)
class ChatPlan:
    """Which chats to make.

    Attributes:
        count: chats wanted, or the most to take from `prompts`; 0 takes all of those.
        prompts: file or hub data set whose user turns are answered; None lets the target write them too.
        keep_answers: take the answers of `prompts` as they are.
        options: of the target's writing.
        minutes: when above 0, stop with fewer chats once so much time is used in this sitting.
        wave: most chats made at once.
    """

    count: int
    prompts: str | None = None
    keep_answers: bool = False
    options: SynthesisOptions = SynthesisOptions()
    minutes: float = 0.0
    wave: int = WAVE


@dataclass(frozen=True)
class Made:
    """What a sitting did.

    Attributes:
        chats: in the file.
        tokens: of all of them, prompts included.
        answer_tokens: that the target said.
        seconds: of this sitting.
        new_answer_tokens: said in this sitting.
    """

    chats: int
    tokens: int
    answer_tokens: int
    seconds: float
    new_answer_tokens: int


def make_chats(
    target: Target,
    decoder: Decoder,
    plan: ChatPlan,
    path: Path,
    force: bool = False,
    report: Callable[[str], None] | None = None,
) -> Made:
    """Write a file of chats.

    Args:
        target: whose tokenizer and template are used.
        decoder: decodes with the target.
        plan: which chats.
        path: of the finished file.
        force: overwrite it.
        report: gets a line of progress per wave.

    Raises:
        InputError: the file exists, another plan's partial file lies in its place, or the prompts cannot be
            read.
    """
    refuse_existing(path, force)
    partial = path.with_name(path.name + ".partial")
    heading = json.dumps({"target": target.info.name, "plan": _described(plan)}, sort_keys=True)
    done = _open_partial(partial, heading)
    begun, earlier = time.perf_counter(), sum(chat.answer_tokens for chat in done)
    try:
        with partial.open("a", encoding="utf-8") as file:
            for wave in _waves(target, decoder, plan, done):
                file.writelines(to_line(chat) for chat in wave)
                file.flush()
                done += wave
                used = time.perf_counter() - begun
                if report is not None:
                    rate = (sum(chat.answer_tokens for chat in done) - earlier) / used
                    report(f"{len(done)} chats, {rate:.0f} answer tokens/s")
                if plan.minutes and used > plan.minutes * 60:
                    break
        _finish(partial, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}; {partial} keeps what was made") from error
    if not done:
        raise InputError(f"{plan.prompts} holds no chat with an answer")
    said = sum(chat.answer_tokens for chat in done)
    tokens = sum(len(chat.token_ids) for chat in done)
    return Made(len(done), tokens, said, time.perf_counter() - begun, said - earlier)


def renderer_for(target: Target, thinking: bool | None) -> Renderer | None:
    """The target's template; None where it has none (a base model)."""
    if getattr(target.tokenizer, "chat_template", None) is None:
        return None
    return Renderer(target.tokenizer, thinking, target.info.eos_token_ids)


def text_ids(target: Target) -> Callable[[str], list[int]]:
    """Plain text to ids with the target's start token, as it was trained on text."""
    tokenizer: Any = target.tokenizer
    start = start_ids(target)

    def ids(text: str) -> list[int]:
        own = list(tokenizer(text).input_ids)
        return own if own[: len(start)] == start else [*start, *own]

    return ids


def start_ids(target: Target) -> list[int]:
    """What a text of the target begins with: its start token, or else its end token."""
    tokenizer: Any = target.tokenizer
    for token in (getattr(tokenizer, "bos_token_id", None), *target.info.eos_token_ids):
        if token is not None:
            return [int(token)]
    return [0]


def _waves(target: Target, decoder: Decoder, plan: ChatPlan, done: Sequence[Chat]) -> Iterator[list[Chat]]:
    renderer = renderer_for(target, plan.options.thinking)
    if plan.prompts is not None:
        yield from _from_prompts(target, decoder, plan, renderer, len(done))
    elif renderer is not None:
        writer = Writer(decoder, renderer, target.tokenizer, target.info.max_context)
        yield from synthesize(writer, plan.count, plan.options, done, plan.wave)
    else:
        for first in range(len(done), plan.count, plan.wave):
            size = min(plan.wave, plan.count - first)
            yield continue_text(decoder, [start_ids(target)] * size, plan.options, first)


def _from_prompts(
    target: Target, decoder: Decoder, plan: ChatPlan, renderer: Renderer | None, done: int
) -> Iterator[list[Chat]]:
    """Chats after the prompts of a file, those done left out."""
    source, limit = str(plan.prompts), plan.count or None
    if plan.keep_answers:
        yield read_chats(source, renderer, text_ids(target), plan.options.thinking, limit).chats[done:]
        return
    rows = islice(records(source), done, limit)
    first = done
    while batch := list(islice(rows, plan.wave)):
        if renderer is None:
            starts = [
                text_ids(target)(str(record.get("text", record.get("prompt", "")))) for _, record in batch
            ]
            yield continue_text(decoder, starts, plan.options, first)
        else:
            prompts = []
            for where, record in batch:
                messages = messages_of(record)
                if messages is None:
                    raise InputError(f"{where} holds no messages and no prompt")
                prompts.append(messages)
            writer = Writer(decoder, renderer, target.tokenizer, target.info.max_context)
            yield answer(writer, prompts, plan.options, first)
        first += len(batch)


def _described(plan: ChatPlan) -> dict[str, Any]:
    """What a chat depends on; not how many there are."""
    return {"prompts": plan.prompts, "keep": plan.keep_answers, "options": vars(plan.options)}


def _open_partial(path: Path, heading: str) -> list[Chat]:
    """Chats of an unfinished file of the same plan; a line that was cut off is dropped."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(heading + "\n", encoding="utf-8")
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    if not lines or lines[0].strip() != heading:
        raise InputError(
            f"{path} was begun with other options or another target; remove it or name another file"
        )
    whole = [line for line in lines[1:] if line.endswith("\n")]
    path.write_text("".join([lines[0], *whole]), encoding="utf-8")
    return [from_record(json.loads(line)) for line in whole]


def _finish(partial: Path, path: Path) -> None:
    """The file without its heading, under its own name."""
    temporary = path.with_name(path.name + ".tmp")
    with partial.open(encoding="utf-8") as source, temporary.open("w", encoding="utf-8") as file:
        next(source)
        file.writelines(source)
    os.replace(temporary, path)
    partial.unlink()
