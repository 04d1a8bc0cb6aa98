"""From the fields of a call to requests for the engine: prompts, limits, sampling; decodes nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from slipstream.api import Session
from slipstream.core.command_options import ServeOptions
from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.serve.errors import ApiError, bad
from slipstream.serve.fields import ChatFields, SharedFields, TextFields
from slipstream.serve.grammar import Grammars, ParserGuide
from slipstream.serve.templates import Templates

#: Tokens of a plain text where the client does not say how many, as OpenAI has it.
_TEXT_TOKENS = 16
_T = TypeVar("_T")


@dataclass(frozen=True)
class Plan:
    """What is to be decoded for one call.

    Attributes:
        fields: as the client gave them.
        requests: one per choice: all of the first prompt, then all of the second, and so on.
        prompts: the prompts, for echo and for the log.
        template_s: seconds that template and tokenising took.
        tool_calls: whether tool calls are looked for in the answer.
        grammar_s: seconds that reading the grammars took.
    """

    fields: SharedFields
    requests: tuple[Request, ...]
    prompts: tuple[str, ...]
    template_s: float
    tool_calls: bool = False
    grammar_s: float = 0.0


class Planner:
    """Makes plans for one target.

    Args:
        session: target and drafter.
        options: the server's limits.
        max_context: longest prompt plus answer.
    """

    def __init__(self, session: Session, options: ServeOptions, max_context: int) -> None:
        self.templates = Templates(session.target.tokenizer, session.target.info.name)
        self._grammars = Grammars(session.target)
        self._info, self._exact = session.target.info, session.exact()
        self._most = options.max_choices
        self._context = max_context

    def chat(self, fields: ChatFields) -> Plan:
        """A plan for a conversation.

        Raises:
            ApiError: 400; names the field that cannot be honoured.
        """
        begun = time.perf_counter()
        self._check_chat(fields)
        ids = self.templates.chat(fields)
        elapsed = time.perf_counter() - begun
        tools = fields.tools if fields.tool_choice != "none" else None
        wanted = 0 if fields.logprobs and fields.top_logprobs is None else fields.top_logprobs
        limit = fields.max_completion_tokens or fields.max_tokens
        guides: list[ParserGuide] = []
        begun = time.perf_counter()
        for _ in range(fields.n or 1):
            guide = self._grammars.answer(fields.response_format)
            if tools and guide is None:
                guide = self._grammars.call(tools, fields.tool_choice)
            guides += [guide] if guide is not None else []
        grammar_s = time.perf_counter() - begun
        requests = self._requests(fields, [ids], limit, None, wanted if fields.logprobs else None, guides)
        prompts = tuple(self.templates.shown(ids) for ids in [ids])
        reads = bool(tools) and self.templates.hermes
        return Plan(fields, requests, prompts, elapsed, reads, grammar_s)

    def text(self, fields: TextFields) -> Plan:
        """A plan for texts that are continued as they are.

        Raises:
            ApiError: 400; names the field that cannot be honoured.
        """
        begun = time.perf_counter()
        if fields.echo and fields.logprobs is not None:
            raise bad("echo", "echo with logprobs is not supported, as prompts have none")
        special = fields.add_special_tokens is not False
        given = _prompts(fields.prompt)
        self._check_count(len(given), fields.n or 1)
        prompts = [
            self.templates.text(prompt, special) if isinstance(prompt, str) else list(prompt)
            for prompt in given
        ]
        elapsed = time.perf_counter() - begun
        shown = tuple(
            prompt if isinstance(prompt, str) else self.templates.shown(self._known(prompt))
            for prompt in given
        )
        requests = self._requests(fields, prompts, fields.max_tokens, _TEXT_TOKENS, fields.logprobs, [])
        return Plan(fields, requests, shown, elapsed)

    def _check_chat(self, fields: ChatFields) -> None:
        """Fields that exclude each other."""
        form = fields.response_format
        bound = form is not None and form.type != "text"
        forced = fields.tool_choice not in (None, "auto", "none")
        self._check_count(1, fields.n or 1)
        if fields.top_logprobs is not None and not fields.logprobs:
            raise bad("top_logprobs", "top_logprobs needs logprobs to be true")
        if fields.max_tokens and fields.max_completion_tokens not in (None, fields.max_tokens):
            raise bad("max_tokens", "max_tokens and max_completion_tokens say different things; give one")
        if bound and fields.tools and fields.tool_choice != "none":
            raise bad("response_format", "response_format cannot be combined with tools")
        if forced and not fields.tools:
            raise bad("tool_choice", "tool_choice names tools, but there are no tools")
        if forced and not self.templates.hermes:
            raise bad(
                "tool_choice", "the chat template has no known form of tool calls that could be enforced"
            )
        for name in ("ignore_eos", "min_tokens"):
            if (bound or forced) and getattr(fields, name):
                raise bad(name, f"{name} cannot be combined with a grammar, which says where the text ends")

    def _check_count(self, prompts: int, choices: int) -> None:
        if prompts * choices > self._most:
            name = "prompt" if prompts > self._most else "n"
            raise bad(
                name, f"{prompts} prompts times n {choices} are more texts than the {self._most} allowed"
            )

    def _requests(
        self,
        fields: SharedFields,
        prompts: Sequence[list[int]],
        limit: int | None,
        usual: int | None,
        logprobs: int | None,
        guides: list[ParserGuide],
    ) -> tuple[Request, ...]:
        """One request per prompt and choice; of n choices each has a seed of its own."""
        if fields.draft is False and not self._exact:
            raise bad("draft", "draft false needs the acceptor match")
        requests: list[Request] = []
        for ids in prompts:
            most = self._most_tokens(fields, self._known(ids), limit, usual)
            for choice in range(fields.n or 1):
                guide = guides[len(requests)] if guides else None
                requests.append(
                    Request(
                        tuple(ids),
                        self._sampling(fields, most, choice),
                        logprobs=logprobs,
                        grammar=None if guide is None else partial(_itself, guide),
                        draft=fields.draft is not False,
                    )
                )
        return tuple(requests)

    def _known(self, ids: list[int]) -> list[int]:
        """Ids that the model knows, at least one."""
        if not ids:
            raise ApiError(400, "the prompt is empty", "prompt")
        wrong = next((token for token in ids if token >= self._info.vocab_size), None)
        if wrong is not None:
            raise bad("prompt", f"token {wrong} is outside the vocabulary of {self._info.vocab_size}")
        return ids

    def _most_tokens(self, fields: SharedFields, ids: list[int], limit: int | None, usual: int | None) -> int:
        """Most tokens of an answer; what does not fit is refused with the numbers."""
        room = self._context - len(ids)
        wanted = limit if limit is not None else 1
        if room < wanted:
            asked = f" and max_tokens is {limit}" if limit is not None else ""
            name = "messages" if isinstance(fields, ChatFields) else "prompt"
            raise bad(
                name if room < 1 or limit is None else "max_tokens",
                f"the context holds {self._context} tokens, but the prompt has {len(ids)}{asked}",
            )
        return limit if limit is not None else min(room, usual or room)

    def _sampling(self, fields: SharedFields, most: int, choice: int) -> SamplingOptions:
        """The engine's own options; unset fields mean what they mean to OpenAI."""
        seed = fields.seed if fields.seed is not None else time.time_ns()
        stop = fields.stop or ()
        ids = tuple(fields.stop_token_ids or ())
        vocab_size = self._info.vocab_size
        if any(token >= vocab_size for token in ids):
            raise bad("stop_token_ids", f"stop_token_ids has a token outside the vocabulary of {vocab_size}")
        try:
            return SamplingOptions(
                temperature=_or(fields.temperature, 1.0),
                top_k=max(_or(fields.top_k, 0), 0),
                top_p=_or(fields.top_p, 1.0),
                min_p=_or(fields.min_p, 0.0),
                repetition_penalty=_or(fields.repetition_penalty, 1.0),
                presence_penalty=_or(fields.presence_penalty, 0.0),
                frequency_penalty=_or(fields.frequency_penalty, 0.0),
                logit_bias=self._bias(fields.logit_bias or {}),
                # Consecutive seeds of nearby calls must not share noise, so choices lie far apart.
                seed=(seed + choice * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63,
                max_tokens=most,
                min_tokens=_or(fields.min_tokens, 0),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                stop_token_ids=ids,
                ignore_eos=bool(fields.ignore_eos),
            )
        except InputError as error:
            raise bad(str(error).split()[0], str(error)) from error

    def _bias(self, given: dict[str, float]) -> dict[int, float]:
        bias = {}
        for word, value in given.items():
            known = word.isascii() and word.isdecimal() and len(word) < 12
            if not known or int(word) >= self._info.vocab_size:
                raise bad("logit_bias", f"logit_bias has {word[:40]!r}, which is no token of this model")
            bias[int(word)] = value
        return bias


def _itself(guide: ParserGuide) -> ParserGuide:
    return guide


def _or(value: _T | None, otherwise: _T) -> _T:
    return otherwise if value is None else value


def _prompts(prompt: str | list[int] | list[str] | list[list[int]]) -> list[str] | list[list[int]]:
    """Any of the four forms as a list of prompts."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt[0], int):
        return [prompt]
    return prompt
