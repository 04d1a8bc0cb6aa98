"""The target writes chats: distinct, reproducible, resumable, in the form that is served."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions, SynthesisOptions
from slipstream.core.records import Completion, Request
from slipstream.data.chats import Chat
from slipstream.data.make import ChatPlan, make_chats, renderer_for
from slipstream.data.openings import openings
from slipstream.data.readers import read_chats
from slipstream.data.synthesize import Writer, answer, continue_text, synthesize
from slipstream.decode import Engine
from slipstream.decode.plain import plain_decode
from slipstream.target import Target
from slipstream.testing import byte_tokenizer, tiny_config, tiny_target

OPTIONS = SynthesisOptions(
    prompt_tokens=120,
    prompt_top_k=0,
    prompt_temperature=3.0,
    answer_tokens=30,
    answer_top_k=0,
    greedy_share=0.3,
    answer_temperature=3.0,
    turns=3,
    follow_share=0.9,
)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tiny_config(vocab_size=257), tokenizer=byte_tokenizer(), spread=0.05)


@pytest.fixture(scope="module")
def engine(target: Target) -> Engine:
    return Engine(target, None, EngineOptions(max_rows=16))


class Scripted:
    """Decodes as a function says, all requests of a turn before those of the next."""

    def __init__(self, generate: Callable[[Sequence[Request]], Sequence[Completion]]) -> None:
        self.generate = generate

    def converse(
        self, requests: Sequence[Request], follow: Callable[[int, Completion], Request | None]
    ) -> None:
        going = dict(enumerate(requests))
        while going:
            done = zip(list(going), self.generate(list(going.values())), strict=True)
            nexts = {number: follow(number, completion) for number, completion in done}
            going = {number: request for number, request in nexts.items() if request is not None}


def writer_of(engine: Engine) -> Writer:
    renderer = renderer_for(engine.target, None)
    assert renderer is not None
    return Writer(engine, renderer, engine.target.tokenizer, engine.target.info.max_context)


def written(engine: Engine, count: int, options: SynthesisOptions = OPTIONS, **more: Any) -> list[Chat]:
    waves = synthesize(writer_of(engine), count, options, **more)
    return [chat for wave in waves for chat in wave]


def test_chats_are_distinct_reproducible_and_templated(engine: Engine) -> None:
    chats = written(engine, 6)
    assert len({chat.messages[0]["content"] for chat in chats}) == 6
    assert chats == written(engine, 6)
    assert chats != written(engine, 6, replace(OPTIONS, seed=1))
    renderer = writer_of(engine).renderer
    for chat in chats:
        start, end = chat.answers[0]
        assert chat.token_ids[:start] == renderer.prompt_ids(chat.messages[:1])
        assert 1 <= end - start <= 30
        assert chat.temperature in (0.0, OPTIONS.answer_temperature)


def test_a_chat_does_not_depend_on_how_many_are_made_or_in_how_many_sittings(engine: Engine) -> None:
    whole = written(engine, 9)
    assert written(engine, 4) == whole[:4]
    assert written(engine, 9, wave=3) == whole
    assert written(engine, 9, done=whole[:5]) == whole[5:]


def test_greedy_answers_are_the_targets_own(engine: Engine) -> None:
    for chat in written(engine, 3, replace(OPTIONS, greedy_share=1.0)):
        start, end = chat.answers[-1]
        request = Request(chat.token_ids[:start], SamplingOptions(max_tokens=30))
        assert list(chat.token_ids[start:end]) == plain_decode(engine.target, request)


def test_a_target_that_repeats_itself_is_reported(engine: Engine) -> None:
    # Top-1 sampling always writes the same user turn.
    with pytest.raises(InputError, match="no new user turn"):
        written(engine, 5, replace(OPTIONS, prompt_top_k=1, prompt_tokens=20, opened_share=0.0))


def test_given_prompts_are_answered_and_their_answers_replaced(engine: Engine) -> None:
    writer = writer_of(engine)
    prompts = [
        [{"role": "user", "content": "ab"}],
        [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "no"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
    ]
    greedy = replace(OPTIONS, greedy_share=1.0)
    chats = answer(writer, prompts, greedy)
    assert chats[0].token_ids == chats[1].token_ids
    assert [message["role"] for message in chats[2].messages[:2]] == ["system", "user"]
    with pytest.raises(InputError, match="prompt 0 has no user turn"):
        answer(writer, [[]], greedy)


def test_chats_go_on_for_several_turns_while_they_have_room(engine: Engine) -> None:
    """A script in place of the target: every turn is said at once and ends."""
    tokenizer = engine.target.tokenizer

    def script(requests: Sequence[Request]) -> list[Completion]:
        texts = [f"t{request.sampling.seed}" for request in requests]
        ids = [(*tokenizer(text).input_ids, 0) for text in texts]
        return [
            Completion(text, said, len(request.prompt_ids), "stop", 0, 0, (), 0.0, 0.0)
            for text, said, request in zip(texts, ids, requests, strict=True)
        ]

    def chats(room: int) -> list[Chat]:
        writer = replace(writer_of(engine), decoder=Scripted(script), room=room)
        waves = synthesize(writer, 40, replace(OPTIONS, follow_share=0.5, opened_share=0.0))
        return [chat for wave in waves for chat in wave]

    free = chats(10_000)
    assert {len(chat.answers) for chat in free} == {1, 2, 3}
    for chat in free:
        said = [m["content"] + "<|end|>" for m in chat.messages if m["role"] == "assistant"]
        assert [tokenizer.decode(chat.token_ids[a:b]) for a, b in chat.answers] == said
        assert len(chat.messages) == 2 * len(chat.answers)
    assert {len(chat.answers) for chat in chats(110)} == {1, 2}


def test_opened_questions_begin_and_end_with_given_words(engine: Engine) -> None:
    chats = written(engine, 24, replace(OPTIONS, opened_share=1.0, opened_tokens=20))
    later = 0
    for chat in chats:
        for number, message in enumerate(chat.messages):
            if message["role"] != "user":
                continue
            later += number > 0
            assert any(
                opening.later == (number > 0)
                and message["content"].startswith(opening.begin.strip())
                and message["content"].endswith(opening.end.strip())
                and len(message["content"]) > len((opening.begin + opening.end).strip())
                for opening in openings()
            )
    assert later
    assert len({chat.messages[0]["content"][:12] for chat in chats}) > 12
    none = written(engine, 24, replace(OPTIONS, opened_share=0.0))
    begins = tuple(opening.begin for opening in openings())
    assert not any(chat.messages[0]["content"].startswith(begins) for chat in none)


def test_base_models_continue_from_nothing(engine: Engine) -> None:
    chats = continue_text(engine, [[0]] * 4, OPTIONS)
    for chat in chats:
        assert chat.token_ids[0] == 0
        assert chat.answers == ((1, len(chat.token_ids)),)
    assert chats == continue_text(engine, [[0]] * 4, OPTIONS)


class KilledError(Exception):
    """Stands for the end of the process."""


def test_a_killed_sitting_is_gone_on_with(target: Target, engine: Engine, tmp_path: Path) -> None:
    plan = ChatPlan(9, options=OPTIONS, wave=2)
    whole = tmp_path / "whole.jsonl"
    make_chats(target, engine, plan, whole)
    calls = 0

    def dies(requests: Sequence[Request]) -> Sequence[Completion]:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise KilledError
        return engine.generate(requests)

    path = tmp_path / "chats.jsonl"
    with pytest.raises(KilledError):
        make_chats(target, Scripted(dies), plan, path)
    partial = tmp_path / "chats.jsonl.partial"
    assert not path.exists()
    lines = partial.read_text().splitlines()
    assert 2 <= len(lines) < 10
    partial.write_text("\n".join(lines) + '\n{"token_ids": [1, 2')  # cut off in the middle of a line
    made = make_chats(target, engine, plan, path)
    assert path.read_text() == whole.read_text()
    assert made.chats == 9
    assert made.new_answer_tokens < made.answer_tokens
    assert not partial.exists()


def test_files_of_other_plans_and_finished_files_are_kept(
    target: Target, engine: Engine, tmp_path: Path
) -> None:
    path = tmp_path / "chats.jsonl"
    partial = tmp_path / "chats.jsonl.partial"
    partial.write_text('{"plan": "other"}\n')
    with pytest.raises(InputError, match="begun with other options"):
        make_chats(target, engine, ChatPlan(2, options=OPTIONS), path)
    assert partial.exists()
    partial.unlink()
    make_chats(target, engine, ChatPlan(2, options=OPTIONS), path)
    with pytest.raises(InputError, match="--force"):
        make_chats(target, engine, ChatPlan(3, options=OPTIONS), path)
    make_chats(target, engine, ChatPlan(3, options=OPTIONS), path, force=True)
    assert len(read_chats(path, None).chats) == 3


@pytest.mark.parametrize("keep", [False, True])
def test_prompts_from_a_file(target: Target, engine: Engine, tmp_path: Path, keep: bool) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": "A"}]}
            )
            + "\n"
            for n in range(5)
        )
    )
    path = tmp_path / "out.jsonl"
    make_chats(target, engine, ChatPlan(4, str(prompts), keep, OPTIONS, wave=3), path)
    chats = read_chats(path, None).chats
    assert [chat.messages[0]["content"] for chat in chats] == ["q0", "q1", "q2", "q3"]
    assert all((chat.messages[1:] == ({"role": "assistant", "content": "A"},)) == keep for chat in chats)
