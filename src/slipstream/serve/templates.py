"""Messages and texts to token ids, by the target's own chat template. No decoding, no limits."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from slipstream.serve.errors import ApiError, bad
from slipstream.serve.fields import ChatFields, Message
from slipstream.serve.tools import BEGIN

#: Names that mean something to the renderer itself, so that a client must not set them.
_RESERVED = {
    *("messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt"),
    *("continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
    *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}


class Templates:
    """Renders prompts with a copy of the tokenizer, as the engine's thread uses the original.

    Args:
        tokenizer: of the target, or None.
        name: of the target, for people.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._name = name
        template = getattr(tokenizer, "chat_template", None) or ""
        # A tokenizer may have several templates by name.
        self._source = template if isinstance(template, str) else json.dumps(template)

    @property
    def takes_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return "tools" in self._source

    @property
    def hermes(self) -> bool:
        """Whether the template has the model call tools by JSON within `<tool_call>` marks."""
        # Where the marks are special tokens, texts do not show them.
        return BEGIN in self._source and BEGIN not in self._tokenizer.all_special_tokens

    def chat(self, fields: ChatFields) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: 400; the template does not take what is asked.
        """
        if self._tokenizer is None or not self._source:
            raise ApiError(400, f"{self._name} has no chat template; use /v1/completions", "messages")
        tools = None if fields.tool_choice == "none" or not fields.tools else fields.tools
        if tools and not self.takes_tools:
            raise bad("tools", f"the chat template of {self._name} takes no tools")
        extras = fields.chat_template_kwargs or {}
        for name in extras:
            if name in _RESERVED or name.startswith("_"):
                raise bad(f"chat_template_kwargs.{name}", f"{name} cannot be set by chat_template_kwargs")
        going_on = bool(fields.continue_final_message)
        begin = fields.add_generation_prompt
        if going_on and begin:
            raise bad(
                "continue_final_message",
                "continue_final_message and add_generation_prompt exclude each other",
            )
        try:
            ids = self._tokenizer.apply_chat_template(
                [_turn(message) for message in fields.messages],
                tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
                add_generation_prompt=not going_on if begin is None else begin,
                continue_final_message=going_on,
                return_dict=False,
                **extras,
            )
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise bad("messages", f"the chat template cannot render these messages: {reason}") from error
        return list(ids)

    def text(self, prompt: str, special: bool = True) -> list[int]:
        """Token ids of a text as it is.

        Raises:
            ApiError: 400; the target has no tokenizer.
        """
        if self._tokenizer is None:
            raise bad("prompt", f"{self._name} has no tokenizer, so a prompt must be token ids")
        return list(self._tokenizer(prompt, add_special_tokens=special)["input_ids"])

    def shown(self, ids: Sequence[int]) -> str:
        """What token ids say, special tokens left out."""
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(
            list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


def _turn(message: Message) -> dict[str, Any]:
    """A message as templates expect it: text in one piece, arguments of calls as objects."""
    # Templates know the older name of the role.
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    turn["content"] = "".join(part.text for part in content) if isinstance(content, list) else content or ""
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            turn[name] = value
    if message.tool_calls:
        turn["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    return turn


def _arguments(text: str) -> Any:
    """Arguments as an object where they are one, so that the template may print it its own way."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
