"""Any OpenAI-compatible server as one of the systems: streamed completions of token ids, and its counters.

Prompts are sent as ids, so that the template is ours. How engines differ stands in `engines`; what they say
of acceptance is read in `counters`.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from slipstream.bench import counters
from slipstream.bench.engines import about, as_openai, dialect_of
from slipstream.bench.records import Measured, Side
from slipstream.core.errors import InputError
from slipstream.core.records import Request
from slipstream.data.openai_server import OpenAIServer

#: Counters may be written a little after the answer has ended.
_LAG_S: Final = 0.05
_LOOKS: Final = 6


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
    details: Mapping[str, Any] = field(default_factory=dict)
    mean: float | None = None

    def add(self, chunk: Mapping[str, Any], now: float) -> None:
        """One event of the stream."""
        self.usage = chunk.get("usage") or self.usage
        self.timings = chunk.get("timings") or self.timings
        self.details = (chunk.get("sglext") or {}).get("spec_tokens_details") or self.details
        for choice in chunk.get("choices") or ():
            self.reason = choice.get("finish_reason") or self.reason
            self.mean = choice.get("avg_decoded_tokens_per_iter") or self.mean
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
        listed = self._server.models()
        asked = next((one for one in listed if one["id"] == model), listed[0])
        self._model = model or str(asked["id"])
        self._dialect = dialect_of(str(asked.get("owned_by") or ""))
        said = about(self._server, self._dialect.about)
        root = self._server.root
        engine = " ".join(filter(None, (self._dialect.name, said.version)))
        detail = f"{self._model} at {root}" + (f" ({engine})" if engine else "")
        self.side = Side(f"url:{root.split('//')[-1]}", "url", False, detail, said.block_size)

    def answer(self, request: Request, origin: float, alone: bool = True) -> Measured:
        """Stream one completion; `alone` says that nobody else moves the server's counters.

        Raises:
            InputError: the server refuses the request or goes away.
        """
        before = self.counters() if alone else {}
        body = self._dialect.body(request, self._model, uuid.uuid4().hex)
        reply = _Reply(time.perf_counter())
        for chunk in self._stream(body):
            reply.add(as_openai(chunk), time.perf_counter())
        ended = time.perf_counter()
        ids, past_end = self._ids(reply, request)
        details = reply.usage.get("prompt_tokens_details") or {}
        return Measured(
            token_ids=tuple(ids),
            text=reply.text or self._text(ids),
            stop_reason="stop" if reply.reason == "stop" else "length",
            started_s=reply.begun - origin,
            ttft_s=(reply.first or ended) - reply.begun,
            decode_s=max(reply.last - reply.first, 0.0),
            total_s=ended - reply.begun,
            past_end=past_end,
            cached_tokens=int(details.get("cached_tokens") or 0),
            **self._counts(reply, len(ids), before if alone else None),
        )

    def counters(self) -> counters.Counters:
        """Speculative counters of the server so far, under our names; empty if it has none."""
        return counters.read_counters(self._page())

    def _page(self) -> str:
        """Its Prometheus metrics; empty if it has none."""
        for path in self._dialect.metrics:
            try:
                with self._server.open(path) as reply:
                    return str(reply.read().decode("utf-8", "replace"))
            except InputError:
                continue
        return ""

    def _counts(self, reply: _Reply, tokens: int, before: Mapping[str, int] | None) -> dict[str, Any]:
        """The best that the server says: of this reply, then counters, then a mean of all that it served."""
        counts = counters.of_details(reply.details, tokens) or counters.of_timings(reply.timings, tokens)
        if not counts and before is not None and tokens > 1:
            counts = self._added(before, tokens)
        counts = counts or counters.of_mean(reply.mean, tokens)
        if not counts and before is not None:
            mean = counters.read_mean(self._page()) or about(self._server, self._dialect.about).mean
            return {} if mean is None else {"stated_acceptance": mean}
        return counts

    def _added(self, before: Mapping[str, int], tokens: int) -> dict[str, Any]:
        """What the request added to the counters, once they show it."""
        for look in range(_LOOKS):
            after = self.counters()
            if not after or after != before:
                return counters.of_counters(before, after, tokens)
            if look + 1 < _LOOKS:
                time.sleep(_LAG_S)
        return {}

    def _ids(self, reply: _Reply, request: Request) -> tuple[list[int], int]:
        """Token ids up to the end of the text, and how many more were sent or counted."""
        ids = list(reply.ids) or list(self._tokenizer(reply.text, add_special_tokens=False)["input_ids"])
        stop = next((place for place, token in enumerate(ids) if token in self._ends), None)
        kept = ids if stop is None else ids[: stop + 1]
        if stop is None and reply.reason == "stop" and not request.sampling.stop and self._ends:
            # It ended by a token that was not sent; we count and compare it.
            own = self._tokenizer.eos_token_id
            kept = [*ids, own if own in self._ends else min(self._ends)]
        counted = int(reply.usage.get("completion_tokens") or 0) if reply.ids else 0
        return kept, max(len(ids) - len(kept), counted - len(kept), 0)

    def _text(self, ids: Sequence[int]) -> str:
        """Of ids that came without it."""
        shown = [token for token in ids if token not in self._ends]
        return str(self._tokenizer.decode(shown)) if shown else ""

    def _stream(self, body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        with self._server.open(self._dialect.path, body) as reply:
            for raw in reply:
                line = raw.decode("utf-8", "replace").strip()
                if not line.startswith("data:") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data:"))
                if chunk.get("error"):
                    raise InputError(f"{self._server.root} answers with an error: {chunk['error']}")
                yield chunk
