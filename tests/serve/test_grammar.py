"""What a guide answers depends on the text alone, not on what else its parser was asked."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import llguidance
import pytest

from slipstream.core.errors import GrammarError
from slipstream.core.options import SamplingOptions
from slipstream.serve import grammar
from slipstream.serve.grammar import Grammars, ParserGuide, _schema_grammar
from tests.serve.conftest import load

HELLO = [{"role": "user", "content": "hello"}]
#: Needs a new state for every last few letters.
HARD = {"type": "string", "pattern": "^(a|b)*a(a|b){0,14}$"}


@pytest.fixture(scope="module")
def make(folders):
    target = load(folders).target
    grammars = Grammars(target)

    def guide(states=None, form=HARD, limits=None):
        if states is not None:
            limits = llguidance.LLParserLimits(max_lexer_states=states)
        info = target.info
        ends = info.eos_token_ids
        return ParserGuide(grammars._tokenizer, _schema_grammar(form), ends, info.vocab_size, limits)

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


def test_a_parser_that_gives_up_says_why_and_stands_where_it_stood(make):
    guide, ids = make
    text = ids('"a')
    bounded = guide(5)
    for token in text:
        assert bounded.accept(token)
    for _ in range(2):
        with pytest.raises(GrammarError, match="too many states"):
            bounded.mask()
    bounded.back(1)
    assert bounded.mask() == walked(guide(), text)[1]


def only(name, schema):
    return {
        "type": "object",
        "properties": {name: schema},
        "required": [name],
        "additionalProperties": False,
    }


#: Behind "a" there are so many ways to go on that a parser with the limit below gives up; not behind "b".
WIDE = {"anyOf": [{"type": "array", "items": {"const": number}} for number in range(9)]}
FORKED = {"anyOf": [only("b", {"type": "integer"}), only("a", WIDE)]}
FEW = llguidance.LLParserLimits(max_items_in_row=3)


def test_a_parser_that_gives_up_on_a_draft_goes_on_with_the_text(make):
    guide, ids = make
    bounded = guide(form=FORKED, limits=FEW)
    right = walked(guide(form=FORKED), ids('{"b": 12}'))
    assert walked(bounded, ids('{"')) == right[:3]
    *drafts, last = ids('a": ')
    walked(bounded, drafts)
    for _ in range(2):
        with pytest.raises(GrammarError, match="max is 3"):
            bounded.accept(last)
    bounded.back(len(drafts))
    assert walked(bounded, ids('b": 12}')) == right[2:]


def test_a_text_whose_parser_gives_up_fails_alone(server, alone, monkeypatch):
    monkeypatch.setattr(grammar, "ParserGuide", partial(ParserGuide, limits=FEW))
    sampling = {"temperature": 0.7, "seed": 5, "max_tokens": 60}
    right = alone.generate(HELLO, SamplingOptions(**sampling, ignore_eos=True))
    bound = {"response_format": {"type": "json_schema", "json_schema": {"name": "f", "schema": FORKED}}}
    a, b = alone.target.tokenizer.encode("ab", add_special_tokens=False)
    asked = {
        "gives up": bound | {"logit_bias": {a: 50}},
        "goes on": bound | {"logit_bias": {b: 50}},
        "the same": bound | {"logit_bias": {b: 50}, "draft": False},
        "free": {"ignore_eos": True},
    }
    with ThreadPoolExecutor(4) as pool:
        calls = {name: pool.submit(server.chat, **sampling, **fields) for name, fields in asked.items()}
        answers = {name: call.result() for name, call in calls.items()}
    failed = answers.pop("gives up")
    assert failed.status_code == 500
    assert "max is 3" in failed.json()["error"]["message"]
    said = {name: answer.json()["choices"][0]["message"]["content"] for name, answer in answers.items()}
    assert said["goes on"] == said["the same"]
    assert said["goes on"].startswith('{"b": ')
    assert said["free"] == right.text
    assert server.service.worker.load.faults == 0
