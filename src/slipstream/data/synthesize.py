"""The target writes its own chats: user turns sampled from its opened chat template, then its own answers.

No data set is needed, and the text is exactly of the kind that the drafter will have to predict.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions, SynthesisOptions
from slipstream.core.records import Request
from slipstream.data.chats import Chat, template_seams
from slipstream.decode import Engine


def synthesize(
    engine: Engine, count: int, options: SynthesisOptions, report: Callable[[str], None] | None = None
) -> Iterator[Chat]:
    """Yield `count` chats with distinct user turns.

    Args:
        engine: decodes the target, best plainly and with many rows.
        count: chats wanted.
        options: temperatures, lengths and seed; the same options give the same chats.
        report: gets a line of progress per batch.

    Raises:
        InputError: the target has no usable chat template, or keeps repeating the same few user turns.
    """
    tokenizer: Any = engine.target.tokenizer
    seams = template_seams(tokenizer)
    opening = tuple(tokenizer(seams.before, add_special_tokens=False).input_ids)
    seen: set[str] = set()
    done = barren = batch = 0
    while done < count:
        turns = _user_turns(engine, opening, options, batch)
        fresh = [turn for turn in dict.fromkeys(turns) if turn not in seen][: count - done]
        barren = 0 if fresh else barren + 1
        if barren == 5:
            raise InputError(
                f"the target wrote no new user turn in 5 batches; {done} of {count} chats were made"
            )
        seen.update(fresh)
        yield from _answers(engine, fresh, options, batch)
        done, batch = done + len(fresh), batch + 1
        if report is not None:
            report(f"{done} of {count} chats")


def _user_turns(engine: Engine, opening: tuple[int, ...], options: SynthesisOptions, batch: int) -> list[str]:
    """Sample one batch of user turns; those cut off by the length limit are dropped."""
    sampling = SamplingOptions(
        temperature=options.prompt_temperature, top_k=options.prompt_top_k, max_tokens=options.prompt_tokens
    )
    rows = engine.options.max_rows
    seeds = [options.seed * 1_000_003 + batch * rows + row for row in range(rows)]
    requests = [Request(opening, replace(sampling, seed=seed)) for seed in seeds]
    completions = engine.generate(requests)
    turns = [completion.text.strip() for completion in completions if completion.finish_reason == "stop"]
    return [turn for turn in turns if turn]


def _answers(engine: Engine, turns: list[str], options: SynthesisOptions, batch: int) -> list[Chat]:
    """Answer every turn, a stated share greedily and the rest sampled."""
    tokenizer: Any = engine.target.tokenizer
    draw = random.Random(f"{options.seed}/{batch}")
    requests = []
    for number, turn in enumerate(turns):
        ids = tokenizer.apply_chat_template(
            [{"role": "user", "content": turn}], add_generation_prompt=True, return_dict=False
        )
        temperature = 0.0 if draw.random() < options.greedy_share else options.answer_temperature
        sampling = SamplingOptions(
            temperature=temperature,
            seed=options.seed + batch * 4096 + number,
            max_tokens=options.answer_tokens,
        )
        requests.append(Request(tuple(ids), sampling))
    completions = engine.generate(requests)
    return [
        Chat(turn, tuple(request.prompt_ids), completion.token_ids, request.sampling.temperature)
        for turn, request, completion in zip(turns, requests, completions, strict=True)
    ]
