"""The engine against the oracle: every token is the target's own choice, whatever drafts."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import Gemma3TextConfig, MistralConfig

from slipstream.core.errors import CheckpointError, InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Request
from slipstream.decode import DraftProposer, Engine, NullProposer
from slipstream.decode.plain import plain_decode
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.testing import (
    Script,
    ScriptedProposer,
    random_draft,
    right,
    right_for,
    tiny_config,
    tiny_target,
    wrong,
)

WINDOWED: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
LIMIT = 256


@cache
def target_of(family: str = "llama") -> Target:
    if family == "mistral":
        return tiny_target(MistralConfig(num_hidden_layers=2, **WINDOWED))
    if family == "gemma3":
        types = ["sliding_attention", "full_attention"]
        return tiny_target(Gemma3TextConfig(num_hidden_layers=2, layer_types=types, **WINDOWED), spread=0.2)
    return tiny_target()


@cache
def oracle(family: str, prompt: tuple[int, ...], options: str) -> tuple[int, ...]:
    return tuple(plain_decode(target_of(family), Request(prompt, parse(options))))


def parse(options: str) -> SamplingOptions:
    return eval(f"SamplingOptions({options})")  # strings make the keys of the cache hashable


PROMPTS = ((5,), (7, 3, 9), tuple(range(1, 12)), (2, 2))


def run(
    family: str, script: Script, block: int, cases: list[tuple[tuple[int, ...], str]], **engine: Any
) -> tuple[list[Completion], list[tuple[int, ...]]]:
    """Completions of the engine and texts of the oracle."""
    expected = [oracle(family, prompt, options) for prompt, options in cases]
    texts = [[*prompt, *text] for (prompt, _), text in zip(cases, expected, strict=True)]
    proposer = ScriptedProposer(texts, script, block) if block > 1 else None
    requests = [Request(prompt, parse(options)) for prompt, options in cases]
    return Engine(target_of(family), proposer, EngineOptions(**{"drafts": "max"} | engine)).generate(
        requests
    ), expected


SCRIPTS: dict[str, Script] = {
    "right": right,
    "wrong": wrong,
    "right for 1": right_for(1),
    "right for 3": right_for(3),
    "random": random_draft(1),
}


@pytest.mark.parametrize("block", range(1, 17))
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("temperature", [0, 0.7, 1.5])
def test_ids_are_the_oracles(temperature: float, name: str, block: int) -> None:
    for batch in (1, 2, 4):
        cases = [
            (prompt, f"max_tokens={14 + 3 * n}, temperature={temperature}, seed={n}")
            for n, prompt in enumerate(PROMPTS[:batch])
        ]
        completions, expected = run("llama", SCRIPTS[name], block, cases)
        assert [c.token_ids for c in completions] == expected


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("name", ["right", "wrong", "random"])
@pytest.mark.parametrize("block", [2, 6, 16])
def test_windows_shorter_than_the_text(family: str, name: str, block: int) -> None:
    cases = [(prompt, f"max_tokens=20, temperature={n % 2}, seed={n}") for n, prompt in enumerate(PROMPTS)]
    completions, expected = run(family, SCRIPTS[name], block, cases)
    assert [c.token_ids for c in completions] == expected


@pytest.mark.parametrize("length", [1, 62, 63, 64, 65, 127, 128])
def test_prompts_at_the_edges_of_buffers(length: int) -> None:
    prompt = tuple(1 + n % 60 for n in range(length))
    completions, expected = run("llama", random_draft(2), 5, [(prompt, "max_tokens=6, ignore_eos=True")])
    assert [c.token_ids for c in completions] == expected


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_prefill_in_chunks(chunk: int) -> None:
    prompt = tuple(1 + n % 60 for n in range(30))
    cases = [(prompt, "max_tokens=5"), ((4,), "max_tokens=5")]
    completions, expected = run("llama", right, 4, cases, prefill_chunk=chunk)
    assert [c.token_ids for c in completions] == expected


@pytest.mark.parametrize("room", [1, 2, 3, 9])
@pytest.mark.parametrize("script", [right, wrong])
def test_near_the_context_limit(room: int, script: Script) -> None:
    prompt = tuple(1 + n % 60 for n in range(LIMIT - room))
    options = "max_tokens=50, ignore_eos=True"
    completions, expected = run("llama", script, 8, [(prompt, options)])
    assert completions[0].token_ids == expected[0]
    assert completions[0].completion_tokens == room
    assert completions[0].finish_reason == "length"


@pytest.mark.parametrize(
    "options",
    [
        "temperature=1.2, top_k=5, seed=1",
        "temperature=1.0, top_p=0.8, seed=2",
        "temperature=1.0, min_p=0.1, seed=3",
        "repetition_penalty=1.5",
        "presence_penalty=1.0, frequency_penalty=0.5",
        "temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4, top_p=0.9, seed=4",
        "logit_bias={3: 4.0, 9: -100.0}",
        "min_tokens=9, stop_token_ids=(5, 11, 17)",
    ],
)
@pytest.mark.parametrize("name", ["right", "random"])
def test_settings_with_every_slots_own_history(options: str, name: str) -> None:
    cases = [(PROMPTS[1], f"max_tokens=18, {options}"), (PROMPTS[2], "max_tokens=12")]
    for block in (1, 4, 9):
        completions, expected = run("llama", SCRIPTS[name], block, cases)
        assert [c.token_ids for c in completions] == expected


def test_a_mixed_batch_larger_than_the_rows() -> None:
    cases = [
        (PROMPTS[n % 4], f"max_tokens={3 + 2 * n}, temperature={n % 3 * 0.7}, seed={n}") for n in range(7)
    ]
    completions, expected = run("llama", random_draft(4), 5, cases, max_rows=7)
    assert [c.token_ids for c in completions] == expected
    requests = [Request(prompt, parse(options)) for prompt, options in cases]
    assert [
        c.token_ids for c in Engine(target_of(), None, EngineOptions(max_rows=3)).generate(requests)
    ] == expected


def test_every_length_and_statistic_at_every_offset_of_a_block() -> None:
    prompt, block = PROMPTS[1], 5
    text = oracle("llama", prompt, "max_tokens=24, ignore_eos=True")
    for count in range(1, 20):
        cases = [(prompt, f"max_tokens={count}, ignore_eos=True")]
        done = run("llama", right, block, cases)[0][0]
        assert done.token_ids == text[:count]
        assert done.finish_reason == "length"
        assert done.rounds == -(-(count - 1) // block)
        assert done.emitted_in_rounds == count - 1
        assert sum(done.accepted_per_position) == sum(
            min(block - 1, count - 1 - first) for first in range(0, count - 1, block)
        )


@pytest.mark.parametrize("how", ["stop_token_ids", "eos"])
def test_stop_tokens_at_every_offset_of_a_block(how: str) -> None:
    prompt, block = (9, 4), 5
    sampled = "max_tokens=24, ignore_eos=True, temperature=1.5, seed=8"
    text = oracle("llama", prompt, sampled)
    offsets = [n for n in range(len(text)) if text[n] not in text[:n]]
    assert {n % block for n in offsets} == set(range(block))
    for at in offsets:
        stop = text[at]
        request = Request(prompt, parse(f"{sampled}, stop_token_ids=({stop},)"))
        target = target_of()
        if how == "eos":
            config = tiny_config(eos_token_id=stop)
            target = tiny_target(config)
            request = Request(prompt, parse("max_tokens=24, temperature=1.5, seed=8"))
        proposer = ScriptedProposer([[*prompt, *text]], right, block)
        done = Engine(target, proposer, EngineOptions(drafts="max")).generate([request])[0]
        assert done.token_ids == text[: at + 1]
        assert done.finish_reason == "stop"
        assert done.emitted_in_rounds == at


def real_pair(block: int = 6) -> tuple[Target, DraftProposer]:
    target = target_of()
    config = DraftConfig.for_target(target.info, num_layers=2, block_size=block, num_taps=2)
    torch.manual_seed(0)
    return target, DraftProposer(target, Drafter(config).eval())


@pytest.mark.parametrize("drafts", ["coupled", "argmax"])
def test_a_random_drafter_changes_nothing(drafts: Any) -> None:
    target, proposer = real_pair()
    engine = Engine(target, proposer, EngineOptions(drafts="max", draft_noise=drafts))
    for temperature in (0, 0.7, 1.5):
        cases = [
            (prompt, f"max_tokens=16, temperature={temperature}, seed={n}")
            for n, prompt in enumerate(PROMPTS)
        ]
        expected = [oracle("llama", *case) for case in cases]
        assert [c.token_ids for c in engine.generate([Request(p, parse(o)) for p, o in cases])] == expected


def test_a_smaller_block_than_trained_is_allowed_and_a_larger_one_refused() -> None:
    target, proposer = real_pair(block=6)
    done = Engine(target, proposer, EngineOptions(block_size=3, drafts="max")).generate(
        [Request((5,), parse("max_tokens=9"))]
    )
    assert done[0].token_ids == oracle("llama", (5,), "max_tokens=9")
    assert len(done[0].accepted_per_position) == 2
    with pytest.raises(InputError, match="block_size 7 is larger"):
        Engine(target, proposer, EngineOptions(block_size=7))


def test_block_size_one_decodes_plainly() -> None:
    target, proposer = real_pair()
    engine = Engine(target, proposer, EngineOptions(block_size=1))
    assert engine.proposer is None
    assert engine.generate([Request((5,), parse("max_tokens=9"))])[0].token_ids == oracle(
        "llama", (5,), "max_tokens=9"
    )


def test_a_drafter_of_another_width_is_refused() -> None:
    config = DraftConfig.for_target(tiny_target(tiny_config(hidden_size=64)).info, num_layers=1, num_taps=1)
    with pytest.raises(CheckpointError, match="width"):
        DraftProposer(target_of(), Drafter(config))


def test_requests_in_a_row_share_nothing() -> None:
    target, proposer = real_pair()
    engine = Engine(target, proposer)
    cases = [
        ((5,), "max_tokens=30"),
        (PROMPTS[2], "max_tokens=4"),
        ((5,), "max_tokens=30"),
        ((8, 8), "max_tokens=9"),
    ]
    for prompt, options in cases:
        assert engine.generate([Request(prompt, parse(options))])[0].token_ids == oracle(
            "llama", prompt, options
        )


def test_a_null_proposer_emits_one_token_a_round() -> None:
    done = Engine(target_of(), NullProposer(6)).generate(
        [Request((5,), parse("max_tokens=12, ignore_eos=True"))]
    )[0]
    assert done.token_ids == oracle("llama", (5,), "max_tokens=12, ignore_eos=True")
    assert done.rounds == done.emitted_in_rounds == 11
    assert done.acceptance_length == 1.0


def fail_once(call: Callable[..., Any], after: int) -> Callable[..., Any]:
    """Wrap a function so that one of its calls raises."""
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == after:
            raise RuntimeError("a fault in the middle")
        return call(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize("where", ["propose", "extend", "verify", "inside the model"])
def test_a_fault_in_a_round_leaves_the_engine_usable(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    target, proposer = real_pair()
    engine = Engine(target, proposer, EngineOptions(drafts="max"))
    request = Request(PROMPTS[1], parse("max_tokens=15"))
    if where == "inside the model":
        lean = target._lean
        assert lean is not None
        monkeypatch.setattr(lean, "_act", fail_once(lean._act, 4))
    else:
        owner = target if where == "verify" else proposer
        monkeypatch.setattr(owner, where, fail_once(getattr(owner, where), 3))
    with pytest.raises(RuntimeError, match="fault"):
        engine.generate([request])
    assert engine.generate([request])[0].token_ids == oracle("llama", PROMPTS[1], "max_tokens=15")


def test_a_stream_may_be_left_early() -> None:
    target, proposer = real_pair()
    engine = Engine(target, proposer)
    request = Request(PROMPTS[1], parse("max_tokens=15"))
    stream = engine.stream([request])
    next(stream)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    pieces = list(engine.stream([request]))
    ids = tuple(token for piece in pieces for token in piece.token_ids)
    assert ids == oracle("llama", PROMPTS[1], "max_tokens=15") == engine.completions[0].token_ids
    assert [piece.finish_reason is None for piece in pieces] == [True] * (len(pieces) - 1) + [False]


@pytest.mark.parametrize(
    ("prompt", "options", "sentence"),
    [
        ((), "", "empty prompt"),
        ((64,), "", "token 64 in prompt is outside"),
        ((-1,), "", "token -1 in prompt"),
        ((1,), "stop_token_ids=(99,)", "token 99 in stop_token_ids"),
        ((1,), "logit_bias={64: 1.0}", "token 64 in logit_bias"),
        ((1,) * 256, "", "a prompt of 256 tokens leaves no room in a context of 256"),
        ((1,), "stop=('x',)", "stop strings need a tokenizer"),
    ],
)
def test_what_cannot_be_decoded_is_refused(prompt: tuple[int, ...], options: str, sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        Engine(target_of()).generate([Request((1,)), Request(prompt, parse(options))])


def test_a_smaller_context_can_be_asked_for() -> None:
    engine = Engine(target_of(), None, EngineOptions(max_context=20))
    done = engine.generate([Request((5,) * 15, parse("max_tokens=50, ignore_eos=True"))])[0]
    assert done.completion_tokens == 5
    with pytest.raises(InputError, match="context of 20"):
        engine.generate([Request((5,) * 20)])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reject_runs_and_is_greedy_at_temperature_zero(temperature: float) -> None:
    target, proposer = real_pair()
    engine = Engine(target, proposer, EngineOptions(acceptor="reject"))
    cases = [
        (prompt, f"max_tokens=12, temperature={temperature}, seed={n}") for n, prompt in enumerate(PROMPTS)
    ]
    first = engine.generate([Request(p, parse(o)) for p, o in cases])
    again = engine.generate([Request(p, parse(o)) for p, o in cases])
    assert [c.token_ids for c in first] == [c.token_ids for c in again]
    if temperature == 0:
        assert [c.token_ids for c in first] == [oracle("llama", *case) for case in cases]
