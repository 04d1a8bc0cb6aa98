"""Requests that join and leave between rounds get the text that they would get alone."""

from __future__ import annotations

import random

import pytest

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.plain import plain_decode
from slipstream.model import Drafter
from slipstream.target import Target


def engine_of(target: Target, drafter: Drafter | None, **options: int) -> Engine:
    proposer = None if drafter is None else DraftProposer(target, drafter)
    return Engine(target, proposer, EngineOptions(**options))  # type: ignore[arg-type]


def any_request(draw: random.Random) -> Request:
    prompt = tuple(draw.randrange(1, 60) for _ in range(draw.choice([1, 3, 17, 40, 61])))
    sampling = SamplingOptions(
        max_tokens=draw.choice([1, 2, 9, 30]),
        temperature=draw.choice([0.0, 0.9]),
        top_k=draw.choice([0, 5]),
        repetition_penalty=draw.choice([1.0, 1.3]),
        seed=draw.randrange(100),
        ignore_eos=True,
    )
    return Request(prompt, sampling)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drafted", [False, True])
def test_arrivals_and_cancellations_change_nobody_elses_text(
    target: Target, drafter: Drafter, drafted: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    engine = engine_of(target, drafter if drafted else None, max_rows=4, prefill_chunk=20)
    if seed % 2:  # also with rounds that draft nothing
        monkeypatch.setattr(engine._draft_length, "choose", lambda *told: draw.choice([0, 0, 0, 3 * drafted]))
    rows = engine.open()
    asked: dict[int, Request] = {}
    pieces: dict[int, list[int]] = {}
    gone: set[int] = set()
    while rows.busy or len(asked) < 14:
        while len(asked) < 14 and (draw.random() < 0.4 or not rows.busy):
            request = any_request(draw)
            asked[rows.submit(request)] = request
        if draw.random() < 0.1:
            number = draw.choice(list(asked))
            if number not in rows.completions:
                rows.cancel(number)
                gone.add(number)
        for piece in rows.step():
            assert piece.index not in gone
            pieces.setdefault(piece.index, []).extend(piece.token_ids)
    assert set(rows.completions) == set(asked) - gone
    for number, done in rows.completions.items():
        assert list(done.token_ids) == plain_decode(target, asked[number]) == pieces[number]


def test_rows_that_decode_do_not_wait_for_a_long_prompt(target: Target, drafter: Drafter) -> None:
    rows = engine_of(target, drafter, max_rows=2, prefill_chunk=16).open()
    first = rows.submit(Request((3, 4), SamplingOptions(max_tokens=60, ignore_eos=True)))
    rows.step()
    long = Request(tuple(range(1, 60)) + (7,) * 5, SamplingOptions(max_tokens=3, ignore_eos=True))
    second = rows.submit(long)
    steps = []
    while second not in {index for step in steps for index in step}:
        steps.append({piece.index for piece in rows.step()})
    assert len(steps) == 4  # 64 tokens in parts of 16
    assert all(first in step for step in steps)
    while rows.busy:
        rows.step()
    assert list(rows.completions[second].token_ids) == plain_decode(target, long)


def test_nothing_is_kept_of_requests_that_are_gone(target: Target, drafter: Drafter) -> None:
    """Their numbers come again, and the next one's drafts are not as good as theirs were."""
    engine = engine_of(target, drafter, max_rows=2)
    rows = engine.open()
    numbers = [rows.submit(Request((n,), SamplingOptions(max_tokens=30, ignore_eos=True))) for n in (3, 4)]
    for _ in range(4):
        rows.step()
    assert set(engine._draft_length._own) == set(numbers)
    rows.cancel(numbers[0])
    rows.step()
    assert set(engine._draft_length._own) == {numbers[1]}
    engine.open()
    assert not engine._draft_length._own


@pytest.mark.parametrize("drafted", [False, True])
def test_what_follows_is_decoded_in_the_same_batch(target: Target, drafter: Drafter, drafted: bool) -> None:
    draw = random.Random(5)
    requests = [any_request(draw) for _ in range(9)]
    heard: dict[int, list[Completion]] = {number: [] for number in range(9)}

    def follow(number: int, done: Completion) -> Request | None:
        heard[number].append(done)
        if len(heard[number]) > number % 3:
            return None
        return Request((*requests[number].prompt_ids, *done.token_ids, 9), requests[number].sampling)

    engine_of(target, drafter if drafted else None, max_rows=3).converse(requests, follow)
    for number, request in enumerate(requests):
        assert len(heard[number]) == 1 + number % 3
        asked = request
        for done in heard[number]:
            assert list(done.token_ids) == plain_decode(target, asked)
            asked = Request((*request.prompt_ids, *done.token_ids, 9), request.sampling)


def test_a_follow_up_that_does_not_fit_is_refused_by_its_number(target: Target) -> None:
    requests = [Request((n,), SamplingOptions(max_tokens=2, ignore_eos=True)) for n in (1, 2)]
    with pytest.raises(InputError, match=r"request 1: token 9999 in prompt"):
        engine_of(target, None).converse(
            requests, lambda number, done: Request((9999,), SamplingOptions()) if number else None
        )
