"""What rows of a batch, calls of an engine and engines of a target must not do to each other."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Piece, Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.plain import plain_decode
from slipstream.model import Drafter
from slipstream.target import Target
from slipstream.testing import ScriptedProposer, right


def ask(prompt: tuple[int, ...], tokens: int, temperature: float = 0.0) -> Request:
    return Request(prompt, SamplingOptions(max_tokens=tokens, temperature=temperature, ignore_eos=True))


def ids_of(pieces: list[Piece]) -> list[int]:
    return [token for piece in pieces for token in piece.token_ids]


@pytest.mark.parametrize("block", [4, 16])
@pytest.mark.parametrize("spare", [0, 1, 2])
@pytest.mark.parametrize("tokens", [2, 5, 18])
def test_a_row_that_overshoots_its_end_waits_for_its_mates(
    target: Target, tokens: int, spare: int, block: int
) -> None:
    """The long row fills its buffer to the last slot and finishes first; its block runs past its limit."""
    length = 128 - block - tokens - spare
    long, short = ask(tuple(1 + n % 60 for n in range(length)), tokens), ask((5,), 40)
    further = plain_decode(target, ask(tuple(long.prompt_ids), tokens + block))
    proposer = ScriptedProposer([[*long.prompt_ids, *further], [5]], right, block)
    done = Engine(target, proposer, EngineOptions(drafts="max")).generate([long, short])
    assert list(done[0].token_ids) == further[:tokens]
    assert list(done[1].token_ids) == plain_decode(target, short)
    assert done[1].rounds > done[0].rounds


@pytest.mark.parametrize("drafted", [False, True])
def test_a_later_call_ends_an_open_stream_in_one_sentence(
    target: Target, drafter: Drafter, drafted: bool
) -> None:
    engine = Engine(target, DraftProposer(target, drafter) if drafted else None)
    first, second = ask((5,), 12), ask((9, 4), 12)
    stream = engine.stream([first])
    begun = [next(stream), next(stream)]
    assert list(engine.generate([second])[0].token_ids) == plain_decode(target, second)
    with pytest.raises(InputError, match="a later call of the same engine has ended this stream"):
        next(stream)
    assert ids_of(begun) == plain_decode(target, first)[: len(ids_of(begun))]
    assert list(engine.completions[0].token_ids) == plain_decode(target, second)
    assert list(engine.generate([first])[0].token_ids) == plain_decode(target, first)


def test_engines_of_one_target_may_take_turns(target: Target, drafter: Drafter) -> None:
    """A drafted and a plain stream, piece by piece; each wants taps of its own."""
    drafted, plain = Engine(target, DraftProposer(target, drafter)), Engine(target)
    first, second = ask((5,), 12, temperature=0.8), ask((9, 4), 12)
    streams = [drafted.stream(first), plain.stream(second)]
    pieces: list[list[Piece]] = [[], []]
    while streams[0] is not None or streams[1] is not None:
        for number, stream in enumerate(streams):
            piece = next(stream, None) if stream is not None else None
            if piece is None:
                streams[number] = None  # type: ignore[call-overload]
            else:
                pieces[number].append(piece)
    assert ids_of(pieces[0]) == plain_decode(target, first)
    assert ids_of(pieces[1]) == plain_decode(target, second)


def test_one_request_can_be_streamed_without_a_list(target: Target) -> None:
    engine, request = Engine(target), ask((5,), 4)
    assert ids_of(list(engine.stream(request))) == plain_decode(target, request)
    assert len(engine.completions) == 1


def test_numbers_that_are_none_die_with_their_request(target: Target, drafter: Drafter) -> None:
    """A half-precision overflow in one request must not reach the next through reused buffers."""
    proposer = DraftProposer(target, drafter)
    engine, request = Engine(target, proposer), ask((5, 6), 12)
    honest = engine.generate([request])[0]
    embedding = target.model.get_input_embeddings().weight
    kept = embedding[7].clone()
    with torch.no_grad():
        embedding[7] = math.nan
        engine.generate([ask((5, 7, 7, 7, 7, 7), 30)])
        embedding[7] = kept
    again = engine.generate([request])[0]
    assert list(again.token_ids) == plain_decode(target, request)
    assert again.accepted_per_position == honest.accepted_per_position
    # The buffers were reused, else this would prove nothing.
    assert engine._cache is not None
    assert engine._cache.slots == 64
