"""What a guide answers depends on the text alone, not on what else its parser was asked."""

from __future__ import annotations

import llguidance
import pytest

from slipstream.serve.grammar import Grammars, ParserGuide, _schema_grammar
from tests.serve.conftest import load

#: Needs a new state for every last few letters.
HARD = {"type": "string", "pattern": "^(a|b)*a(a|b){0,14}$"}


@pytest.fixture(scope="module")
def make(folders):
    target = load(folders).target
    grammars = Grammars(target)

    def guide(states=None):
        limits = None if states is None else llguidance.LLParserLimits(max_lexer_states=states)
        info = target.info
        ends = info.eos_token_ids
        return ParserGuide(grammars._tokenizer, _schema_grammar(HARD), ends, info.vocab_size, limits)

    def ids(text):
        return target.tokenizer.encode(text, add_special_tokens=False)

    return guide, ids


def walked(guide, tokens):
    """Masks before each token and after the last."""
    masks = [guide.mask()]
    for token in tokens:
        assert guide.accept(token)
        masks.append(guide.mask())
    return masks


def test_drafts_do_not_use_up_what_the_text_needs(make):
    guide, ids = make
    text = ids('"abababab')
    right = walked(guide(), text)
    bounded = guide(80)
    for place, token in enumerate(text):
        assert bounded.mask() == right[place]
        for draft in ("aabbaabbab", "bbaabababb", "abbbbaaaba", "babbbaaabb"):
            drafts = ids(draft if place else f'"{draft}')
            taken = 0
            for token_ahead in drafts:
                bounded.mask()
                if not bounded.accept(token_ahead):
                    break
                taken += 1
            bounded.back(taken)
        assert bounded.accept(token)
    assert bounded.mask() == right[-1]
    assert not bounded.failure


def test_a_grammar_that_is_too_hard_ends_the_text_and_says_why(make):
    guide, ids = make
    text = ids('"a')
    bounded = guide(5)
    for token in text:
        assert bounded.accept(token)
    end = bounded.mask()
    assert "too many states" in bounded.failure
    assert sum(byte.bit_count() for byte in end) == 1
    assert not bounded.accept(text[-1])
    bounded.back(1)
    assert not bounded.failure
    assert bounded.mask() == walked(guide(), text)[1]
