"""Each way to mislead is found; an honest file has no mark."""

from dataclasses import replace

import pytest

from slipstream.bench.marks import between, find_marks
from slipstream.bench.records import Divergence, Results
from tests.bench.test_records import MEASURED, RECORD, RUN

HONEST = replace(RUN, sampling={"temperature": 0.0, "max_tokens": 128})


def results(change=lambda record: record, run=HONEST, count=20):
    plain = replace(RECORD, system="plain", divergence=None, measured=replace(MEASURED, rounds=0))
    drafted = replace(RECORD, divergence=None)
    records = []
    for number in range(count):
        records.append(replace(plain, prompt=str(number), prompt_hash=str(number)))
        records.append(change(replace(drafted, prompt=str(number), prompt_hash=str(number))))
    return Results((run,), tuple(records))


def measured(**changes):
    return lambda record: replace(record, measured=replace(record.measured, **changes))


def test_an_honest_file_has_no_marks():
    assert find_marks(results()) == ()


@pytest.mark.parametrize(
    ("change", "kind", "words"),
    [
        (lambda r: replace(r, divergence=Divergence(3, 2.0, 0.1, False)), "stop", "differ"),
        (lambda r: replace(r, divergence=Divergence(3, 0.01, 0.1, True)), "note", "equal up to rounding"),
        (lambda r: replace(r, template_hash="x"), "stop", "different chat templates"),
        (lambda r: replace(r, marks=("random-tokens",)), "stop", "random tokens"),
        (lambda r: replace(r, warm=False), "stop", "without a warm-up"),
        (measured(past_end=3), "note", "past the end of 20 texts"),
        (measured(cached_tokens=3), "stop", "prefix cache"),
        (measured(accepted_per_position=(2,)), "stop", "synthetic"),
        (measured(emitted_in_rounds=9), "stop", "synthetic"),
    ],
)
def test_marks_of_records(change, kind, words):
    (mark,) = find_marks(results(change))
    assert mark.kind == kind
    assert words in mark.text


@pytest.mark.parametrize(
    ("run", "kind", "words"),
    [
        (replace(HONEST, sampling={"ignore_eos": True}), "note", "ignore_eos"),
        (replace(HONEST, sampling={"max_tokens": 32}), "note", "cut at 32"),
        (replace(HONEST, marks=("Synthetic acceptance is switched on.",)), "stop", "switched on"),
        (replace(HONEST, marks=("2 prompts are left out.",)), "note", "left out"),
        (
            replace(
                HONEST,
                sampling={"temperature": 0.7},
                sides=(HONEST.sides[0], replace(HONEST.sides[1], exact=False)),
            ),
            "note",
            "noise of their own",
        ),
    ],
)
def test_marks_of_runs(run, kind, words):
    (mark,) = find_marks(results(run=run))
    assert mark.kind == kind
    assert words in mark.text


def test_few_prompts_are_a_note_and_stops_come_first():
    found = find_marks(results(measured(cached_tokens=1), count=19))
    assert [mark.kind for mark in found] == ["stop", "note"]
    assert "Fewer than 20 prompts: chat (19)" in found[1].text


@pytest.mark.parametrize("cold", ["plain", "drafted"])
@pytest.mark.parametrize("first", [1, 2, 3, 4])
def test_a_cold_side_is_found_by_its_times(cold, first):
    """Nobody says so: the first requests of one side take seconds more than the others."""

    def change(number, record):
        spent = 3.0 + 0.1 * (number % 3) + (4.0 if record.system == cold and number < first else 0.0)
        return replace(record, measured=replace(record.measured, total_s=spent))

    made = results()
    records = [change(int(item.prompt), item) for item in made.records]
    marks = find_marks(replace(made, records=tuple(records)))
    if first == 4:
        assert marks == (), "as many are no start"
        return
    (mark,) = marks
    assert mark.kind == "stop"
    assert mark.text.startswith(f"{cold} took at least twice as long for its first {first} of 20 requests")


def test_two_files():
    assert between(results(), results()) == ()
    other = results(run=replace(HONEST, target={"name": "other"}), count=10)
    texts = [mark.text for mark in between(results(), other)]
    assert texts == ["The two files have different targets.", "Only 10 of 20 prompts are in both files."]


def test_a_mean_that_a_server_states_is_not_passed_off_as_a_count():
    (mark,) = find_marks(results(measured(rounds=0, emitted_in_rounds=0, stated_acceptance=3.25)))
    assert mark.kind == "note"
    assert "3.25 tokens per round as a mean over all that it has served" in mark.text
