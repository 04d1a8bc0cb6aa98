"""The choice of the draft length: on recorded traces with a simulated clock, and inside the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.draft_length import DraftLength
from slipstream.decode.plain import plain_decode
from slipstream.model import Drafter
from slipstream.target import Target

#: Right drafts after every answer token of held-out chats, by an early bundled drafter; blocks of 8.
TRACES = [
    [int(digit) for digit in line] for line in Path(__file__).with_name("traces.txt").read_text().splitlines()
]
MOST = 7
#: Relative cost of a round by drafts: verification nearly free, bound by computing, and hopeless.
COSTS = {
    "free": [1.0, 1.42, 1.45, 1.48, 1.51, 1.54, 1.57, 1.60],
    "computing": [1.0, 1.5, 1.7, 1.9, 2.1, 2.3, 2.5, 2.7],
    "cheap": [1.0, 1.1, 1.12, 1.14, 1.16, 1.18, 1.2, 1.22],
    "hopeless": [1.0, 4.0, 4.1, 4.2, 4.3, 4.4, 4.5, 4.6],
}


def seconds_of(
    traces: Sequence[list[int]], cost: Sequence[float], lengths: DraftLength, noise: float
) -> float:
    """The simulated time that some chats take, one after another."""
    draw, clock = random.Random(0), 0.0
    for number, trace in enumerate(traces):
        at = 0
        while at < len(trace):
            drafts = lengths.choose([number])
            accepted = min(trace[at], drafts)
            took = cost[drafts] * (1 + noise * draw.random())
            clock += took
            lengths.note({number: accepted}, drafts, took)
            at += accepted + 1
        lengths.forget(number)
    return clock


def mixed(share: float) -> list[list[int]]:
    """Chats like the recorded ones whose drafts are wrong more, or less, often."""
    draw = random.Random(7)

    def changed(right: int) -> int:
        if share < 0:
            return 0 if draw.random() < -share else right
        return MOST if draw.random() < share else right

    return [[changed(right) for right in trace] for trace in TRACES]


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("share", [-1.0, -0.4, 0.0, 0.3, 1.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_it_is_near_the_best_fixed_length_and_never_much_below_plain(
    cost: str, share: float, noise: float
) -> None:
    traces = mixed(share) * 3
    fixed = {k: seconds_of(traces, COSTS[cost], DraftLength(MOST, k), noise) for k in range(MOST + 1)}
    chosen = seconds_of(traces, COSTS[cost], DraftLength(MOST), noise)
    assert chosen < 1.03 * min(fixed.values())
    assert chosen < 1.03 * fixed[0]


def test_it_parks_where_drafts_are_wrong_and_comes_back_when_they_are_right() -> None:
    cost, lengths = COSTS["free"], DraftLength(MOST)

    def share_drafted(trace: list[int]) -> float:
        used, at = [], 0
        while at < len(trace):
            drafts = lengths.choose([0])
            accepted = min(trace[at], drafts)
            lengths.note({0: accepted}, drafts, cost[drafts])
            used.append(drafts)
            at += accepted + 1
        return sum(drafts > 0 for drafts in used[-200:]) / len(used[-200:])

    assert share_drafted([0] * 600) < 0.1
    assert share_drafted([7] * 4000) > 0.9
    assert share_drafted([0] * 600) < 0.1


@pytest.mark.parametrize(("left", "drafts"), [(200, True), (6, False)])
def test_drafting_again_must_be_worth_what_has_to_be_read_first(left: int, drafts: bool) -> None:
    """Drafts are always right, but the drafter has 100 tokens to read, which takes ten plain rounds."""
    lengths = DraftLength(MOST)
    for _ in range(2):
        lengths.read(100, 10.0)
    lengths.costs.seconds = {(1, size): 1.0 + 0.5 * bool(size) for size in lengths.sizes}
    lengths._current = 0
    lengths._common.hits[:] = 0.99
    assert (lengths.choose([0], [left], waiting=100) > 0) == drafts
    # With nothing to read it drafts in any case.
    assert lengths.choose([1], [left]) > 0


def test_looks_are_rarer_where_much_has_to_be_read() -> None:
    def looks(waiting: int) -> int:
        lengths, found = DraftLength(MOST), 0
        for seconds in (900.0, 0.02):  # the first time is not believed
            lengths.read(1, seconds)
        for _ in range(2000):
            drafts = lengths.choose([0], [1000], waiting)
            found += drafts > 0
            lengths.note({0: 0}, drafts, COSTS["free"][drafts])
        return found

    assert 2 < looks(100) < looks(0) / 2


def test_a_batch_gets_what_pays_for_all_of_it() -> None:
    """Rounds of many rows cost more per draft; a few good rows do not make up for it."""
    lengths = DraftLength(MOST)
    for _ in range(300):
        drafts = lengths.choose(range(8))
        took = 1.0 + 0.5 * drafts
        lengths.note({row: min(drafts, 2 if row == 0 else 0) for row in range(8)}, drafts, took)
    assert lengths.choose(range(8)) == 0
    for _ in range(100):
        drafts = lengths.choose([0])
        lengths.note({0: min(drafts, 2)}, drafts, 1.0 + 0.05 * drafts)
    assert lengths.choose([0]) >= 2


def streams_seconds(streams: int, lengths: DraftLength, slow_first: float = 1.0) -> float:
    """The simulated time of twice as many chats as streams, on a CPU whose rounds are bound by computing.

    The controller is told that the first round of every size took `slow_first` times as long.
    """
    seen = set[tuple[int, int]]()
    waiting, running, clock = list(enumerate((TRACES * 4)[: 2 * streams])), {}, 0.0
    lengths.begin()
    while waiting or running:
        while waiting and len(running) < streams:
            number, trace = waiting.pop(0)
            running[number] = trace
        drafts = lengths.choose(list(running))
        accepted = {number: min(trace[0], drafts) for number, trace in running.items()}
        rows = len(running)
        took = 7 + 0.4 * rows if not drafts else 8 + 0.63 * rows * (drafts + 1)
        clock += took
        first = (rows, drafts) not in seen
        seen.add((rows, drafts))
        lengths.note(accepted, drafts, took * (slow_first if first else 1.0))
        for number, right in accepted.items():
            running[number] = running[number][right + 1 :]
            if not running[number]:
                del running[number]
                lengths.forget(number)
    return clock


@pytest.mark.parametrize("streams", [1, 2, 4, 8, 16, 32])
def test_streams_that_come_and_go_are_nowhere_much_slower_than_plain(streams: int) -> None:
    """Every number of rows on the way has a cost of its own that is learned at first."""
    plain, lengths = streams_seconds(streams, DraftLength(MOST, 0)), DraftLength(MOST)
    assert streams_seconds(streams, lengths) < 1.05 * plain
    assert streams_seconds(streams, lengths) < 1.02 * plain


@pytest.mark.parametrize("streams", [1, 2, 4, 8, 16, 32])
def test_first_times_that_hold_more_than_a_round_do_not_last(streams: int) -> None:
    """They hold the making of buffers, say; a size that looks dear by that must get another chance."""
    plain, lengths = streams_seconds(streams, DraftLength(MOST, 0)), DraftLength(MOST)
    streams_seconds(streams, lengths, 5.0)
    assert streams_seconds(streams, lengths) < 1.03 * plain


@pytest.mark.parametrize("seed", range(4))
def test_any_choice_gives_the_same_text_and_the_same_context(
    target: Target, drafter: Drafter, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After rounds without drafts the drafter has seen what it has missed."""
    draw = random.Random(seed)
    requests = [
        Request(
            tuple(draw.randrange(1, 60) for _ in range(draw.choice([2, 9, 30]))),
            SamplingOptions(max_tokens=draw.choice([40, 90]), temperature=0.8, seed=n, ignore_eos=True),
        )
        for n in range(5)
    ]
    proposer = DraftProposer(target, drafter)
    engine = Engine(target, proposer, EngineOptions(max_rows=2))
    monkeypatch.setattr(engine._draft_length, "choose", lambda *told: draw.choice([0, 0, 0, 1, 5]))
    done = engine.generate(requests)
    for request, completion in zip(requests, done, strict=True):
        assert list(completion.token_ids) == plain_decode(target, request)
        assert 0 < completion.parked < completion.rounds
        assert 0 < completion.drafts_mean < 5
    last = Engine(target, proposer, EngineOptions(drafts=3)).generate(requests[-1:])[0]
    assert last.parked == 0
    assert last.drafts_mean == 3

    def context(drafts: int | None) -> list[torch.Tensor]:
        fresh = DraftProposer(target, drafter)
        sole = Engine(target, fresh, EngineOptions(drafts=0 if drafts is None else drafts))
        if drafts is None:
            monkeypatch.setattr(sole._draft_length, "choose", lambda *told: draw.choice([0, 0, 0, 1, 5]))
        length = len(sole.generate(requests[:1])[0].token_ids) + len(requests[0].prompt_ids) - 6
        pairs = (fresh._work.context.read(layer, length) for layer in range(2))
        return [tensor for pair in pairs for tensor in pair]

    for mine, other in zip(context(None), context(5), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_drafts_from_some_tokens_alone_leave_the_text_as_it_is(
    target: Target, drafter: Drafter, acceptor: str
) -> None:
    drafter = deepcopy(drafter)
    drafter.draft_vocabulary = torch.tensor([1, 4, 9, 16, 25, 36, 49])
    requests = [
        Request((3, n), SamplingOptions(max_tokens=30, temperature=t, seed=n, ignore_eos=True))
        for n, t in ((1, 0.0), (2, 0.0), (3, 0.9 * (acceptor == "match")))
    ]
    options = EngineOptions(drafts="max", acceptor=acceptor)  # type: ignore[arg-type]
    done = Engine(target, DraftProposer(target, drafter), options).generate(requests)
    for request, completion in zip(requests, done, strict=True):
        assert list(completion.token_ids) == plain_decode(target, request)


def test_a_number_that_no_block_holds_is_refused(target: Target, drafter: Drafter) -> None:
    with pytest.raises(InputError, match="drafts 6 are more than the 5"):
        Engine(target, DraftProposer(target, drafter), EngineOptions(drafts=6))
    with pytest.raises(InputError, match="drafts must be at least 0"):
        EngineOptions(drafts=-1)
