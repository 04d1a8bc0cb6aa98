"""Chat files, and where a chat template is cut around the user's turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.core.errors import InputError
from slipstream.data.chats import Chat, read_chats, template_seams, write_chats


class TemplateOnly:
    """As much of a tokenizer as the seams need: a real Jinja template rendered by transformers."""

    def __init__(self, template: str | None) -> None:
        self.chat_template = template

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        from jinja2 import Template

        assert not tokenize
        return Template(self.chat_template or "").render(
            messages=messages, add_generation_prompt=add_generation_prompt
        )


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_seams_join_to_the_rendered_prompt() -> None:
    tokenizer = TemplateOnly(CHATML)
    seams = template_seams(tokenizer)
    assert seams.before == "<|im_start|>user\n"
    assert seams.after == "<|im_end|>\n<|im_start|>assistant\n"
    text = "Why is the sky blue?"
    whole = tokenizer.apply_chat_template([{"role": "user", "content": text}], False, True)
    assert seams.before + text + seams.after == whole


def test_a_missing_or_altering_template_is_refused() -> None:
    with pytest.raises(InputError, match="no chat template"):
        template_seams(TemplateOnly(None))
    with pytest.raises(InputError, match="changes the user's text"):
        template_seams(TemplateOnly("{{ messages[0].content | lower }}"))


def test_chats_round_trip_and_are_not_overwritten(tmp_path: Path) -> None:
    chats = [Chat("Grüße, 世界\n", (1, 2), (3, 2), 0.0), Chat("b", (5,), (6, 7, 8), 0.8)]
    path = tmp_path / "chats.jsonl"
    write_chats(path, chats)
    assert read_chats(path) == chats
    with pytest.raises(InputError, match="--force"):
        write_chats(path, chats[:1])
    write_chats(path, chats[:1], force=True)
    assert read_chats(path) == chats[:1]


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    write_chats(path, [Chat("a", (1,), (2,), 0.0)])
    path.write_text(path.read_text() + "{not json\n")
    with pytest.raises(InputError, match="line 2"):
        read_chats(path)
    with pytest.raises(InputError, match="cannot read"):
        read_chats(tmp_path / "none.jsonl")
