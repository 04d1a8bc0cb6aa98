"""Prompt lookup: what it drafts, against a slow search; and that the text stays the same."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import Engine
from slipstream.decode.lookup import LookupProposer, TextIndex
from slipstream.testing import tiny_target


def slow_continuation(text, longest, count):
    """Search backwards for the longest end of the text."""
    for n in range(min(longest, len(text)), 0, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                found = []
                while len(found) < count:
                    place = start + n + len(found)
                    found.append(text[place] if place < len(text) else found[place - len(text)])
                return found
    return []


@given(st.lists(st.integers(0, 3), max_size=14), st.integers(1, 4), st.integers(1, 6))
def test_a_continuation_is_what_a_search_finds(text, longest, count):
    index = TextIndex(longest)
    index.extend(text)
    assert index.continuation(count) == slow_continuation(text, longest, count)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafts", ["auto", "max"])
def test_the_text_stays_the_same_in_a_batch(temperature, drafts):
    target = tiny_target()
    requests = [
        Request(
            [n, n + 1, n + 2, n, n + 1], SamplingOptions(temperature, seed=n, max_tokens=24, ignore_eos=True)
        )
        for n in (3, 9, 21)
    ]
    options = EngineOptions(max_rows=2, drafts=drafts)  # the third takes over a row
    plain = Engine(target, None, options).generate(requests)
    looked_up = Engine(target, LookupProposer(5), options).generate(requests)
    assert [c.token_ids for c in looked_up] == [c.token_ids for c in plain]


def test_what_repeats_is_accepted():
    target = tiny_target()
    bias = dict.fromkeys((7,), 50.0)
    request = Request([5, 6, 5], SamplingOptions(logit_bias=bias, max_tokens=20, ignore_eos=True))
    (done,) = Engine(target, LookupProposer(5), EngineOptions(drafts="max")).generate([request])
    assert set(done.token_ids) == {7}
    assert done.acceptance_length > 3


def test_pieces_say_how_many_drafts_a_round_had():
    target = tiny_target()
    request = Request([5, 6, 5], SamplingOptions(max_tokens=9, ignore_eos=True))
    pieces = list(Engine(target, LookupProposer(5), EngineOptions(drafts=3)).stream(request))
    assert [piece.drafts for piece in pieces] == [0, *[3] * (len(pieces) - 1)]
