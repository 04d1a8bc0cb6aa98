"""The mask of what the target said, proved by decoding it, for eleven template styles."""

import pytest

from slipstream.core.errors import InputError
from slipstream.data.render import Renderer
from tests.data.templates import STYLES, tokenizer_of

ONE = [
    {"role": "user", "content": "Why is the sky blue?"},
    {"role": "assistant", "content": "I think: light."},
]
MANY = [
    *ONE,
    {"role": "user", "content": "And\n\nat dusk?"},
    {"role": "assistant", "content": "Rød, 世界 – more air.\n\nI am sure."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "I.\n"},
]


def said(renderer, tokenizer, messages):
    """Decoded answers of all documents, in order."""
    return [
        tokenizer.decode(document.token_ids[start:end])
        for document in renderer.documents(messages)
        for start, end in document.answers
    ]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("messages", [ONE, MANY], ids=["one turn", "many turns"])
def test_what_is_marked_is_what_the_target_says(style, messages):
    tokenizer = tokenizer_of(style)
    end = STYLES[style][1]
    answers = said(Renderer(tokenizer), tokenizer, messages)
    expected = [message["content"] for message in messages if message["role"] == "assistant"]
    assert len(answers) == len(expected)
    for answer, content in zip(answers, expected, strict=True):
        assert answer.endswith(end)
        assert answer.count(end) == 1
        assert answer.removesuffix(end).strip() == content.strip()


@pytest.mark.parametrize("style", STYLES)
def test_every_answer_has_the_prompt_that_a_server_would_make(style):
    tokenizer = tokenizer_of(style)
    renderer = Renderer(tokenizer)
    prompts = []
    for document in renderer.documents(MANY):
        prompts += [document.token_ids[:start] for start, _ in document.answers]
    for number, prompt in zip((1, 3, 5), prompts, strict=True):
        text = tokenizer.apply_chat_template(MANY[:number], tokenize=False, add_generation_prompt=True)
        assert list(prompt) == tokenizer(text, add_special_tokens=False).input_ids


def test_turns_share_a_document_where_prompts_extend_one_another():
    assert len(Renderer(tokenizer_of("chatml")).documents(MANY)) == 1
    assert len(Renderer(tokenizer_of("gemma")).documents(MANY)) == 1


def test_a_template_that_rewrites_earlier_turns_gets_a_document_per_turn():
    thoughtful = [dict(message) for message in MANY]
    for message in thoughtful:
        if message["role"] == "assistant":
            message["content"] = "<think>\nwell\n</think>\n\n" + message["content"]
    tokenizer = tokenizer_of("qwen 3")
    documents = Renderer(tokenizer, thinking=True).documents(thoughtful)
    assert len(documents) == 3
    assert all("well" in text for text in said(Renderer(tokenizer, True), tokenizer, thoughtful))
    # Serving drops earlier thoughts, and so does the last answer's context.
    start, _ = documents[-1].answers[0]
    assert "well" not in tokenizer.decode(documents[-1].token_ids[:start])


def test_an_empty_thought_belongs_to_the_prompt_when_thinking_is_off():
    tokenizer = tokenizer_of("qwen 3")
    renderer = Renderer(tokenizer, thinking=False)
    (document,) = renderer.documents(ONE)
    start, end = document.answers[0]
    assert tokenizer.decode(document.token_ids[:start]).endswith("<think>\n\n</think>\n\n")
    assert tokenizer.decode(document.token_ids[start:end]) == "I think: light.<|im_end|>"


@pytest.mark.parametrize("style", STYLES)
def test_a_users_turn_can_be_opened(style):
    tokenizer = tokenizer_of(style)
    renderer = Renderer(tokenizer)
    for before in ([], ONE):
        opening = tokenizer.decode(renderer.user_opening_ids(before))
        whole = renderer.prompt_text([*before, {"role": "user", "content": "Hello there"}])
        assert whole.startswith(opening)
        assert whole[len(opening) :].startswith("Hello there")
        assert tokenizer.decode(renderer.user_opening_ids(before, "Hello")) == opening + "Hello"


def test_bad_templates_are_one_sentence():
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = None
    with pytest.raises(InputError, match="no chat template"):
        Renderer(tokenizer)
    tokenizer.chat_template = "{{ messages[0].content | lower }}"
    with pytest.raises(InputError, match="changes the user's text"):
        Renderer(tokenizer).user_opening_ids()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(InputError, match="roles must alternate"):
        Renderer(tokenizer).documents(ONE)


def test_chats_without_an_answer_have_no_document():
    renderer = Renderer(tokenizer_of("chatml"))
    assert renderer.documents(ONE[:1]) == []
    assert renderer.documents([{"role": "system", "content": "x"}]) == []
