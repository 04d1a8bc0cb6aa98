"""Tool calls and JSON: parsed from what is said, enforced where asked, the same with drafts and without."""

from __future__ import annotations

import json
import random
from itertools import pairwise

import pytest

from slipstream.serve.tools import ToolReader

CALL = '<tool_call>\n{"name": "find", "arguments": {"q": "ä"}}\n</tool_call>'
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"q": {"enum": ["x", "yes"]}},
                "required": ["q"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("find", "get")
]


def read(text, cuts, most=None):
    reader = ToolReader(most)
    places = [0, *sorted(cuts), len(text)]
    deltas = [d for a, b in pairwise(places) for d in reader.feed(text[a:b])]
    deltas += reader.feed("", last=True)
    said = "".join(delta.get("content", "") for delta in deltas)
    return said, [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]


@pytest.mark.parametrize("seed", range(20))
def test_calls_are_found_however_the_text_is_cut(seed):
    draw = random.Random(seed)
    text = f"Well, <b>1 < 2</b>: {CALL}\n{CALL}"
    said, calls = read(text, draw.sample(range(len(text)), draw.randrange(0, 12)))
    assert said == "Well, <b>1 < 2</b>: "
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("find", {"q": "ä"})] * 2


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call> not JSON </tool_call> so what",
        '<tool_call>{"name": 3}</tool_call>',
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "never closed"',
        "ends with <tool_",
        "</tool_call> alone",
    ],
)
def test_what_is_no_call_stays_text(text):
    assert read(text, range(len(text))) == (text, [])


def test_later_calls_are_dropped_where_one_is_asked_for():
    assert len(read(CALL + CALL, [], 1)[1]) == 1


@pytest.mark.parametrize("draft", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_call_that_is_required_is_made(server, draft, stream):
    fields = {"tools": TOOLS, "tool_choice": "required", "max_tokens": 150, "draft": draft, "seed": 3}
    if stream:
        kept = {name: fields.pop(name) for name in ("draft",)}
        chunks = server.openai.chat.completions.create(
            model=server.service.name,
            messages=[{"role": "user", "content": "hello"}],
            stream=True,
            extra_body=kept,
            **fields,
        )
        choices = [chunk.choices[0] for chunk in chunks]
        calls = [call for choice in choices for call in choice.delta.tool_calls or ()]
        assert choices[-1].finish_reason == "tool_calls"
        function = calls[0].function.model_dump()
    else:
        choice = server.chat(**fields).json()["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        function = choice["message"]["tool_calls"][0]["function"]
    assert function["name"] in ("find", "get")
    assert json.loads(function["arguments"])["q"] in ("x", "yes")


def test_a_named_tool_is_called_and_its_answer_can_be_sent(server):
    named = {"type": "function", "function": {"name": "get"}}
    message = server.chat(tools=TOOLS, tool_choice=named, max_tokens=200).json()["choices"][0]["message"]
    assert message["tool_calls"][0]["function"]["name"] == "get"
    answer = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "42"}
    messages = [{"role": "user", "content": "hello"}, message, answer]
    assert server.chat(messages=messages, tools=TOOLS).status_code == 200
    missing = {"type": "function", "function": {"name": "other"}}
    assert server.chat(tools=TOOLS, tool_choice=missing).json()["error"]["param"] == "tool_choice"


def test_tools_are_shown_to_the_model_only_where_it_may_call_them(server):
    none = server.chat().json()["usage"]["prompt_tokens"]
    assert server.chat(tools=TOOLS).json()["usage"]["prompt_tokens"] > none
    assert server.chat(tools=TOOLS, tool_choice="none").json()["usage"]["prompt_tokens"] == none


@pytest.mark.parametrize("temperature", [0, 0.9])
@pytest.mark.parametrize("seed", range(3))
def test_json_follows_its_schema_and_is_the_same_with_drafts(server, temperature, seed):
    schema = {
        "type": "object",
        "properties": {
            "number": {"type": "integer", "minimum": 0, "maximum": 999},
            "words": {"type": "array", "items": {"enum": ["a", "bb"]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["number", "words"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    fields = {"response_format": form, "max_tokens": 120, "temperature": temperature, "seed": seed}
    drafted, plain = (server.chat(draft=draft, **fields).json()["choices"][0] for draft in (True, False))
    assert drafted["message"]["content"] == plain["message"]["content"]
    assert drafted["finish_reason"] == "stop"
    said = json.loads(drafted["message"]["content"])
    assert 0 <= said["number"] <= 999
    assert set(said["words"]) <= {"a", "bb"}


def test_json_object_begins_as_one(server):
    said = server.chat(response_format={"type": "json_object"}).json()["choices"][0]["message"]["content"]
    assert said.startswith("{")


@pytest.mark.parametrize("name", ["ignore_eos", "min_tokens"])
def test_what_a_grammar_excludes_is_refused(server, name):
    response = server.chat(
        response_format={"type": "json_object"}, **{name: 2 if name == "min_tokens" else True}
    )
    assert response.json()["error"]["param"] == name
