"""First words of user turns: what a turn becomes, how they are drawn, what they must not be."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from slipstream.data.bundled import BUNDLED, bundled_turns
from slipstream.data.openings import Opening, draw_opening, openings


@pytest.mark.parametrize(
    ("text", "whole", "turn"),
    [
        (" One two. Three", True, "Sum up: One two. Three"),
        (" One two. Three", False, "Sum up: One two."),
        (' He said "no!" and', False, 'Sum up: He said "no!"'),
        ("\n- a\n- b\n- c", False, "Sum up:\n- a\n- b"),
        (" version 2.0 of it", False, None),
        (" ", True, None),
        ("", False, None),
    ],
)
def test_a_turn_is_whole_or_ends_with_a_sentence(text: str, whole: bool, turn: str | None) -> None:
    assert Opening("summarise", "Sum up:").filled(text, whole) == turn


def test_what_follows_a_passage_is_added() -> None:
    opening = Opening("code", "```python\nimport", "\n```\n\nWhat is it?")
    assert opening.filled(" os\n", True) == "```python\nimport os\n```\n\nWhat is it?"


def test_kinds_are_equally_frequent_and_the_share_is_kept() -> None:
    drawn = [draw_opening(random.Random(seed), 0.5, later=False) for seed in range(6000)]
    kinds = Counter(opening.kind for opening in drawn if opening)
    assert abs(sum(kinds.values()) - 3000) < 200
    assert len(kinds) == 10
    assert min(kinds.values()) > 200
    assert all(opening.later for seed in range(50) if (opening := draw_opening(random.Random(seed), 1, True)))
    assert draw_opening(random.Random(0), 0.0, later=False) is None


def test_they_are_distinct_and_do_not_begin_with_a_space_or_end_with_one() -> None:
    begins = [(opening.later, opening.begin) for opening in openings()]
    assert len(set(begins)) == len(begins) > 100
    assert not any(begin != begin.strip(" ") for _, begin in begins)


def test_no_bundled_prompt_is_given_away() -> None:
    """What is measured with must not be trained on; a few common first words are all they may share."""
    for workload in BUNDLED:
        for _, turns in bundled_turns(workload):
            shared = [o.begin for o in openings() if turns[0].startswith(o.begin)]
            assert all(len(begin) < 60 for begin in shared)
            assert not any(o.end and turns[0].endswith(o.end.strip()) for o in openings())
