"""The target writes its own chats: user turns sampled from its opened chat template, then its own answers.

Some of its user turns begin with given words, so that they are of many kinds. No data set is needed, and the
text is exactly of the kind that the drafter will have to predict. Every chat is a function of the options and
its number, so chats can be made in any number of sittings.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions, SynthesisOptions
from slipstream.core.records import Completion, FollowUp, Request
from slipstream.data.chats import Chat
from slipstream.data.openings import Opening, draw_opening
from slipstream.data.render import Message, Rendered, Renderer


class Decoder(Protocol):
    """Whatever decodes requests with the target: an engine, or a server."""

    def generate(self, requests: Sequence[Request]) -> Sequence[Completion]:
        """Completions in the order of the requests."""

    def converse(self, requests: Sequence[Request], follow: FollowUp) -> None:
        """Decode requests, and what `follow` returns for a request's number and completion, until it returns
        None for all.
        """


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
        decoder: decodes with the target, best many requests at once.
        renderer: of the target's chat template.
        tokenizer: of the target.
        room: longest sequence in tokens; a chat that has grown to it ends.
    """

    decoder: Decoder
    renderer: Renderer
    tokenizer: Any
    room: int


@dataclass
class _Growing:
    """A chat while it is being written.

    Attributes:
        number: of the chat.
        temperature: of its answers.
        turns: most questions.
        messages: so far.
        document: ids so far, up to the last answer.
        script: messages that come next, where they are given; None lets the target ask.
        opening: words that the user turn being decoded begins with.
        asked: what is being decoded.
    """

    number: int
    temperature: float
    turns: int
    messages: list[Message] = field(default_factory=list)
    document: Rendered | None = None
    script: list[Message] | None = None
    opening: Opening | None = None
    asked: Request | None = None


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
        fresh = _begun(writer, growing, options, seen)
        seen.update(chat.messages[0]["content"] for chat in fresh[: count - made])
        barren = 0 if fresh else barren + 1
        if barren == _BARREN:
            raise InputError(
                f"the target wrote no new user turn in {_BARREN} batches; {made} of {count} chats were made"
            )
        chats = _written(writer, fresh[: count - made], options)
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
    growing = []
    for number, prompt in enumerate(prompts, start=first):
        kept: list[Message] = [dict(message) for message in prompt if message.get("role") != "assistant"]
        if not _asks(kept):
            raise InputError(f"prompt {number} has no user turn")
        chat = _begin(number, options)
        chat.script = kept
        _recite(chat)
        chat.asked = _reply(writer, chat, options)
        growing.append(chat)
    return _written(writer, growing, options)


def continue_text(
    decoder: Decoder,
    starts: Sequence[Sequence[int]],
    options: SynthesisOptions,
    first: int = 0,
) -> list[Chat]:
    """A base model's own text, after given beginnings or after nothing but its start token.

    Args:
        decoder: decodes with the target.
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
    for chat, request, completion in zip(growing, requests, decoder.generate(requests), strict=True):
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


def _begun(
    writer: Writer, growing: list[_Growing], options: SynthesisOptions, seen: set[str]
) -> list[_Growing]:
    """Sample the first user turn of every chat; those with an empty, endless or repeated one are dropped, and
    those that leave no room for an answer.
    """
    asking = [(chat, request) for chat in growing if (request := _question(writer, chat, options))]
    completions = writer.decoder.generate([request for _, request in asking])
    used = set(seen)
    kept = []
    for (chat, _), completion in zip(asking, completions, strict=True):
        if not _hear_question(chat, completion) or chat.messages[-1]["content"] in used:
            continue
        chat.asked = _reply(writer, chat, options)
        if chat.asked is not None:
            used.add(chat.messages[-1]["content"])
            kept.append(chat)
    return kept


def _written(writer: Writer, growing: list[_Growing], options: SynthesisOptions) -> list[Chat]:
    """Answer, ask on, answer again, until every chat has its turns; each at its own pace.

    What chats ask first is decided; those that ask nothing have no room for an answer.
    """
    going = [chat for chat in growing if chat.asked is not None]

    def follow(number: int, completion: Completion) -> Request | None:
        chat = going[number]
        chat.asked = _next(writer, chat, completion, options)
        return chat.asked

    writer.decoder.converse([chat.asked for chat in going if chat.asked is not None], follow)
    return [_finished(chat, options) for chat in growing if chat.document is not None]


def _next(
    writer: Writer, chat: _Growing, completion: Completion, options: SynthesisOptions
) -> Request | None:
    """Take what was decoded, an answer or a question; what is to be decoded next."""
    if chat.messages[-1]["role"] != "user":
        return _reply(writer, chat, options) if _hear_question(chat, completion) else None
    # An answer that was cut off is no turn that anyone would reply to.
    if not _hear_answer(writer, chat, completion):
        return None
    if chat.script is not None:
        return _reply(writer, chat, options) if _recite(chat) else None
    asked = sum(message["role"] == "user" for message in chat.messages)
    return _question(writer, chat, options) if asked < chat.turns else None


def _recite(chat: _Growing) -> bool:
    """Add the script's messages up to the next user turn; whether there is one."""
    assert chat.script is not None
    if not _asks(chat.script):
        return False
    while True:
        chat.messages.append(chat.script.pop(0))
        if chat.messages[-1]["role"] == "user":
            return True


def _question(writer: Writer, chat: _Growing, options: SynthesisOptions) -> Request | None:
    """Has the target write the next user turn; None where there is no room."""
    purpose = f"user {len(chat.messages)}"
    draw = random.Random(f"{options.seed}/{chat.number}/{purpose}/opening")
    chat.opening = draw_opening(draw, options.opened_share, later=bool(chat.messages))
    ids = writer.renderer.user_opening_ids(chat.messages, chat.opening.begin if chat.opening else "")
    # One token at least to ask with, and one to answer.
    if len(ids) + 1 >= writer.room:
        return None
    temperature, top_k, tokens = options.prompt_temperature, options.prompt_top_k, options.prompt_tokens
    if chat.opening:
        # It is variety enough; at a high temperature a small model's passages fall apart.
        temperature, top_k, tokens = options.answer_temperature, options.answer_top_k, options.opened_tokens
    seed = seed_of(options, chat.number, purpose)
    return Request(ids, SamplingOptions(temperature=temperature, top_k=top_k, max_tokens=tokens, seed=seed))


def _hear_question(chat: _Growing, completion: Completion) -> bool:
    """Add a user turn; whether it is one."""
    whole = completion.finish_reason == "stop"
    if chat.opening is not None:
        turn = chat.opening.filled(completion.text, whole)
    else:
        turn = completion.text.strip() if whole else None
    if not turn:
        return False
    chat.messages.append({"role": "user", "content": turn})
    return True


def _reply(writer: Writer, chat: _Growing, options: SynthesisOptions) -> Request | None:
    """Has the target answer; None where there is no room."""
    ids = writer.renderer.prompt_ids(chat.messages)
    if len(ids) >= writer.room:
        return None
    return Request(ids, _answer_sampling(chat, options, f"answer {len(chat.messages)}"))


def _hear_answer(writer: Writer, chat: _Growing, completion: Completion) -> bool:
    """Add an answer; whether it came to its end."""
    assert chat.asked is not None
    chat.document = _extended(chat.document, tuple(chat.asked.prompt_ids), tuple(completion.token_ids))
    if completion.finish_reason != "stop":
        return False
    text = writer.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    chat.messages.append({"role": "assistant", "content": text})
    return True


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
