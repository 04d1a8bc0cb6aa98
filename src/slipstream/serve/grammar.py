"""JSON and tool calls enforced while decoding, by llguidance; masks meet drafts in `decode/grammar`."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, TypeVar

from slipstream.core.errors import GrammarError, MissingExtraError
from slipstream.serve.errors import ApiError, bad
from slipstream.serve.fields import NamedTool, ResponseFormat, Tool
from slipstream.serve.tools import BEGIN, END
from slipstream.target import Target

try:
    import llguidance
    import llguidance.hf
except ImportError as error:  # pragma: no cover
    raise MissingExtraError("llguidance", "serve") from error

_T = TypeVar("_T")
#: One way to write each value: a model that may add blanks can do so for ever.
_COMPACT: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class ParserGuide:
    """What a parser allows next; see `core.records.Guide`.

    A parser counts what it was asked and gives up beyond a bound, so drafts could use up what the text
    needs. One that gives up is replaced by a new one that has read nothing but the text, and only where that
    gives up too, the guide does.

    Args:
        tokenizer: of llguidance.
        grammar: compiled text of llguidance.
        end_ids: tokens that end a text.
        vocab_size: of the model.
        limits: of the parser; None takes its own.

    Raises:
        GrammarError: the parser cannot begin.
    """

    def __init__(
        self,
        tokenizer: llguidance.LLTokenizer,
        grammar: str,
        end_ids: tuple[int, ...],
        vocab_size: int,
        limits: llguidance.LLParserLimits | None = None,
    ) -> None:
        self._new = partial(llguidance.LLMatcher, tokenizer, grammar, log_level=0, limits=limits)
        self._matcher = self._new()
        self._said: list[int] = []
        self._check()
        bits = bytearray(-(-vocab_size // 8))
        for token in end_ids:
            bits[token // 8] |= 1 << token % 8
        self._end = bytes(bits)

    def mask(self) -> bytes:
        """As the parser says; the end where it allows nothing.

        Raises:
            GrammarError: the parser gives up.
        """
        mask: bytes = self._ask(lambda: self._matcher.compute_bitmask())
        return mask if any(mask) else self._end

    def accept(self, token: int) -> bool:
        """Move on, if the parser allows it.

        Raises:
            GrammarError: the parser gives up.
        """
        if self._ask(lambda: self._matcher.try_consume_tokens([token])) != 1:
            return False
        self._said.append(token)
        return True

    def back(self, count: int) -> None:
        """Take tokens back."""
        if count:
            del self._said[-count:]
            self._matcher.rollback(count)

    def _ask(self, question: Callable[[], _T]) -> _T:
        """What the parser answers, or a new one."""
        answer = question()
        if self._matcher.is_error():
            self._matcher = self._new()
            self._matcher.try_consume_tokens(self._said)
            answer = question()
            self._check()
        return answer

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(str(self._matcher.get_error()))


class Grammars:
    """Makes guides for a target.

    Args:
        target: whose tokens they are.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    def answer(self, form: ResponseFormat | None) -> ParserGuide | None:
        """A guide for the form of an answer; None where any text will do.

        Raises:
            ApiError: 400; the schema cannot be followed.
        """
        if form is None or form.type == "text":
            return None
        if form.type == "json_object":
            return self._guide(_schema_grammar({"type": "object"}), "response_format")
        if form.json_schema is None or form.json_schema.schema_ is None:
            raise bad("response_format.json_schema", "response_format json_schema needs a schema")
        try:
            grammar = _schema_grammar(form.json_schema.schema_)
        except ValueError as error:
            raise bad("response_format.json_schema", f"the schema cannot be used: {error}") from error
        return self._guide(grammar, "response_format.json_schema")

    def call(self, tools: list[Tool], choice: str | NamedTool | None) -> ParserGuide | None:
        """A guide for an answer that must be tool calls; None where the model decides.

        Raises:
            ApiError: 400; a tool's parameters are no schema that can be followed, or there is no such tool.
        """
        if choice in (None, "auto", "none"):
            return None
        if isinstance(choice, NamedTool):
            tools = [tool for tool in tools if tool.function.name == choice.function.name]
            if not tools:
                raise bad("tool_choice", f"there is no tool {choice.function.name} among tools")
        one_of = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool.function.name},
                    "arguments": tool.function.parameters or {"type": "object"},
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for tool in tools
        ]
        schema = json.dumps({"anyOf": one_of, "x-guidance": _COMPACT})
        lark = f'start: "{BEGIN}\\n" call "\\n{END}"\ncall: %json {schema}\n'
        return self._guide(llguidance.LLMatcher.grammar_from_lark(lark), "tools")

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        info = self._target.info
        tokenizer: Any = self._target.tokenizer
        return llguidance.hf.from_tokenizer(
            tokenizer, n_vocab=info.vocab_size, eos_token=list(info.eos_token_ids)
        )

    def _guide(self, grammar: str, param: str) -> ParserGuide:
        info = self._target.info
        if self._target.tokenizer is None or not info.eos_token_ids:
            raise bad(param, f"{info.name} has no tokenizer or no end token, so no grammar can be followed")
        try:
            tokenizer = self._tokenizer
        except ValueError as error:
            raise ApiError(400, f"grammars cannot read this tokenizer: {error}", param) from error
        try:
            return ParserGuide(tokenizer, grammar, info.eos_token_ids, info.vocab_size)
        except GrammarError as error:
            reason = " ".join(str(error).split())[:300]
            raise bad(param, f"{param} cannot be followed: {reason}") from error


def _schema_grammar(schema: dict[str, Any]) -> str:
    grammar: str = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_COMPACT)
    return grammar
