"""The target writes its own chats: distinct, reproducible, in the form that is served."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SynthesisOptions
from slipstream.data.synthesize import synthesize
from slipstream.decode import Engine
from slipstream.testing import byte_tokenizer, tiny_config, tiny_target

OPTIONS = SynthesisOptions(prompt_tokens=20, answer_tokens=12, greedy_share=0.5, prompt_temperature=3.0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = tiny_target(tiny_config(vocab_size=257), tokenizer=byte_tokenizer(), spread=0.05)
    return Engine(target, None, EngineOptions(max_rows=16))


def test_chats_are_distinct_reproducible_and_templated(engine: Engine) -> None:
    chats = list(synthesize(engine, 3, OPTIONS))
    assert len({chat.user for chat in chats}) == 3
    assert chats == list(synthesize(engine, 3, OPTIONS))
    assert chats != list(synthesize(engine, 3, replace(OPTIONS, seed=1)))
    tokenizer = engine.target.tokenizer
    for chat in chats:
        message = [{"role": "user", "content": chat.user}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        assert list(chat.prompt_ids) == list(ids)
        assert 1 <= len(chat.answer_ids) <= 12
        assert chat.temperature in (0.0, OPTIONS.answer_temperature)


def test_greedy_answers_are_the_targets_own(engine: Engine) -> None:
    from slipstream.core.options import SamplingOptions
    from slipstream.core.records import Request
    from slipstream.decode.plain import plain_decode

    chats = list(synthesize(engine, 4, replace(OPTIONS, greedy_share=1.0)))
    for chat in chats:
        request = Request(chat.prompt_ids, SamplingOptions(max_tokens=12))
        assert list(chat.answer_ids) == plain_decode(engine.target, request)


def test_a_target_that_repeats_itself_is_reported(engine: Engine) -> None:
    # Top-1 sampling always writes the same user turn.
    with pytest.raises(InputError, match="no new user turn"):
        list(synthesize(engine, 5, replace(OPTIONS, prompt_top_k=1)))
