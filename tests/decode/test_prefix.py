"""Texts that begin alike: what is kept of earlier ones changes no text and no draft."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.accept import Proposal
from slipstream.decode.plain import plain_decode
from slipstream.decode.prefix import Kept, PrefixCache, common
from slipstream.model import Drafter
from slipstream.target import Target

TEXTS = st.lists(st.integers(0, 1), max_size=24)


def text(*ids: int) -> Kept:
    return Kept(np.array(ids, dtype=np.int64), (), ())


@given(TEXTS, TEXTS)
def test_common_beginnings_against_a_loop(one: list[int], other: list[int]) -> None:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    assert common(np.array(one, dtype=np.int64), np.array(other, dtype=np.int64)) == length


def test_the_longest_beginning_is_found_and_never_the_whole_prompt() -> None:
    cache = PrefixCache(1000)
    short, long = text(*range(20)), text(*range(18), *[7] * 30)
    cache.put(short)
    cache.put(long)
    assert cache.find([*range(18), 7, 7, 3]) == (long, 20)
    assert cache.find(list(range(20))) == (short, 19)
    assert cache.find(list(range(40))) == (short, 20)
    assert cache.find([5, *range(40)]) == (None, 0)
    assert cache.find(list(range(9))) == (None, 0)  # too short to be worth a copy


def test_the_oldest_goes_and_what_is_continued_too() -> None:
    cache = PrefixCache(100)
    first, second = text(*range(40)), text(*range(100, 140))
    cache.put(first)
    cache.put(second)
    cache.find([*range(40), 1])  # used last
    assert not cache.wants(range(30))
    assert not cache.wants(range(101))
    assert cache.wants(range(50))
    cache.put(text(*range(200, 230)))
    assert cache.tokens == 70
    assert cache.find([*range(100, 140), 1]) == (None, 0)
    cache.put(text(*range(60)))
    assert cache.tokens == 90  # 60 and 30: the first 40 are among the 60
    assert not PrefixCache(0).wants(range(20))


class Recording(DraftProposer):
    """Remembers its drafts."""

    def propose(self, *args: Any) -> Proposal:
        proposal = super().propose(*args)
        self.drafts = [*getattr(self, "drafts", []), proposal.drafts_BK.tolist()]
        return proposal


def talk(engine: Engine, turns: int, sampling: SamplingOptions) -> list[Completion]:
    """A conversation; every turn's prompt begins with all that was said."""
    said: tuple[int, ...] = tuple(range(3, 23))
    done = []
    for turn in range(turns):
        [completion] = engine.generate([Request(said, replace(sampling, seed=turn))])
        done.append(completion)
        said += (*completion.token_ids, 11, 12 + turn)
    return done


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_turns_of_a_conversation(target: Target, drafter: Drafter, drafted: bool, temperature: float) -> None:
    sampling = SamplingOptions(max_tokens=17, temperature=temperature, ignore_eos=True)
    both, proposers = [], [Recording(target, drafter), Recording(target, drafter)]
    for tokens, proposer in zip((0, 500), proposers, strict=True):
        options = EngineOptions(drafts="max", prefix_tokens=tokens)
        both.append(talk(Engine(target, proposer if drafted else None, options), 4, sampling))
    for turn, (fresh, kept) in enumerate(zip(*both, strict=True)):
        assert fresh.token_ids == kept.token_ids
        assert fresh.cached_tokens == 0
        # All but the last token, unless it was a draft that the last round read already.
        assert kept.cached_tokens - (turn > 0) * (fresh.prompt_tokens - 3) in (0, int(drafted and turn > 0))
    if drafted:
        assert proposers[0].drafts == proposers[1].drafts  # so the drafter's context is the same


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("drafted", [False, True])
def test_shared_beginnings_in_a_busy_batch(
    target: Target, drafter: Drafter, drafted: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = random.Random(seed)
    system = [tuple(draw.randrange(1, 60) for _ in range(length)) for length in (20, 41)]
    proposer = DraftProposer(target, drafter) if drafted else None
    engine = Engine(target, proposer, EngineOptions(max_rows=3, prefill_chunk=20, prefix_tokens=300))
    if seed % 2:  # features that wait must not be lost
        lengths = lambda *told: draw.choice([0, 0, 0, 3 * drafted])  # noqa: E731
        monkeypatch.setattr(engine._draft_length, "choose", lengths)
    rows = engine.open()
    asked: dict[int, Request] = {}
    said: list[tuple[int, ...]] = []
    while rows.busy or len(asked) < 16:
        while len(asked) < 16 and (draw.random() < 0.4 or not rows.busy):
            begins = [*system, *said]
            tail = tuple(draw.randrange(1, 60) for _ in range(draw.choice([1, 5, 18])))
            sampling = SamplingOptions(
                max_tokens=draw.choice([1, 2, 9, 20]), temperature=draw.choice([0.0, 0.9]), ignore_eos=True
            )
            prompt = (draw.choice(begins) + tail)[:100]
            request = Request(prompt, sampling)
            asked[rows.submit(request)] = request
        before = set(rows.completions)
        rows.step()
        for number in set(rows.completions) - before:
            said.append((*asked[number].prompt_ids, *rows.completions[number].token_ids))
    assert any(done.cached_tokens for done in rows.completions.values())
    for number, done in rows.completions.items():
        assert list(done.token_ids) == plain_decode(target, asked[number])


def test_what_is_kept_outlives_the_buffers(target: Target, drafter: Drafter) -> None:
    engine = Engine(target, DraftProposer(target, drafter), EngineOptions(prefix_tokens=200))
    sampling = SamplingOptions(max_tokens=5, ignore_eos=True)
    engine.generate([Request(tuple(range(30)), sampling)])
    requests = [Request((*range(30 - n), 40 + n), sampling) for n in range(3)]
    done = engine.generate(requests)  # other rows, other slots
    assert [item.cached_tokens for item in done] == [30, 29, 28]
    assert [list(item.token_ids) for item in done] == [plain_decode(target, item) for item in requests]


def test_newcomers_that_would_pass_the_buffers_end_are_read_apart(target: Target) -> None:
    """One begins late by what is kept, the other has much to read: padded alike they would not fit."""
    engine = Engine(target, None, EngineOptions(max_rows=2, prefix_tokens=400))
    sampling = SamplingOptions(max_tokens=4, ignore_eos=True)
    known = tuple(torch.randint(1, 60, (90,), generator=torch.Generator().manual_seed(1)).tolist())
    engine.generate([Request(known, sampling)])
    requests = [Request((*known, 5), sampling), Request(tuple(reversed(known)), sampling)]
    done = engine.generate(requests)
    assert [item.cached_tokens for item in done] == [90, 0]
    assert [list(item.token_ids) for item in done] == [plain_decode(target, item) for item in requests]
