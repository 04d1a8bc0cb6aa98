"""Messages to token ids through the tokenizer's own chat template, with the exact spans that the target said.

A turn is rendered as serving renders it: the prompt is the template of everything before it with the answer
opened, tokenised by itself; the answer, up to and including its end token, follows as the target would say
it. Nothing here searches for marker strings of a template family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import InputError

Message = Mapping[str, Any]
"""A chat message: `role`, `content` and whatever else its template reads."""

Span = tuple[int, int]
"""First token of an answer and the one after its last."""

# A user's text that no template alters, so that the rendered text can be cut around it.
_SENTINEL = "SENTINEL-5f2d"


@dataclass(frozen=True)
class Rendered:
    """One token sequence and what of it the target said.

    Attributes:
        token_ids: prompt and answers.
        answers: spans of the answers, ascending.
    """

    token_ids: tuple[int, ...]
    answers: tuple[Span, ...]


class Renderer:
    """A tokenizer's chat template with one stated thinking mode.

    Args:
        tokenizer: with a chat template.
        thinking: passed on as `enable_thinking` where it is not None.
        end_ids: tokens that end an answer of the target.

    Raises:
        InputError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: Any, thinking: bool | None = None, end_ids: Sequence[int] = ()) -> None:
        if getattr(tokenizer, "chat_template", None) is None:
            raise InputError("the target's tokenizer has no chat template")
        self._tokenizer = tokenizer
        self._arguments = {} if thinking is None else {"enable_thinking": thinking}
        ends = sorted({*end_ids, *([] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])})
        self._end_texts = [text for token in ends if (text := tokenizer.decode([token]))]
        self._last_end: int | None = tokenizer.eos_token_id

    def prompt_text(self, messages: Sequence[Message]) -> str:
        """The text of everything so far, with the answer opened."""
        return self._text(messages, True)

    def prompt_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of `prompt_text`, as a server makes them."""
        return self._ids(self.prompt_text(messages))

    def user_opening_ids(self, messages: Sequence[Message] = (), begun: str = "") -> tuple[int, ...]:
        """Token ids of everything so far, with the next USER turn opened.

        Args:
            messages: so far.
            begun: first words of the turn.

        Raises:
            InputError: the template changes the user's text, so that its turn cannot be opened.
        """
        text = self._text([*messages, {"role": "user", "content": _SENTINEL}], True)
        before, found, _ = text.rpartition(_SENTINEL)
        if not found:
            raise InputError(
                "the target's chat template changes the user's text, so its turns cannot be opened"
            )
        return self._ids(before + begun)

    def documents(self, messages: Sequence[Message]) -> list[Rendered]:
        """All assistant turns of a chat.

        Turns whose prompts extend one another share a document. A template that rewrites earlier turns
        (dropping their thoughts, say) yields a document per turn, each with the context that serving would
        give it.

        Returns:
            Documents in order; none where no message is the assistant's.

        Raises:
            InputError: the template cannot render the messages.
        """
        documents: list[Rendered] = []
        for number, message in enumerate(messages):
            if message.get("role") != "assistant":
                continue
            prompt = self.prompt_ids(messages[:number])
            answer = self._answer_ids(messages[: number + 1])
            if not answer:
                continue
            span = len(prompt), len(prompt) + len(answer)
            held = documents[-1] if documents else None
            if held is not None and prompt[: len(held.token_ids)] == held.token_ids:
                documents[-1] = Rendered(prompt + answer, (*held.answers, span))
            else:
                documents.append(Rendered(prompt + answer, (span,)))
        return documents

    def _answer_ids(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """What the target says in the last turn, its end token included."""
        whole, prompt = self._text(messages, False), self.prompt_text(messages[:-1])
        content = str(messages[-1].get("content") or "").strip()  # templates may trim it
        if whole.startswith(prompt):
            text = whole[len(prompt) :]
            place = text.rfind(content)
            rest_at = 0 if place < 0 else place + len(content)
        else:
            # The opened turn holds something that the finished one lacks (an empty thought): only what
            # follows the content is read off the template.
            if content not in whole:
                raise InputError(
                    "the chat template changes an answer's text, so what was said cannot be marked"
                )
            _, _, tail = whole.rpartition(content) if content else ("", "", whole[-64:])
            text, rest_at = content + tail, len(content)
        ends = [place + len(end) for end in self._end_texts if (place := text.find(end, rest_at)) >= 0]
        if ends:
            return self._ids(text[: min(ends)])
        ids = self._ids(text.rstrip() if text[rest_at:].isspace() else text)
        return ids if self._last_end is None else (*ids, self._last_end)

    def _text(self, messages: Sequence[Message], opened: bool) -> str:
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=opened, **self._arguments
            )
        except Exception as error:  # a template is a program of its author's
            raise InputError(f"the chat template refuses the messages: {error}") from error
        return rendered

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False).input_ids)
