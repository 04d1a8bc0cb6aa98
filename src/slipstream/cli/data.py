"""`slipstream data`: what a drafter would be trained on, coloured."""

from __future__ import annotations

import json
from typing import Annotated, Any

from cyclopts import Parameter

from slipstream.cli.session import say
from slipstream.core.options import TargetOptions


def data(
    source: str,
    /,
    *,
    target: Annotated[str, Parameter(alias="-t")] = "smollm2",
    count: Annotated[int, Parameter(alias="-n")] = 3,
    thinking: bool | None = None,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    loading: Annotated[TargetOptions, Parameter(name="*", group="Models")] = TargetOptions(),
) -> int:
    """Show chats as the target reads them; what is trained on is marked.

    Args:
        source: JSONL or Parquet file, or a data set of the hub: messages, ShareGPT conversations, prompt and
            response, text, or token ids with answer spans.
        target: whose template and tokenizer are used.
        count: chats to show; the figures are of all.
        thinking: passed to the chat template as `enable_thinking`.
        as_json: print the figures as JSON and show nothing.
    """
    from rich.console import Console
    from rich.text import Text

    from slipstream.data.make import renderer_for, text_ids
    from slipstream.data.readers import read_chats
    from slipstream.target import load_target

    model = load_target(target, loading, say)
    tokenizer: Any = model.tokenizer
    reading = read_chats(source, renderer_for(model, thinking), text_ids(model), thinking)
    lengths = [len(chat.token_ids) for chat in reading.chats]
    figures = {
        "chats": len(lengths),
        "skipped": reading.skipped,
        "tokens": sum(lengths),
        "answer_tokens": sum(chat.answer_tokens for chat in reading.chats),
        "longest": max(lengths, default=0),
    }
    if as_json:
        print(json.dumps(figures))
        return 0
    console = Console(soft_wrap=True, highlight=False)
    for number, chat in enumerate(reading.chats[:count], start=1):
        console.print(
            f"chat {number}: {len(chat.token_ids)} tokens, {chat.answer_tokens} trained on", style="bold"
        )
        text, place = Text(), 0
        for start, end in chat.answers:
            text.append(tokenizer.decode(chat.token_ids[place:start]), style="dim")
            # Brackets as well as colour, so that the marks survive a pipe.
            text.append("⟦" + tokenizer.decode(chat.token_ids[start:end]) + "⟧", style="bold green")
            place = end
        text.append(tokenizer.decode(chat.token_ids[place:]), style="dim")
        console.print(text)
    console.print(
        f"{figures['chats']} chats, {figures['tokens']} tokens, {figures['answer_tokens']} trained on, "
        f"longest {figures['longest']}; {figures['skipped']} records without an answer"
    )
    return 0
