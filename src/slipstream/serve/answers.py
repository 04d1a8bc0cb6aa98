"""What clients get to read: chat completions, text completions, their chunks, usage and times.

Plain functions and small classes from pieces to JSON-ready objects; no engine, no HTTP.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from slipstream.core.records import Completion, Piece, TokenLogprob, total_acceptance
from slipstream.serve.fields import ChatFields
from slipstream.serve.plan import Plan
from slipstream.serve.tokens import TokenTexts
from slipstream.serve.tools import ToolReader

#: JSON has no infinity.
_LEAST_LOGPROB = -9999.0


@dataclass
class Choice:
    """One text of an answer as it grows.

    Attributes:
        tools: finds tool calls; None leaves all text as it is.
        text: said so far, tool calls left out.
        calls: tool calls so far.
        logprobs: of all tokens so far.
        length: characters of these tokens.
        reason: why the text ended.
        done: the finished text.
    """

    tools: ToolReader | None
    text: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    length: int = 0
    reason: str | None = None
    done: Completion | None = None

    def add(self, piece: Piece) -> list[dict[str, Any]]:
        """Take a piece; the deltas that it makes."""
        last = piece.finish_reason is not None
        deltas: list[dict[str, Any]] = [{"content": piece.text}] if piece.text else []
        if self.tools is not None:
            deltas = self.tools.feed(piece.text, last)
        for delta in deltas:
            self.text += delta.get("content", "")
            self.calls += [
                {key: value for key, value in call.items() if key != "index"}
                for call in delta.get("tool_calls", ())
            ]
        self.logprobs += piece.logprobs
        if last:
            self.reason = "tool_calls" if self.calls else piece.finish_reason
        return deltas


class Answer:
    """The form of an answer, of chats or of plain texts.

    Args:
        plan: what is decoded.
        model: name that is told.
        ident: of the call.
        tokens: texts of tokens, for log-probabilities.
    """

    def __init__(self, plan: Plan, model: str, ident: str, tokens: TokenTexts) -> None:
        self.plan = plan
        self._tokens = tokens
        self._chat = isinstance(plan.fields, ChatFields)
        self._ident, self._model = ("chatcmpl-" if self._chat else "cmpl-") + ident, model
        self._created = int(time.time())
        most = 1 if getattr(plan.fields, "parallel_tool_calls", None) is False else None
        self.choices = [Choice(ToolReader(most) if plan.tool_calls else None) for _ in plan.requests]
        if getattr(plan.fields, "echo", None):
            n = plan.fields.n or 1
            for number, choice in enumerate(self.choices):
                choice.text = plan.prompts[number // n]

    @property
    def completions(self) -> list[Completion]:
        """Of the texts that have ended."""
        return [choice.done for choice in self.choices if choice.done is not None]

    def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        choices = []
        for index, choice in enumerate(self.choices):
            entry: dict[str, Any] = {"index": index, "finish_reason": choice.reason}
            if self._chat:
                message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
                if choice.calls:
                    message |= {"content": choice.text or None, "tool_calls": choice.calls}
                entry["message"] = message
            else:
                entry["text"] = choice.text
            entry["logprobs"] = self._logprobs(choice.logprobs, 0)
            if self.plan.fields.return_token_ids and choice.done is not None:
                entry["token_ids"] = list(choice.done.token_ids)
            choices.append(entry)
        document = self._document("chat.completion" if self._chat else "text_completion", choices)
        return document | {"usage": usage(self.completions, self._n), "timings": self.timings()}

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before any text: roles, or prompts that are echoed."""
        if self._chat:
            return [
                self._chunk(index, {"delta": {"role": "assistant", "content": ""}})
                for index in range(len(self.choices))
            ]
        return [
            self._chunk(index, {"text": choice.text})
            for index, choice in enumerate(self.choices)
            if choice.text
        ]

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """What a piece adds to a stream."""
        choice = self.choices[index]
        said = choice.length
        deltas = choice.add(piece)
        choice.length += sum(len(self._tokens.text(item.token)) for item in piece.logprobs)
        with_ids = bool(self.plan.fields.return_token_ids)
        if not deltas and (piece.logprobs or self._spans or with_ids):
            deltas = [{"content": ""}]
        chunks = []
        for number, delta in enumerate(deltas):
            entry = {"delta": delta} if self._chat else {"text": delta.get("content", "")}
            chunk = self._chunk(index, entry)
            if number == 0:
                chunk["choices"][0]["logprobs"] = self._logprobs(piece.logprobs, said)
                if with_ids:
                    chunk["choices"][0]["token_ids"] = list(piece.token_ids)
                if self._spans:
                    chunk["slipstream"] = {"spans": piece.spans, "tokens": len(piece.token_ids)}
            chunks.append(chunk)
        return chunks

    def ending(self, index: int) -> dict[str, Any]:
        """The last chunk of a text."""
        choice = self.choices[index]
        entry: dict[str, Any] = {"delta": {}} if self._chat else {"text": ""}
        chunk = self._chunk(index, entry | {"finish_reason": choice.reason})
        if len(self.completions) == len(self.choices):
            chunk["timings"] = self.timings()
        return chunk

    def closing(self) -> list[dict[str, Any]]:
        """The chunk with usage, where it is asked for."""
        if not self._usage:
            return []
        chunk = self._document(self._chunk_kind, [])
        return [chunk | {"usage": usage(self.completions, self._n), "timings": self.timings()}]

    def timings(self) -> dict[str, float]:
        """Milliseconds, of the slowest text where there are several."""
        done = self.completions
        return {
            "template_ms": round(self.plan.template_s * 1e3, 3),
            "grammar_ms": round(self.plan.grammar_s * 1e3, 3),
            "queue_ms": round(max((c.queue_s for c in done), default=0.0) * 1e3, 3),
            "prefill_ms": round(max((c.ttft_s - c.queue_s for c in done), default=0.0) * 1e3, 3),
            "decode_ms": round(max((c.decode_s for c in done), default=0.0) * 1e3, 3),
        }

    @property
    def _n(self) -> int:
        return self.plan.fields.n or 1

    @property
    def _usage(self) -> bool:
        options = self.plan.fields.stream_options
        return options is not None and options.include_usage

    @property
    def _spans(self) -> bool:
        options = self.plan.fields.stream_options
        return options is not None and options.include_spans

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._chat else "text_completion"

    def _chunk(self, index: int, entry: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "logprobs": None, "finish_reason": None} | entry
        chunk = self._document(self._chunk_kind, [choice])
        return chunk | {"usage": None} if self._usage else chunk

    def _document(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = {"id": self._ident, "object": kind, "created": self._created, "model": self._model}
        return head | {"choices": choices}

    def _logprobs(self, items: Sequence[TokenLogprob], offset: int) -> dict[str, Any] | None:
        """In the form of chats or of plain texts; None where nobody asked."""
        if self.plan.requests[0].logprobs is None:
            return None
        if self._chat:
            entries = [
                self._entry(item.token, item.logprob)
                | {"top_logprobs": [self._entry(token, value) for token, value in item.top]}
                for item in items
            ]
            return {"content": entries, "refusal": None}
        texts = [self._tokens.text(item.token) for item in items]
        offsets = list(accumulate(map(len, texts[:-1]), initial=offset))
        return {
            "tokens": texts,
            "token_logprobs": [max(item.logprob, _LEAST_LOGPROB) for item in items],
            "top_logprobs": [
                {self._tokens.text(token): max(value, _LEAST_LOGPROB) for token, value in reversed(item.top)}
                for item in items
            ],
            "text_offset": offsets[: len(texts)],
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._tokens.text(token)
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": self._tokens.bytes(token)}


def usage(done: Sequence[Completion], n: int) -> dict[str, Any]:
    """Tokens of an answer; a prompt counts once, however many choices it has.

    Args:
        done: its texts, all choices of one prompt in a row.
        n: choices per prompt.
    """
    prompt = sum(item.prompt_tokens for item in done[::n])
    said = sum(item.completion_tokens for item in done)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": said,
        "total_tokens": prompt + said,
        "prompt_tokens_details": {"cached_tokens": sum(item.cached_tokens for item in done[::n])},
        "completion_tokens_details": drafting(done),
    }


def drafting(done: Sequence[Completion]) -> dict[str, Any]:
    """What drafting did for some texts."""
    most = max((len(item.accepted_per_position) for item in done), default=0)
    by_position = [
        sum(item.accepted_per_position[place] for item in done if place < len(item.accepted_per_position))
        for place in range(most)
    ]
    return {
        "drafted_tokens": sum(item.drafts for item in done),
        "accepted_tokens": sum(by_position),
        "accepted_per_position": by_position,
        "rounds": sum(item.rounds for item in done),
        "rounds_without_drafts": sum(item.parked for item in done),
        "acceptance_length": round(total_acceptance(done), 4),
    }
