"""What rounds cost: learned, bounded by other sizes, kept between runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.decode.round_cost import RoundCosts, bucket


def test_rows_are_told_apart_while_one_more_matters() -> None:
    assert [bucket(rows) for rows in (1, 7, 8, 9, 12, 13, 32, 33, 65)] == [1, 7, 8, 12, 12, 16, 32, 64, 128]


def test_a_slow_round_counts_little_and_a_fast_one_at_once() -> None:
    costs = RoundCosts()
    for took in (1.0, 100.0):
        costs.note(1, 3, took)
    assert costs.seen(1, 3) == pytest.approx(1.0 + 0.15 * 0.5)
    costs.note(1, 3, 0.5)
    assert costs.seen(1, 3) == 0.5


def test_the_cost_lies_on_a_line_between_sizes_and_within_bounds_of_other_rows() -> None:
    costs = RoundCosts()
    for rows, drafts, took in ((16, 0, 1.0), (16, 3, 4.0), (16, 7, 8.0), (4, 3, 2.0), (12, 0, 0.9)):
        costs.note(rows, drafts, took)
    assert costs.estimate(16, (0, 1, 3, 5, 7)) == [1.0, 4.0, 4.0, 6.0, 8.0]
    # Twelve rows of sixteen: at least three quarters of the time, and no less than four rows.
    assert costs.estimate(12, (0, 3, 7)) == [0.9, 3.0, 6.0]
    assert costs.estimate(4, (7,)) == [2.0]
    assert costs.least(12, 3) == 3.0
    assert costs.least(32, 7) == 8.0
    assert costs.least(1, 7) == 0.5
    assert RoundCosts().least(1, 0) is None
    assert RoundCosts().estimate(1, (0, 7)) == [1.0, 1.0]


def test_a_round_takes_no_longer_than_a_larger_one() -> None:
    costs = RoundCosts()
    for rows, drafts, took in ((7, 0, 9.0), (8, 0, 2.0), (8, 3, 4.0), (6, 0, 1.5), (8, 7, 3.5)):
        costs.note(rows, drafts, took)
    assert costs.seen(7, 0) == 2.0
    assert costs.estimate(7, (0,)) == [2.0]
    assert costs.estimate(8, (0, 3, 7)) == [2.0, 3.5, 3.5]
    assert costs.estimate(6, (0,)) == [1.5]
    assert costs.seen(7, 3) is None


def test_a_first_time_is_not_sure(tmp_path: Path) -> None:
    costs = RoundCosts(tmp_path / "costs.json")
    costs.note(5, 0, 1.0)
    assert not costs.sure(5, 0)
    assert not costs.sure(4, 0)
    costs.note(5, 0, 1.0)
    assert costs.sure(5, 0)
    costs.keep()
    again = RoundCosts(tmp_path / "costs.json")
    assert again.sure(5, 0), "an earlier run knows it"
    again.note(5, 0, 3.0)
    assert not again.sure(5, 0)


def test_times_are_kept_and_what_is_seen_later_counts_more(tmp_path: Path) -> None:
    path = tmp_path / "rounds" / "costs.json"
    costs = RoundCosts(path)
    costs.note(9, 3, 0.25)
    costs.keep()
    again = RoundCosts(path)
    assert again.seen(12, 3) == 0.25
    written = path.stat().st_mtime_ns
    again.note(12, 3, 0.26)
    again.keep()
    assert path.stat().st_mtime_ns == written, "a small move is not worth a write"
    later = RoundCosts(path)
    later.note(12, 3, 5.0)
    assert later.seen(12, 3) == 5.0
    later.keep()
    assert RoundCosts(path).seen(12, 3) == 5.0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"seconds": [[1, 2]]}', '{"seconds": [[1, 0, -1]]}', "null"]
)
def test_a_damaged_file_is_as_good_as_none(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    costs = RoundCosts(path)
    assert costs.seconds == {}
    costs.note(1, 0, 1.0)
    costs.keep()
    assert json.loads(path.read_text()) == {"seconds": [[1, 0, 1.0]]}


def test_where_nothing_can_be_written_nothing_is_kept(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    costs = RoundCosts(tmp_path / "file" / "costs.json")
    costs.note(1, 0, 1.0)
    costs.keep()
    assert costs.seen(1, 0) == 1.0
