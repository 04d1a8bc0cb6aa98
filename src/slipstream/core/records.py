"""What passes between the parts: requests, pieces of a stream, completions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from slipstream.core.options import SamplingOptions

FinishReason = Literal["stop", "length"]


class Guide(Protocol):
    """Which tokens a grammar allows next; follows one text.

    A guide whose parser gives up raises, and stands where it stood. On a draft that ends the drafts; on the
    text itself it ends the text, and no other.
    """

    def mask(self) -> bytes:
        """One bit per token, lowest first: token v is bit v % 8 of byte v // 8. Never all zeros."""

    def accept(self, token: int) -> bool:
        """Move on by a token; False, and no move, where the grammar forbids it."""

    def back(self, count: int) -> None:
        """Take back the last `count` tokens that were accepted."""


@dataclass(frozen=True)
class Request:
    """One prompt as token ids, with its own sampling settings.

    Attributes:
        prompt_ids: the prompt.
        sampling: how to decode.
        logprobs: report each token's log-probability and those of so many of the likeliest tokens; None
            reports nothing. They are the model's own: of its logits, before penalties, grammar, temperature
            and filters.
        grammar: makes what tells which tokens are allowed; called once per decoding.
        draft: False has no drafts made for this request; rounds that others share may still have some.
    """

    prompt_ids: Sequence[int]
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    logprobs: int | None = None
    grammar: Callable[[], Guide] | None = None
    draft: bool = True


@dataclass(frozen=True)
class TokenLogprob:
    """How likely one emitted token was.

    Attributes:
        token: its id.
        logprob: natural logarithm of its probability.
        top: the likeliest tokens and their log-probabilities, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Piece:
    """What one round added to one request's text.

    Attributes:
        index: which request of the batch.
        text: new text, complete characters only; may be empty while a character or stop string is undecided.
        token_ids: the tokens emitted in this round.
        accepted: how many of them were drafts (the rest, at most one, is the target's bonus token).
        spans: the new text again, cut where drafted and undrafted tokens meet: (text, was drafted).
        finish_reason: set on the last piece.
        logprobs: of the tokens, where the request asks for them.
        drafts: that the round had.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    accepted: int
    spans: tuple[tuple[str, bool], ...]
    finish_reason: FinishReason | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    drafts: int = 0


@dataclass(frozen=True)
class Completion:
    """One finished request.

    Attributes:
        text: the decoded answer, without stop token or stop string.
        token_ids: every emitted token, a final stop token included.
        prompt_tokens: length of the prompt.
        finish_reason: `stop` (stop token or string) or `length`.
        rounds: draft-verify rounds that this request took part in.
        emitted_in_rounds: tokens emitted by those rounds (the first token comes from prefill).
        accepted_per_position: at index k-1, in how many rounds draft k was kept.
        drafts: that were made in all rounds.
        parked: rounds that had none, as drafting did not pay.
        ttft_s: seconds from the start of the call to the first token.
        decode_s: seconds from the first token to the last.
        cached_tokens: of the prompt, whose keys and values were kept from an earlier request.
        queue_s: seconds of `ttft_s` that went by before the prompt's turn came.
        logprobs: of all tokens, where the request asked for them.
        failure: why the text ends where its grammar could be followed no further; else empty.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int
    finish_reason: FinishReason
    rounds: int
    emitted_in_rounds: int
    accepted_per_position: tuple[int, ...]
    ttft_s: float
    decode_s: float
    drafts: int = 0
    parked: int = 0
    cached_tokens: int = 0
    queue_s: float = 0.0
    logprobs: tuple[TokenLogprob, ...] = ()
    failure: str = ""

    @property
    def drafts_mean(self) -> float:
        """Drafts per round; 0.0 without rounds."""
        return self.drafts / self.rounds if self.rounds else 0.0

    @property
    def completion_tokens(self) -> int:
        """Tokens emitted, a final stop token included."""
        return len(self.token_ids)

    @property
    def acceptance_length(self) -> float:
        """Tokens emitted per round, bonus included, tokens after a stop not counted; 1.0 without rounds."""
        return self.emitted_in_rounds / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Decode-only rate: tokens after the first per second of decode_s."""
        return (self.completion_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True)
class GraphReport:
    """How an engine has run its rounds so far.

    Attributes:
        captured: kinds of rounds that were captured.
        replayed: rounds that were replayed.
        reason: why nothing is captured; empty where something is.
        as_they_are: rounds that were not replayed, by reason.
    """

    captured: int
    replayed: int
    reason: str
    as_they_are: Mapping[str, int]

    def sentence(self) -> str:
        """In a line, for people."""
        reasons = ", ".join(f"{count} as {reason}" for reason, count in self.as_they_are.items())
        whole = f"CUDA graphs: {self.replayed} rounds replayed, {self.captured} captured"
        return f"{whole}; run as they are: {reasons}" if reasons else whole


#: From a request's number and its completion to what is asked next, or None.
FollowUp = Callable[[int, Completion], Request | None]


def total_acceptance(completions: Iterable[Completion]) -> float:
    """Micro-averaged acceptance length: tokens emitted by rounds over their number; 1.0 without rounds."""
    done = list(completions)
    rounds = sum(item.rounds for item in done)
    return sum(item.emitted_in_rounds for item in done) / rounds if rounds else 1.0
