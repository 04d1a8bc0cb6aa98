"""Text through the whole engine: bytes of a random model, stop strings at every offset of a block."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import Engine
from slipstream.decode.plain import plain_decode
from slipstream.decode.text import Detokenizer
from slipstream.target import Target
from slipstream.testing import ScriptedProposer, byte_tokenizer, random_draft, right, tiny_config, tiny_target

TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False).input_ids
    return ids


def whole(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@cache
def target() -> Target:
    return tiny_target(tiny_config(vocab_size=257), tokenizer=TOKENIZER)


PIECES = [ids_of(text) for text in ("a", " b", "é", "你", "👩", "\ufffd")] + [[0], [0], ids_of("é")[:1]]


@given(st.lists(st.one_of(st.sampled_from(PIECES), st.lists(st.integers(0, 256), max_size=3)), max_size=12))
def test_pieces_of_any_bytes_join_to_the_whole(parts: list[list[int]]) -> None:
    ids = [token for part in parts for token in part]
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join([*map(detokenizer.add, ids), detokenizer.finish()]) == whole(ids)


def test_end_tokens_in_a_row_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark that ignores the end says it thousands of times; each must cost the same."""
    longest = 0
    decode = Detokenizer._decode

    def watched(self: Detokenizer, ids: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(ids))
        return decode(self, ids)

    monkeypatch.setattr(Detokenizer, "_decode", watched)
    detokenizer = Detokenizer(TOKENIZER)
    ids = [*ids_of("ab"), *[0] * 200, *ids_of("你c")]
    assert "".join(map(detokenizer.add, ids)) == "ab你c"
    assert longest < 8


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("block", [1, 3, 8])
def test_streamed_text_is_the_decoded_ids(block: int, temperature: float) -> None:
    """Random bytes are mostly broken characters, which is the hard case."""
    requests = [
        Request(
            ids_of(prompt), SamplingOptions(max_tokens=40, temperature=temperature, seed=n, ignore_eos=True)
        )
        for n, prompt in enumerate(("x", "hello", "你"))
    ]
    texts = [[*request.prompt_ids, *plain_decode(target(), request)] for request in requests]
    proposer = ScriptedProposer(texts, random_draft(3, 0.7), block) if block > 1 else None
    engine = Engine(target(), proposer)
    streamed = ["", "", ""]
    for piece in engine.stream(requests):
        streamed[piece.index] += piece.text
        assert "".join(text for text, _ in piece.spans) == piece.text
    for request, text, done in zip(requests, streamed, engine.completions, strict=True):
        assert list(done.token_ids) == plain_decode(target(), request)
        assert text == done.text == whole(list(done.token_ids))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_stop_string_at_every_offset_of_a_block(size: int) -> None:
    prompt, block = ids_of("hi"), 5
    letters = dict.fromkeys(ids_of("abcdefghijklmnopqrstuvwxyz"), 30.0)
    sampling = {"max_tokens": 26, "temperature": 1.5, "seed": 4, "logit_bias": letters}
    text = plain_decode(target(), Request(prompt, SamplingOptions(**sampling)))  # type: ignore[arg-type]
    said = whole(text)
    assert len(said) == 26
    places = [at for at in range(26 - size + 1) if said.index(said[at : at + size]) == at]
    assert {(at + size) % block for at in places} == set(range(block))
    engine = Engine(target(), ScriptedProposer([[*prompt, *text]], right, block))
    for at in places:
        stop = said[at : at + size]
        request = Request(prompt, SamplingOptions(**sampling, stop=(stop,)))  # type: ignore[arg-type]
        pieces = list(engine.stream(request))
        done = engine.completions[0]
        assert "".join(piece.text for piece in pieces) == done.text == said[:at]
        assert list(done.token_ids) == text[: at + size]
        assert done.finish_reason == "stop"
        assert done.emitted_in_rounds == at + size - 1
        assert sum(piece.accepted for piece in pieces) == sum(done.accepted_per_position)
