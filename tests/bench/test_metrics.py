"""Every definition against a slow loop that spells it out."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.bench import metrics
from slipstream.bench.metrics import Load
from slipstream.bench.records import Measured, Record


def measured(tokens=9, ttft=0.5, decode=2.0, rounds=(), started=0.0, most=3):
    """A request of so many tokens; rounds are (drafts, kept, ended)."""
    drafted, tried, accepted = metrics.by_position(rounds, most)
    return Measured(
        token_ids=tuple(range(tokens)),
        text="",
        stop_reason="length",
        started_s=started,
        ttft_s=ttft,
        decode_s=decode,
        total_s=ttft + decode,
        rounds=len(rounds),
        emitted_in_rounds=sum(kept + (not ended) for _, kept, ended in rounds),
        drafted_per_position=drafted,
        tried_per_position=tried,
        accepted_per_position=accepted,
        accepted_runs=tuple(kept for _, kept, _ in rounds),
    )


def some_records(system, seed, count=12):
    draw = random.Random(seed)
    records = []
    for number in range(count):
        rounds = [(3, draw.randint(0, 3), False) for _ in range(draw.randint(1, 9))]
        one = measured(draw.randint(2, 30), draw.random(), 1 + draw.random(), rounds)
        records.append(Record(system, "chat", f"p{number // 2}", number % 2, 0, 5, "h", "t", one))
    return records


ROUND = st.integers(0, 5).flatmap(
    lambda drafts: st.tuples(st.just(drafts), st.integers(0, drafts), st.booleans())
)


@given(st.lists(ROUND, max_size=8))
def test_by_position_is_what_each_round_says(rounds):
    rounds = [(d, k, ended and k > 0) for d, k, ended in rounds]
    drafted, tried, accepted = metrics.by_position(rounds, 5)
    for place in range(5):
        slow_drafted = slow_tried = slow_accepted = 0
        for drafts, kept, ended in rounds:
            if drafts <= place:
                continue
            slow_drafted += 1
            if place < kept:
                slow_tried += 1
                slow_accepted += 1
            elif place == kept and not ended:
                slow_tried += 1
        assert (drafted[place], tried[place], accepted[place]) == (slow_drafted, slow_tried, slow_accepted)


def test_acceptance_micro_and_macro():
    one = measured(rounds=[(3, 3, False)] * 2)  # 8 tokens in 2 rounds
    other = measured(rounds=[(3, 0, False)] * 8)  # 8 in 8
    assert metrics.micro_acceptance([one, other]) == pytest.approx(16 / 10)
    assert metrics.macro_acceptance([one, other]) == pytest.approx((4 + 1) / 2)
    assert metrics.micro_acceptance([]) == metrics.macro_acceptance([measured()]) == 1.0


def test_a_round_that_ends_the_text_has_no_bonus():
    (first, second, third) = metrics.acceptance_by_position([measured(rounds=[(3, 1, True), (3, 2, False)])])
    assert (first.drafted, first.tried, first.accepted) == (2, 2, 2)
    assert (second.drafted, second.tried, second.accepted) == (2, 1, 1)
    assert (third.drafted, third.tried, third.accepted) == (2, 1, 0)
    assert second.survived == 0.5
    assert second.conditional == 1.0


def test_conditional_rates_do_not_depend_on_how_many_drafts_there_are():
    long = [(3, 1, False)] * 4 + [(3, 0, False)] * 4
    short = [(1, 1, False)] * 4 + [(1, 0, False)] * 4
    of = [metrics.acceptance_by_position([measured(rounds=rounds)])[0] for rounds in (long, short)]
    assert of[0].conditional == of[1].conditional == 0.5


def test_lengths_of_runs():
    found = metrics.run_lengths(
        [measured(rounds=[(3, 2, False), (3, 0, False)]), measured(rounds=[(3, 2, False)])]
    )
    assert found == {0: 1, 2: 2}


def test_rates():
    both = [measured(9, 0.5, 2.0), measured(3, 1.5, 1.0)]
    assert metrics.decode_rate(both) == pytest.approx((8 + 2) / 3.0)
    assert metrics.total_rate(both) == pytest.approx(12 / 5.0)
    assert metrics.time_per_token(both[0]) == pytest.approx(0.25)
    assert metrics.time_per_token(measured(1)) is None
    assert metrics.decode_rate([]) == 0.0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=9), st.floats(0, 1))
def test_percentile_by_sorting(values, share):
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    slow = ordered[low] + (place - low) * (ordered[high] - ordered[low])
    assert metrics.percentile(values, share) == pytest.approx(slow, abs=1e-9)


def slow_interval(records, baseline, tokens, seconds):
    """Resample prompts one by one, in a loop."""
    prompts = list(dict.fromkeys(record.prompt for record in records))

    def ratio(chosen):
        sums = [0.0] * 4
        for prompt in chosen:
            for record in records:
                if record.prompt == prompt:
                    sums[0] += tokens(record.measured)
                    sums[1] += seconds(record.measured)
            for record in baseline:
                if record.prompt == prompt:
                    sums[2] += tokens(record.measured)
                    sums[3] += seconds(record.measured)
        return (sums[0] / sums[1]) / (sums[2] / sums[3])

    each = sorted(ratio([prompts[i] for i in row]) for row in metrics.resamples(len(prompts)))
    low, high = (metrics.percentile(each, share) for share in (0.025, 0.975))
    return ratio(prompts), low, high


def test_speedups_and_their_intervals(monkeypatch):
    monkeypatch.setattr(metrics, "RESAMPLES", 60)
    fast, slow = some_records("drafted", 1), some_records("plain", 2)
    pairs = metrics.paired(fast, slow)
    assert len(pairs) == 12
    found = metrics.decode_speedup(pairs)
    expected = slow_interval(fast, slow, lambda m: m.tokens - 1, lambda m: m.decode_s)
    assert (found.value, found.low, found.high) == pytest.approx(expected)
    found = metrics.total_speedup(pairs)
    expected = slow_interval(fast, slow, lambda m: m.tokens, lambda m: m.total_s)
    assert (found.value, found.low, found.high) == pytest.approx(expected)
    assert found.low < found.value < found.high


def test_only_requests_of_both_count():
    fast, slow = some_records("drafted", 1), some_records("plain", 2)
    assert len(metrics.paired(fast, slow[:5])) == 5
    assert len(metrics.paired(fast, [replace(record, repeat=1) for record in slow])) == 0


def test_the_interval_of_acceptance_holds_its_value():
    records = some_records("drafted", 3)
    found = metrics.acceptance_interval(records)
    assert found.value == pytest.approx(metrics.micro_acceptance([record.measured for record in records]))
    assert found.low <= found.value <= found.high
    assert found.certain == 1


def test_one_prompt_has_no_spread():
    found = metrics.decode_speedup(metrics.paired(some_records("a", 1)[:1], some_records("b", 2)[:1]))
    assert found.low == found.value == found.high


def test_a_load_is_seen_by_its_users_and_in_all():
    one = measured(11, 1.0, 2.0, started=0.0)
    two = measured(6, 1.0, 1.0, started=1.5)
    records = [
        Record("s", "chat", str(n), 0, 0, 5, "h", "t", m, concurrency=2) for n, m in enumerate((one, two))
    ]
    load = metrics.load_point(records)
    assert load.concurrency == 2
    assert load.interactivity == pytest.approx((10 / 2 + 5 / 1) / 2)
    assert load.throughput == pytest.approx(17 / 3.5)
    alone = metrics.load_point([replace(record, concurrency=1) for record in records])
    assert alone.throughput == pytest.approx(17 / (3.0 + 2.0)), "others had their turns in between"


def slow_frontier(loads):
    kept = [
        load
        for load in loads
        if not any(
            (o.interactivity >= load.interactivity and o.throughput > load.throughput)
            or (o.interactivity > load.interactivity and o.throughput >= load.throughput)
            for o in loads
        )
    ]
    return sorted({(load.interactivity, load.throughput) for load in kept})


LOADS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6).map(
    lambda pairs: [Load(n, float(x), float(y)) for n, (x, y) in enumerate(pairs)]
)


@given(LOADS, st.floats(0, 10))
def test_throughput_at_an_interactivity(loads, x):
    line = slow_frontier(loads)
    assert [(load.interactivity, load.throughput) for load in metrics.frontier(loads)] == line
    found = metrics.throughput_at(loads, x)
    if x > line[-1][0]:
        assert found is None
        return
    if x <= line[0][0]:
        assert found == line[0][1]
        return
    for (x0, y0), (x1, y1) in itertools.pairwise(line):
        if x0 <= x <= x1:
            assert found == pytest.approx(y0 + (x - x0) / (x1 - x0) * (y1 - y0))


def test_matched_interactivity_gives_every_ratio():
    plain = [Load(1, 10.0, 10.0), Load(4, 6.0, 24.0)]
    fast = [Load(1, 20.0, 20.0), Load(4, 8.0, 32.0)]
    found = metrics.matched(fast, plain)
    assert found[0].interactivity == 8.0  # the lowest that both were measured at
    assert found[-1].interactivity == 10.0  # the baseline gives no more
    assert found[0].ratio == pytest.approx(32 / 17)
    assert found[-1].ratio == pytest.approx((32 - 2) / 10)
    for point in found:
        slow_plain = 10 + (10 - point.interactivity) / 4 * 14
        slow_fast = 20 + (20 - point.interactivity) / 12 * 12
        assert point.ratio == pytest.approx(slow_fast / slow_plain)
    assert metrics.matched(fast, [Load(1, 2.0, 2.0)]) == ()
    assert metrics.matched(fast, []) == ()


@pytest.mark.parametrize("seed", range(10))
def test_run_lengths_from_totals_by_position(seed):
    """A server that tells totals alone gives the same histogram as rounds one by one."""
    draw, most = random.Random(seed), 1 + seed % 6
    kept = [draw.randint(0, most) for _ in range(30)]
    drafted, tried, accepted = metrics.by_position([(most, one, False) for one in kept], most)
    totals = replace(
        measured(),
        rounds=len(kept),
        drafted_per_position=drafted,
        tried_per_position=tried,
        accepted_per_position=accepted,
        accepted_runs=(),
    )
    assert metrics.run_lengths([totals]) == metrics.run_lengths([replace(totals, accepted_runs=tuple(kept))])


def test_a_slow_start_is_twice_as_dear_as_anything_later():
    even = [measured(tokens=9, ttft=0.5, decode=2.0) for _ in range(8)]
    for factor, found in ((1.9, 0), (2.1, 1)):
        first = replace(even[0], total_s=even[0].total_s * factor)
        assert metrics.slow_start([first, *even[1:]], even) == found
        assert metrics.slow_start(even, [first, *even[1:]]) == 0, "the other one was slow"
    slow = replace(even[0], total_s=100.0)
    assert metrics.slow_start([slow, slow, *even[2:]], even) == 2
    assert metrics.slow_start([slow, *even[1:5]], even[:5]) == 0, "too few later ones"
    assert metrics.slow_start([even[0], slow, *even[2:]], even) == 0, "a stall in the middle"
    assert metrics.slow_start([slow, *even[1:]], [slow, *even[1:]]) == 0, "a harder prompt, for both"


@pytest.mark.parametrize("seed", range(30))
def test_acceptance_that_differs_by_prompt_is_no_slow_start(seed):
    """A prompt on which nothing is kept costs six times as much per token as others, but not per round."""
    draw = random.Random(seed)
    plain, drafted = [], []
    for number in range(8):
        kept = 0 if number == 0 else 5
        rounds = 60 // (kept + 1)
        spent = (rounds + 1) * 0.03 * draw.uniform(0.9, 1.1)
        plain.append(replace(measured(tokens=61), rounds=60, total_s=61 * 0.02))
        drafted.append(replace(measured(tokens=61), rounds=rounds, total_s=spent))
    assert metrics.slow_start(drafted, plain) == 0
