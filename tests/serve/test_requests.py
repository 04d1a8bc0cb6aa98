"""Every field of a request is honoured or refused by its name, seen through the real client of OpenAI."""

from __future__ import annotations

import json

import openai
import pytest

from slipstream.core.options import SamplingOptions
from slipstream.serve.fields import _NEUTRAL, ChatFields, TextFields

HELLO = [{"role": "user", "content": "hello"}]


def ask(server, **fields):
    extra = {name: fields.pop(name) for name in list(fields) if name in EXTRAS}
    fields = {
        "model": "served0",
        "messages": HELLO,
        "max_tokens": 12,
        "seed": 1,
        "temperature": 0.9,
        **fields,
    }
    fields["model"] = server.service.name
    return server.openai.chat.completions.create(**fields, extra_body=extra or None)


EXTRAS = {
    *("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids", "draft"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
}

#: Fields that change what the engine is asked, and how it is asked then.
SAMPLED = {
    "temperature": (0.3, {"temperature": 0.3}),
    "top_p": (0.6, {"top_p": 0.6}),
    "top_k": (4, {"top_k": 4}),
    "min_p": (0.2, {"min_p": 0.2}),
    "seed": (77, {"seed": 77}),
    "max_tokens": (5, {"max_tokens": 5}),
    "max_completion_tokens": (5, {"max_tokens": 5}),
    "presence_penalty": (1.5, {"presence_penalty": 1.5}),
    "frequency_penalty": (1.5, {"frequency_penalty": 1.5}),
    "repetition_penalty": (1.4, {"repetition_penalty": 1.4}),
    "logit_bias": ({"65": 30}, {"logit_bias": {65: 30.0}}),
    "stop": (["a", "e"], {"stop": ("a", "e")}),
    "stop_token_ids": ([66, 67], {"stop_token_ids": (66, 67)}),
    "min_tokens": (9, {"min_tokens": 9}),
    "ignore_eos": (True, {"ignore_eos": True}),
}


@pytest.mark.parametrize("name", SAMPLED)
def test_sampling_fields_reach_the_engine(server, alone, name):
    value, options = SAMPLED[name]
    fields = {"max_tokens": None} if name == "max_completion_tokens" else {}
    said = ask(server, **{**fields, name: value})
    sampling = SamplingOptions(**{"temperature": 0.9, "seed": 1, "max_tokens": 12, **options})
    right = alone.generate(HELLO, sampling)
    assert said.choices[0].message.content == right.text
    assert said.choices[0].finish_reason == right.finish_reason
    assert said.usage.completion_tokens == right.completion_tokens
    # The field matters: without it the text is another one, or it is one that ends elsewhere.
    plain = alone.generate(HELLO, SamplingOptions(temperature=0.9, seed=1, max_tokens=12))
    if name not in ("min_tokens", "ignore_eos", "stop_token_ids", "stop"):
        assert (plain.text, plain.completion_tokens) != (right.text, right.completion_tokens)


def test_every_field_of_openai_is_known():
    """So that none is ignored; which are honoured the tests of this file show."""
    from openai.types import completion_create_params as text
    from openai.types.chat import completion_create_params as chat

    chats = (
        chat.CompletionCreateParamsStreaming.__annotations__ | chat.CompletionCreateParamsBase.__annotations__
    )
    texts = (
        text.CompletionCreateParamsStreaming.__annotations__ | text.CompletionCreateParamsBase.__annotations__
    )
    assert set(chats) <= set(ChatFields.model_fields)
    assert set(texts) <= set(TextFields.model_fields)


@pytest.mark.parametrize("name", _NEUTRAL)
def test_fields_that_are_not_honoured_are_refused_by_name(server, name):
    kind, path = (ChatFields, "/v1/chat/completions") if name in ChatFields.model_fields else (TextFields, "")
    assert name in kind.model_fields
    body = {"messages": HELLO, "max_tokens": 1}
    response = server.http.post(path or "/v1/completions", json=body | {name: "anything"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == name
    for neutral in (None, *_NEUTRAL[name]):
        assert server.http.post("/v1/chat/completions", json=body | {name: neutral}).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1),
        ("temperature", "hot"),
        ("top_p", 0),
        ("top_k", 1.5),
        ("min_p", 1),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", 3),
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 10**30),
        ("n", 0),
        ("n", 1000),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"260": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {"1": 101}),
        ("min_tokens", 13),
        ("stop_token_ids", [260]),
        ("top_logprobs", 3),
        ("messages", []),
        ("messages", "hello"),
        ("tool_choice", "required"),
        ("stream_options", {"include_everything": True}),
        ("response_format", {"type": "json_schema"}),
        ("response_format", {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}),
        ("chat_template_kwargs", {"tokenize": True}),
        ("temprature", 1),
        ("model", "another"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(server, field, value):
    response = server.chat(**{field: value})
    assert response.status_code == (404 if field == "model" else 400), response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0] == field
    assert field in error["message"] or "model" in error["message"]


def test_a_misspelt_field_is_told_its_neighbour(server):
    assert "did you mean temperature?" in server.chat(temprature=1).json()["error"]["message"]


def test_the_context_is_a_limit_that_is_told_in_numbers(server):
    too_long = server.chat("x" * 600)
    assert too_long.status_code == 400
    assert "512" in too_long.json()["error"]["message"]
    prompt = server.chat("x").json()["usage"]["prompt_tokens"]
    fits = server.chat("x" * (512 - prompt), max_tokens=2)
    assert fits.status_code == 400
    assert str(511 + 1) in fits.json()["error"]["message"]
    assert server.chat("x" * (512 - prompt - 2), max_tokens=3).status_code == 200
    rest = server.chat("x" * (512 - prompt - 2), max_tokens=None, ignore_eos=True).json()
    assert rest["usage"]["total_tokens"] == 512
    assert rest["choices"][0]["finish_reason"] == "length"


def test_n_choices_have_seeds_of_their_own_and_count_their_prompt_once(server):
    one = ask(server)
    several = ask(server, n=3)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in several.choices]
    assert texts[0] == one.choices[0].message.content
    assert len(set(texts)) == 3
    assert several.usage.prompt_tokens == one.usage.prompt_tokens
    assert ask(server, n=3).choices[2].message.content == texts[2]


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("fields", [{}, {"logprobs": True, "top_logprobs": 2}, {"stop": ["a"]}])
def test_a_stream_says_what_the_whole_answer_says(server, n, fields):
    whole = ask(server, n=n, max_tokens=30, **fields)
    stream = ask(server, n=n, max_tokens=30, stream=True, stream_options={"include_usage": True}, **fields)
    texts, reasons, likely = [""] * n, [None] * n, [[] for _ in range(n)]
    chunks = list(stream)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs:
                likely[choice.index] += choice.logprobs.content
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    for choice in whole.choices:
        mine = choice.logprobs.content if choice.logprobs else []
        assert [(item.token, item.bytes) for item in likely[choice.index]] == [
            (i.token, i.bytes) for i in mine
        ]
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert not any(chunk.usage for chunk in ask(server, stream=True))


def test_logprobs_are_those_of_plain_decoding(server):
    drafted = ask(server, logprobs=True, top_logprobs=3, temperature=0.0, max_tokens=30).choices[0]
    plain = ask(server, logprobs=True, top_logprobs=3, temperature=0.0, max_tokens=30, draft=False).choices[0]
    assert drafted.message.content == plain.message.content
    for one, other in zip(drafted.logprobs.content, plain.logprobs.content, strict=True):
        assert (one.token, one.bytes) == (other.token, other.bytes)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert one.token == one.top_logprobs[0].token
        assert len(one.top_logprobs) == 3
    none = ask(server, logprobs=True).choices[0]
    assert all(item.top_logprobs == [] for item in none.logprobs.content)


def test_usage_and_headers_tell_about_drafting(server, alone):
    response = server.chat(max_tokens=40, temperature=0)
    right = alone.generate(HELLO, SamplingOptions(max_tokens=40))
    usage = response.json()["usage"]
    details = usage["completion_tokens_details"]
    assert details["accepted_per_position"] == list(right.accepted_per_position)
    assert details["drafted_tokens"] == right.drafts > 0
    assert usage["completion_tokens"] == right.completion_tokens
    assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]
    assert int(response.headers["x-slipstream-rounds"]) == right.rounds
    assert float(response.headers["x-slipstream-acceptance-length"]) == round(right.acceptance_length, 4)
    timing = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
    assert set(timing) == {"template", "grammar", "queue", "prefill", "decode", "total"}
    assert float(timing["total"]) >= float(timing["decode"])
    plain = server.chat(max_tokens=40, temperature=0, draft=False).json()["usage"][
        "completion_tokens_details"
    ]
    assert plain["drafted_tokens"] == 0
    assert plain["rounds"] == plain["rounds_without_drafts"] == 39


def test_template_fields(server, alone):
    base = server.chat().json()["usage"]["prompt_tokens"]
    loud = server.chat(chat_template_kwargs={"shout": True}).json()["usage"]["prompt_tokens"]
    assert loud == base + len("LOUD ")
    bare = server.chat(add_generation_prompt=False).json()["usage"]["prompt_tokens"]
    assert bare < base
    begun = [*HELLO, {"role": "assistant", "content": "It is"}]
    going_on = server.chat(messages=begun, continue_final_message=True, temperature=0).json()
    ids = alone.target.tokenizer.apply_chat_template(begun, continue_final_message=True, return_dict=False)
    right = alone.generate(list(ids), SamplingOptions(max_tokens=12))
    assert going_on["choices"][0]["message"]["content"] == right.text
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert server.chat(messages=[{"role": "user", "content": parts}]).json()["usage"]["prompt_tokens"] == base
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    refused = server.chat(messages=[{"role": "user", "content": image}])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "messages.0.content.0.type"


def test_an_answer_can_be_sent_back_as_it_came(server):
    answer = ask(server).choices[0].message
    messages = [*HELLO, answer, {"role": "user", "content": "and?"}]
    assert ask(server, messages=messages).choices[0].message.role == "assistant"
    raw = [*HELLO, answer.model_dump(), {"role": "user", "content": "and?"}]
    assert server.chat(messages=raw).status_code == 200


class TestTexts:
    def create(self, server, prompt="once", **fields):
        fields = {"max_tokens": 8, "temperature": 0, **fields}
        return server.openai.completions.create(model=server.service.name, prompt=prompt, **fields)

    def test_a_text_is_continued_as_it_is(self, server, alone):
        right = alone.generate("once", SamplingOptions(max_tokens=8), raw=True)
        assert self.create(server).choices[0].text == right.text
        ids = alone.encode("once", raw=True)
        assert self.create(server, ids).choices[0].text == right.text

    def test_several_prompts(self, server):
        texts = [choice.text for choice in self.create(server, ["once", "twice"], n=2).choices]
        assert texts[0] == texts[1] == self.create(server, "once").choices[0].text
        assert texts[2] == texts[3] == self.create(server, "twice").choices[0].text
        lists = self.create(server, [[1, 2], [3]])
        assert len(lists.choices) == 2

    def test_the_usual_length_is_that_of_openai(self, server):
        body = {"prompt": "once", "ignore_eos": True}
        assert server.http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16

    def test_echo_and_stream(self, server):
        whole = self.create(server, echo=True).choices[0].text
        assert whole.startswith("once")
        stream = self.create(server, echo=True, stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == whole

    def test_logprobs(self, server):
        likely = self.create(server, logprobs=2).choices[0].logprobs
        assert len(likely.tokens) == len(likely.token_logprobs) == len(likely.text_offset) == 8
        assert likely.text_offset[1] == len(likely.tokens[0])
        stream = self.create(server, logprobs=2, stream=True)
        chunks = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs]
        assert [offset for chunk in chunks for offset in chunk.text_offset] == likely.text_offset

    @pytest.mark.parametrize(
        "fields", [{"prompt": ""}, {"prompt": []}, {"prompt": [999]}, {"prompt": [-1]}, {"prompt": None}]
    )
    def test_prompts_that_cannot_be_used(self, server, fields):
        response = server.http.post("/v1/completions", json={"max_tokens": 1, **fields})
        assert response.status_code == 400
        assert response.json()["error"]["param"].split(".")[0] == "prompt"

    def test_echo_with_logprobs_is_refused(self, server):
        with pytest.raises(openai.BadRequestError, match="echo"):
            self.create(server, echo=True, logprobs=1)


@pytest.mark.parametrize("text", ["ünïcödé 🌊 漢字", "\u0000\u0007\u202e", "😀" * 40, "a\r\n\t b"])
def test_unicode_prompts_come_through(server, alone, text):
    right = alone.generate([{"role": "user", "content": text}], SamplingOptions(max_tokens=12))
    assert server.chat(text, temperature=0).json()["choices"][0]["message"]["content"] == right.text


BODIES = [
    *(b"", b"{", b"[]", b"null", b"3", b'"x"', b"\xff\xfe", b'{"messages": [}', b"[" * 100_000),
    b'{"messages":[{"role":"user","content":"\\ud800"}]}',
    b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}',
    b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}',
    b'{"messages":[{"role":"king","content":"a"}]}',
    b'{"messages":[3]}',
    json.dumps({"messages": HELLO, "metadata": {"a": "\x00" * 99}}).encode(),
]


@pytest.mark.parametrize("body", BODIES)
def test_malformed_bodies_are_refused(server, body):
    headers = {"Content-Type": "application/json"}
    response = server.http.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_token_ids_are_told_where_asked_for(server):
    whole = server.chat(return_token_ids=True).json()["choices"][0]
    assert len(whole["token_ids"]) == 12
    assert "token_ids" not in server.chat().json()["choices"][0]
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "seed": 1, "stream": True}
    told: list[int] = []
    with server.http.stream("POST", "/v1/chat/completions", json={**body, "return_token_ids": True}) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    told += choice.get("token_ids", [])
    assert told == whole["token_ids"]
