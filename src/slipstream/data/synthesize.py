"""The target writes its own chats: user turns sampled from its opened chat template, then its own answers.

No data set is needed, and the text is exactly of the kind that the drafter will have to predict. Every chat
is a function of the options and its number, so chats can be made in any number of sittings.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions, SynthesisOptions
from slipstream.core.records import Completion, Request
from slipstream.data.chats import Chat
from slipstream.data.render import Message, Rendered, Renderer

Generate = Callable[[Sequence[Request]], Sequence[Completion]]
"""Whatever decodes requests with the target: an engine, or a server."""

#: Most chats made at once. They are lost when the program is killed, and more of them keep the rows full.
WAVE = 1024
# Fewer first questions at once would leave rows idle, and some of them are thrown away.
_LEAST = 32
# So many waves without a new chat mean that there is nothing more to come.
_BARREN = 5


@dataclass(frozen=True)
class Writer:
    """The target as a writer of chats.

    Attributes:
        generate: decodes with the target, best many requests at once.
        renderer: of the target's chat template.
        tokenizer: of the target.
        room: longest sequence in tokens; a chat that has grown to it ends.
    """

    generate: Generate
    renderer: Renderer
    tokenizer: Any
    room: int


@dataclass
class _Growing:
    """A chat while it is being written."""

    number: int
    temperature: float
    turns: int
    messages: list[Message] = field(default_factory=list)
    document: Rendered | None = None


def synthesize(
    writer: Writer,
    count: int,
    options: SynthesisOptions,
    done: Iterable[Chat] = (),
    wave: int = WAVE,
) -> Iterator[list[Chat]]:
    """Yield waves of chats with distinct first turns until there are `count`.

    Args:
        writer: the target.
        count: chats wanted, those done included.
        options: temperatures, lengths, turns and seed.
        done: chats of an earlier sitting with the same options; what follows is as if it had not been
            stopped.
        wave: most chats made at once.

    Raises:
        InputError: the target has no usable chat template, or keeps repeating the same few user turns.
    """
    earlier = list(done)
    seen = {str(chat.messages[0]["content"]) for chat in earlier}
    made, number = len(earlier), max((chat.number + 1 for chat in earlier), default=0)
    barren = 0
    while made < count:
        size = min(wave, max(_LEAST, (count - made) * 9 // 8))
        growing = [_begin(n, options) for n in range(number, number + size)]
        number += size
        fresh = _ask(writer, growing, options, seen)
        seen.update(chat.messages[0]["content"] for chat in fresh[: count - made])
        barren = 0 if fresh else barren + 1
        if barren == _BARREN:
            raise InputError(
                f"the target wrote no new user turn in {_BARREN} batches; {made} of {count} chats were made"
            )
        chats = _converse(writer, fresh[: count - made], options)
        made += len(chats)
        yield chats


def answer(
    writer: Writer,
    prompts: Sequence[Sequence[Message]],
    options: SynthesisOptions,
    first: int = 0,
) -> list[Chat]:
    """The target's own answers to given user turns; answers that the prompts hold are replaced.

    Args:
        writer: the target.
        prompts: chats, each with a user turn; system messages stay where they are.
        options: temperature and length of the answers, and seed.
        first: number of the first chat.

    Returns:
        A chat per prompt, cut short where an answer did not end; none where the prompt fills the context.

    Raises:
        InputError: a prompt has no user turn; it is named.
    """
    scripts: list[tuple[_Growing, list[Message]]] = []
    for number, prompt in enumerate(prompts, start=first):
        kept: list[Message] = [dict(message) for message in prompt if message.get("role") != "assistant"]
        if not any(message.get("role") == "user" for message in kept):
            raise InputError(f"prompt {number} has no user turn")
        scripts.append((_begin(number, options), kept))
    going = scripts
    while going:
        for chat, rest in going:
            while rest:
                chat.messages.append(rest.pop(0))
                if chat.messages[-1]["role"] == "user":
                    break
        _answer(writer, [chat for chat, _ in going], options)
        going = [(c, rest) for c, rest in going if c.messages[-1]["role"] == "assistant" and _asks(rest)]
    return [_finished(chat, options) for chat, _ in scripts if chat.document is not None]


def continue_text(
    generate: Generate,
    starts: Sequence[Sequence[int]],
    options: SynthesisOptions,
    first: int = 0,
) -> list[Chat]:
    """A base model's own text, after given beginnings or after nothing but its start token.

    Args:
        generate: decodes with the target.
        starts: token ids of the beginnings, at least one token each.
        options: temperature and length of the answers, and seed.
        first: number of the first text.
    """
    growing = [_begin(number, options) for number in range(first, first + len(starts))]
    requests = [
        Request(tuple(start), _answer_sampling(chat, options, "text"))
        for chat, start in zip(growing, starts, strict=True)
    ]
    chats = []
    for chat, request, completion in zip(growing, requests, generate(requests), strict=True):
        start = len(request.prompt_ids)
        ids = (*request.prompt_ids, *completion.token_ids)
        chats.append(Chat(ids, ((start, len(ids)),), (), chat.temperature, None, chat.number))
    return chats


def seed_of(options: SynthesisOptions, number: int, purpose: str) -> int:
    """The sampling seed of one piece of one chat."""
    return random.Random(f"{options.seed}/{number}/{purpose}").getrandbits(62)


def _begin(number: int, options: SynthesisOptions) -> _Growing:
    """Decide what the chat's number decides: temperature and turns."""
    draw = random.Random(f"{options.seed}/{number}")
    greedy = draw.random() < options.greedy_share
    turns = 1
    while turns < options.turns and draw.random() < options.follow_share:
        turns += 1
    return _Growing(number, 0.0 if greedy else options.answer_temperature, turns)


def _ask(
    writer: Writer,
    growing: list[_Growing],
    options: SynthesisOptions,
    seen: set[str] | None = None,
) -> list[_Growing]:
    """Sample the next user turn of every chat; those with an empty, endless or repeated one are dropped."""
    openings = [writer.renderer.user_opening_ids(chat.messages) for chat in growing]
    # One token at least to ask with, and one to answer.
    asking = [(chat, ids) for chat, ids in zip(growing, openings, strict=True) if len(ids) + 1 < writer.room]
    requests = [
        Request(
            opening,
            SamplingOptions(
                temperature=options.prompt_temperature,
                top_k=options.prompt_top_k,
                max_tokens=options.prompt_tokens,
                seed=seed_of(options, chat.number, f"user {len(chat.messages)}"),
            ),
        )
        for chat, opening in asking
    ]
    used = set(seen or ())
    kept = []
    for (chat, _), completion in zip(asking, writer.generate(requests), strict=True):
        turn = completion.text.strip()
        if completion.finish_reason != "stop" or not turn or (seen is not None and turn in used):
            continue
        used.add(turn)
        chat.messages.append({"role": "user", "content": turn})
        kept.append(chat)
    return kept


def _converse(
    writer: Writer,
    growing: list[_Growing],
    options: SynthesisOptions,
) -> list[Chat]:
    """Answer, ask on, answer again, until every chat has its turns."""
    going, turn = growing, 1
    while going:
        _answer(writer, going, options)
        # An answer that was cut off is no turn that anyone would reply to.
        going = [chat for chat in going if chat.turns > turn and chat.messages[-1]["role"] == "assistant"]
        going = _ask(writer, going, options)
        turn += 1
    return [_finished(chat, options) for chat in growing if chat.document is not None]


def _answer(
    writer: Writer,
    growing: list[_Growing],
    options: SynthesisOptions,
) -> None:
    """Add the target's answer to every chat."""
    prompts = [writer.renderer.prompt_ids(chat.messages) for chat in growing]
    answering = [(chat, ids) for chat, ids in zip(growing, prompts, strict=True) if len(ids) < writer.room]
    requests = [
        Request(ids, _answer_sampling(chat, options, f"answer {len(chat.messages)}"))
        for chat, ids in answering
    ]
    for (chat, _), request, completion in zip(answering, requests, writer.generate(requests), strict=True):
        chat.document = _extended(chat.document, tuple(request.prompt_ids), tuple(completion.token_ids))
        if completion.finish_reason == "stop":
            text = writer.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
            chat.messages.append({"role": "assistant", "content": text})


def _answer_sampling(chat: _Growing, options: SynthesisOptions, purpose: str) -> SamplingOptions:
    return SamplingOptions(
        temperature=chat.temperature,
        top_k=options.answer_top_k if chat.temperature else 0,
        seed=seed_of(options, chat.number, purpose),
        max_tokens=options.answer_tokens,
    )


def _asks(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "user" for message in messages)


def _extended(held: Rendered | None, prompt: tuple[int, ...], answer: tuple[int, ...]) -> Rendered:
    """The chat so far with one more answer; earlier ones count where the new prompt begins with them."""
    earlier = held.answers if held is not None and prompt[: len(held.token_ids)] == held.token_ids else ()
    return Rendered(prompt + answer, (*earlier, (len(prompt), len(prompt) + len(answer))))


def _finished(chat: _Growing, options: SynthesisOptions) -> Chat:
    assert chat.document is not None
    messages = tuple(chat.messages)
    return Chat(
        chat.document.token_ids,
        chat.document.answers,
        messages,
        chat.temperature,
        options.thinking,
        chat.number,
    )
