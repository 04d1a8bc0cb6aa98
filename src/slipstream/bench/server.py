"""Any OpenAI-compatible server as one of the systems: streamed completions of token ids, and its counters.

Prompts are sent as ids, so that the template is ours. Acceptance is read from where servers tell it: the
counters of vLLM at /metrics, the timings of llama.cpp in its last chunk.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.bench.records import Measured, Side
from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.data.openai_server import OpenAIServer

_COUNTER = re.compile(r"^vllm:spec_decode_num_(\w+?)(?:_total)?(\{[^}]*\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass
class _Reply:
    """A streamed answer as it comes."""

    begun: float
    first: float = 0.0
    last: float = 0.0
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str = ""
    usage: Mapping[str, Any] = field(default_factory=dict)
    timings: Mapping[str, Any] = field(default_factory=dict)

    def add(self, chunk: Mapping[str, Any], now: float) -> None:
        """One event of the stream."""
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        for choice in chunk.get("choices") or ():
            self.reason = choice.get("finish_reason") or self.reason
            text, ids = choice.get("text") or "", choice.get("token_ids") or ()
            if text or ids:
                self.first, self.last = self.first or now, now
                self.text += text
                self.ids += ids


class ServerSystem:
    """A server by its URL.

    Args:
        url: with or without `/v1`.
        tokenizer: of the target.
        end_ids: tokens that end an answer.
        model: name to ask for; None takes the first that the server lists.
        api_key: sent as a bearer token.

    Raises:
        InputError: no server answers there.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        end_ids: Sequence[int],
        model: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._server = OpenAIServer(url, api_key)
        self._tokenizer, self._ends = tokenizer, frozenset(end_ids)
        self._model = model or self._server.first_model()
        self._counts = self.counters() is not None
        root = self._server.root
        self.side = Side(f"url:{root.split('//')[-1]}", "url", False, f"{self._model} at {root}")

    def answer(self, request: Request, origin: float, alone: bool = True) -> Measured:
        """Stream one completion; `alone` says that nobody else moves the server's counters.

        Raises:
            InputError: the server refuses the request or goes away.
        """
        before = self.counters() if alone and self._counts else None
        reply = _Reply(time.perf_counter())
        for chunk in self._stream(request_body(request, self._model)):
            reply.add(chunk, time.perf_counter())
        ended = time.perf_counter()
        after = self.counters() if before is not None else None
        ids, past_end = self._ids(reply)
        counts = _difference(before, after) or _timings(reply, len(ids))
        details = reply.usage.get("prompt_tokens_details") or {}
        return Measured(
            token_ids=tuple(ids),
            text=reply.text,
            stop_reason="stop" if reply.reason == "stop" else "length",
            started_s=reply.begun - origin,
            ttft_s=(reply.first or ended) - reply.begun,
            decode_s=max(reply.last - reply.first, 0.0),
            total_s=ended - reply.begun,
            past_end=past_end,
            cached_tokens=int(details.get("cached_tokens") or 0),
            **counts,
        )

    def counters(self) -> dict[str, int] | None:
        """Speculative counters of vLLM so far, those of positions as `position 0` and so on; None if it has
        none.
        """
        try:
            with self._server.open("/metrics") as reply:
                return read_counters(str(reply.read().decode("utf-8", "replace")))
        except InputError:
            return None

    def _ids(self, reply: _Reply) -> tuple[list[int], int]:
        """Token ids up to the end of the text, and how many more were sent or counted."""
        ids = list(reply.ids)
        if not ids:
            ids = list(self._tokenizer(reply.text, add_special_tokens=False)["input_ids"])
            end = self._tokenizer.eos_token_id
            return [*ids, end] if reply.reason == "stop" and end is not None else ids, 0
        stop = next((place for place, token in enumerate(ids) if token in self._ends), None)
        kept = ids if stop is None else ids[: stop + 1]
        counted = int(reply.usage.get("completion_tokens") or len(ids))
        # A stop token that is not sent is counted rightly.
        unsent = int(stop is None and reply.reason == "stop")
        return kept, max(len(ids) - len(kept), counted - len(kept) - unsent, 0)

    def _stream(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        with self._server.open("/v1/completions", body) as reply:
            for raw in reply:
                line = raw.decode("utf-8", "replace").strip()
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data:"))
                if chunk.get("error"):
                    raise InputError(f"{self._server.root} answers with an error: {chunk['error']}")
                yield chunk


def request_body(request: Request, model: str) -> dict[str, Any]:
    """What is asked, every setting stated, so that a server's own defaults have no say."""
    sampling: SamplingOptions = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed % 2**31,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }


def read_counters(text: str) -> dict[str, int] | None:
    """The speculative counters of vLLM in a page of Prometheus metrics; None where there are none."""
    found: dict[str, int] = {}
    for name, labels, value in _COUNTER.findall(text):
        position = _POSITION.search(labels or "")
        if name.endswith("_per_pos"):
            if position is None:
                continue
            name = f"position {position[1]}"
        found[name] = found.get(name, 0) + int(float(value))
    return found or None


def _difference(before: dict[str, int] | None, after: dict[str, int] | None) -> dict[str, Any]:
    """What one request added to the counters of vLLM. It counts drafts past the end of a text, too."""
    if before is None or after is None:
        return {}
    added = {name: value - before.get(name, 0) for name, value in after.items()}
    rounds = added.get("drafts", 0)
    positions = sum(name.startswith("position ") for name in added)
    accepted = tuple(added.get(f"position {place}", 0) for place in range(positions))
    return {
        "rounds": rounds,
        "emitted_in_rounds": rounds + added.get("accepted_tokens", 0),
        "drafted_per_position": (rounds,) * positions,
        "tried_per_position": (rounds, *accepted[:-1]) if positions else (),
        "accepted_per_position": accepted,
    }


def _timings(reply: _Reply, tokens: int) -> dict[str, Any]:
    """What llama.cpp says in its last chunk: each pass emits its accepted drafts and one token more."""
    if not reply.timings.get("draft_n"):
        return {}
    said = int(reply.timings.get("predicted_n") or tokens)
    rounds = max(said - int(reply.timings.get("draft_n_accepted") or 0) - 1, 0)
    return {"rounds": rounds, "emitted_in_rounds": max(said - 1, 0)}
