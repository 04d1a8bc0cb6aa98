"""One request on the host: which tokens count, where the text ends, what the stream says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.core.records import Completion, FinishReason, Piece, Request, TokenLogprob
from slipstream.decode.grammar import Followed
from slipstream.decode.text import Detokenizer


class Tracker:
    """Follows one request from its first token to its end."""

    def __init__(
        self, index: int, request: Request, limit: int, ends: frozenset[int], block_size: int, tokenizer: Any
    ) -> None:
        """Begin.

        Args:
            index: of the request in its batch.
            request: prompt and settings.
            limit: most tokens to emit, context limit included.
            ends: ids that end the text.
            block_size: T, for the counts by position.
            tokenizer: or None.
        """
        self.index = index
        self.request = request
        self.finish_reason: FinishReason | None = None
        self.cancelled = False
        self.cached_tokens = 0
        self.token_ids: list[int] = []
        self.guide = Followed(request.grammar()) if request.grammar is not None else None
        self.started_at = self.admitted_at = self.first_at = self.last_at = 0.0
        self._logprobs: list[TokenLogprob] = []
        self._limit = limit
        self._ends = ends
        self._detokenizer = Detokenizer(tokenizer)
        self._stop = request.sampling.stop
        self._held: list[tuple[str, bool]] = []
        self._text: list[str] = []
        self._rounds = self._emitted = self._drafted = self._parked = 0
        self._accepted = [0] * (block_size - 1)

    @property
    def left(self) -> int:
        """Most tokens that it may still say."""
        return self._limit - len(self.token_ids)

    def first(self, token: int, now: float, logprobs: Sequence[TokenLogprob] = ()) -> Piece:
        """The token that prefill yields; not part of any round."""
        self.first_at = now
        return self._take([token], 0, now, logprobs)

    def round(
        self, tokens: Sequence[int], now: float, drafts: int, logprobs: Sequence[TokenLogprob] = ()
    ) -> Piece:
        """One round's tokens, drafts that were kept and the target's own last one, of so many drafts."""
        before = len(self.token_ids)
        piece = self._take(tokens, len(tokens) - 1, now, logprobs, drafts)
        self._rounds += 1
        self._drafted += drafts
        self._parked += drafts == 0
        self._emitted += len(self.token_ids) - before
        for position in range(piece.accepted):
            self._accepted[position] += 1
        return piece

    def completion(self) -> Completion:
        """The finished request."""
        assert self.finish_reason is not None
        return Completion(
            text="".join(self._text),
            token_ids=tuple(self.token_ids),
            prompt_tokens=len(self.request.prompt_ids),
            finish_reason=self.finish_reason,
            rounds=self._rounds,
            emitted_in_rounds=self._emitted,
            accepted_per_position=tuple(self._accepted),
            drafts=self._drafted,
            parked=self._parked,
            cached_tokens=self.cached_tokens,
            ttft_s=self.first_at - self.started_at,
            decode_s=self.last_at - self.first_at,
            queue_s=self.admitted_at - self.started_at,
            logprobs=tuple(self._logprobs),
            failure=self.guide.failure if self.guide is not None else "",
        )

    def _take(
        self,
        tokens: Sequence[int],
        drafted: int,
        now: float,
        logprobs: Sequence[TokenLogprob],
        drafts: int = 0,
    ) -> Piece:
        """Append tokens until the text ends; the first `drafted` of them were drafts, of so many made."""
        spans: list[tuple[str, bool]] = []
        before = len(self.token_ids)
        for number, token in enumerate(tokens):
            spans += self._one(token, number < drafted)
            if self.finish_reason is not None:
                break
        self.last_at, used = now, len(self.token_ids) - before
        text = "".join(part for part, _ in spans)
        self._text.append(text)
        taken, likely = tuple(tokens[:used]), self._asked(logprobs[:used])
        self._logprobs += likely
        spoken = (self.index, text, taken, min(drafted, used), _merged(spans), self.finish_reason)
        return Piece(*spoken, likely, drafts)

    def _asked(self, logprobs: Sequence[TokenLogprob]) -> tuple[TokenLogprob, ...]:
        """As many of the likeliest tokens as this request wants: a batch reads as many as any of it wants."""
        most = self.request.logprobs
        if most is None:
            return ()
        return tuple(TokenLogprob(item.token, item.logprob, item.top[:most]) for item in logprobs)

    def _one(self, token: int, drafted: bool) -> list[tuple[str, bool]]:
        """Append one token; the text that is certain after it."""
        if self.guide is not None and not self.guide.say(token, token in self._ends):
            self.finish_reason = "stop"
            return self._release(self._detokenizer.finish(), drafted)
        self.token_ids.append(token)
        if token in self._ends:
            self.finish_reason = "stop"
            return self._release(self._detokenizer.finish(), drafted)
        text = self._detokenizer.add(token)
        if len(self.token_ids) >= self._limit:
            self.finish_reason = "length"
            text += self._detokenizer.finish() if not text else ""
        return self._release(text, drafted)

    def _release(self, text: str, drafted: bool) -> list[tuple[str, bool]]:
        """Add text behind what is held; give out all but what may be the beginning of a stop string."""
        if text:
            self._held.append((text, drafted))
        whole = "".join(part for part, _ in self._held)
        if len(self.token_ids) >= max(1, self.request.sampling.min_tokens):
            found = [place for stop in self._stop if (place := whole.find(stop)) >= 0]
            if found:
                self.finish_reason = "stop"
                return self._give(min(found))
        if self.finish_reason is not None:
            return self._give(len(whole))
        return self._give(len(whole) - _overlap(whole, self._stop))

    def _give(self, length: int) -> list[tuple[str, bool]]:
        """Take `length` characters from what is held; the rest stays held."""
        given: list[tuple[str, bool]] = []
        kept: list[tuple[str, bool]] = []
        for part, drafted in self._held:
            head, tail = part[:length], part[length:]
            length -= len(head)
            if head:
                given.append((head, drafted))
            if tail:
                kept.append((tail, drafted))
        self._held = kept
        return given


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


def _merged(spans: Sequence[tuple[str, bool]]) -> tuple[tuple[str, bool], ...]:
    """Join neighbours of one kind."""
    merged: list[tuple[str, bool]] = []
    for text, drafted in spans:
        if merged and merged[-1][1] == drafted:
            merged[-1] = (merged[-1][0] + text, drafted)
        else:
            merged.append((text, drafted))
    return tuple(merged)
