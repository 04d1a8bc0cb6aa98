"""Text as it comes: whole characters only, stop strings anywhere, nothing lost."""

from __future__ import annotations

import pytest

from slipstream.core.options import SamplingOptions
from slipstream.core.records import Piece, Request
from slipstream.decode.stopping import Tracker
from slipstream.decode.text import Detokenizer
from slipstream.testing import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = "naïve 你好 👩‍🚀 – ok"


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False).input_ids


def track(tokens: list[int], cuts: list[int], **sampling: object) -> tuple[Tracker, list[Piece]]:
    """Feed tokens in rounds of the given sizes; the last token of each round is the bonus."""
    request = Request([1], SamplingOptions(max_tokens=500, **sampling))  # type: ignore[arg-type]
    tracker = Tracker(0, request, 500, frozenset({0}), 16, TOKENIZER)
    pieces = [tracker.first(tokens[0], 0.0)]
    at = 1
    while at < len(tokens) and tracker.finish_reason is None:
        size = cuts[(len(pieces) - 1) % len(cuts)]
        pieces.append(tracker.round(tokens[at : at + size], 0.0, size - 1))
        at += size
    return tracker, pieces


@pytest.mark.parametrize("cuts", [[1], [2], [3], [5, 1, 2], [16]])
def test_characters_are_never_split(cuts: list[int]) -> None:
    tracker, pieces = track([*ids_of(TEXT), 0], cuts)
    assert tracker.finish_reason == "stop"
    assert "".join(piece.text for piece in pieces) == TEXT == tracker.completion().text
    for piece in pieces:
        assert "\ufffd" not in piece.text
        assert "".join(text for text, _ in piece.spans) == piece.text


def test_spans_follow_the_drafts() -> None:
    _, pieces = track([*ids_of("abcdef"), 0], [3])
    assert pieces[0].spans == (("a", False),)
    assert pieces[1].spans == (("bc", True), ("d", False))
    assert pieces[1].accepted == 2


def test_an_unfinished_character_is_shown_at_the_end() -> None:
    broken = ids_of("a你")[:-1]
    detokenizer = Detokenizer(TOKENIZER)
    assert "".join(detokenizer.add(token) for token in broken) == "a"
    assert detokenizer.finish() == "\ufffd"
    _, pieces = track([*broken, 0], [4])
    assert "".join(piece.text for piece in pieces) == "a\ufffd"


def test_special_tokens_give_no_text() -> None:
    detokenizer = Detokenizer(TOKENIZER)
    assert [detokenizer.add(token) for token in (*ids_of("x"), 0, *ids_of("y"))] == ["x", "", "y"]


@pytest.mark.parametrize("cuts", [[1], [2], [3], [4], [7], [16]])
@pytest.mark.parametrize("stop", ["好", "lo wor", "d!", "h", "xyz"])
def test_stop_strings_end_the_text_wherever_they_fall(stop: str, cuts: list[int]) -> None:
    text = "hello world! 你好 end"
    tokens = ids_of(text)
    tracker, pieces = track([*tokens, 0], cuts, stop=(stop, "never said"))
    expected = text.partition(stop)[0]
    assert "".join(piece.text for piece in pieces) == expected
    assert tracker.finish_reason == "stop"
    if stop in text:
        # Token ids end with the token that completes the stop string.
        until = len(ids_of(expected + stop))
        assert tracker.token_ids == tokens[:until]
    for piece in pieces:
        assert expected.startswith(piece.text) or piece.text in expected


def test_the_earliest_stop_string_wins() -> None:
    _, pieces = track([*ids_of("one two three"), 0], [16], stop=("three", "two"))
    assert "".join(piece.text for piece in pieces) == "one "


def test_held_text_comes_out_when_it_was_no_stop_after_all() -> None:
    _, pieces = track([*ids_of("aab"), *ids_of("c"), 0], [1], stop=("aax", "bd"))
    assert [piece.text for piece in pieces] == ["", "", "aa", "bc", ""]


def test_stop_strings_wait_for_min_tokens() -> None:
    tracker, _ = track([*ids_of("abcabc"), 0], [1], stop=("b",), min_tokens=4)
    assert tracker.token_ids == ids_of("abcab")
    assert tracker.completion().text == "abca"


def test_without_a_tokenizer_there_is_no_text() -> None:
    detokenizer = Detokenizer(None)
    assert detokenizer.add(5) == ""
    assert detokenizer.finish() == ""
