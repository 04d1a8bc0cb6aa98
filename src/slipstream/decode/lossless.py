"""The losslessness report: drafted text against plain decoding in the same shapes and in one-row shapes.

Same shapes (a block whose drafts are never kept) must give the same ids in every dtype. One-row decoding
runs other matrix products, whose last bits differ; there the ids may part only where the two best scores
lie closer than rounding can tell, or where a filter's border lies so close to one of the two tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode.engine import Engine
from slipstream.decode.noise import gumbel
from slipstream.decode.plain import scores_with_history, survivors
from slipstream.decode.propose import NullProposer, Proposer
from slipstream.target import Target


@dataclass(frozen=True)
class Difference:
    """Where two texts part.

    Attributes:
        position: index among the emitted tokens.
        drafted: token of the drafted text there; -1 past its end.
        plain: token of the plain text there; -1 past its end.
        gap: distance of the one-row scores of `plain` and `drafted`, in logits; infinite where rounding
            cannot have led to `drafted` at all.
        bound: the largest gap that rounding may explain at these logits.
        at_filter: moving logits by no more than the bound has a filter keep or drop one of the two tokens,
            and that explains the difference.
    """

    position: int
    drafted: int
    plain: int
    gap: float
    bound: float
    at_filter: bool = False

    @property
    def is_tie(self) -> bool:
        """Whether rounding explains the difference."""
        return self.at_filter or self.gap <= self.bound


@dataclass(frozen=True)
class RequestReport:
    """One request's comparison.

    Attributes:
        tokens: emitted by drafted decoding.
        acceptance_length: of drafted decoding.
        same_shape: None where the texts are equal.
        one_row: None where the texts are equal.
    """

    tokens: int
    acceptance_length: float
    same_shape: Difference | None
    one_row: Difference | None

    @property
    def exact(self) -> bool:
        """Equal in the same shapes, and in one-row shapes up to ties."""
        return self.same_shape is None and (self.one_row is None or self.one_row.is_tie)


@dataclass(frozen=True)
class Report:
    """All requests; `exact` is the verdict, `graphs` says how the drafted rounds were run."""

    dtype: str
    block_size: int
    requests: tuple[RequestReport, ...]
    graphs: str = ""

    @property
    def exact(self) -> bool:
        """No request has a real difference."""
        return all(request.exact for request in self.requests)

    @property
    def ties(self) -> int:
        """Requests whose one-row text parts at a tie."""
        return sum(request.one_row is not None and request.one_row.is_tie for request in self.requests)


def check(
    target: Target,
    proposer: Proposer,
    requests: Sequence[Request],
    options: EngineOptions = EngineOptions(),
    report: Callable[[int, RequestReport], None] | None = None,
) -> Report:
    """Decode every request three times, alone, and compare.

    Args:
        target: whose text it is.
        proposer: the drafter under test.
        requests: with their own sampling settings.
        options: of the engine; the acceptor must be `match`.
        report: gets each request's comparison as it is done.
    """
    # Every draft that can be made is tested.
    options = replace(options, drafts="max", prefix_tokens=0)
    drafted = Engine(target, proposer, options)
    same_shape = Engine(target, NullProposer(drafted.block_size, proposer.tap_ids), options)
    one_row = Engine(target, None, options)
    done = []
    for number, request in enumerate(requests):
        completion = drafted.generate([request])[0]
        ids = completion.token_ids
        done.append(
            RequestReport(
                tokens=len(ids),
                acceptance_length=completion.acceptance_length,
                same_shape=first_difference(
                    target, request, ids, same_shape.generate([request])[0].token_ids
                ),
                one_row=first_difference(target, request, ids, one_row.generate([request])[0].token_ids),
            )
        )
        if report is not None:
            report(number, done[-1])
    dtype = str(target.dtype).removeprefix("torch.")
    return Report(dtype, drafted.block_size, tuple(done), drafted.graphs.sentence())


@torch.no_grad()
def first_difference(
    target: Target, request: Request, drafted: Sequence[int], plain: Sequence[int]
) -> Difference | None:
    """None for equal texts, else where they part and whether rounding explains it.

    Args:
        target: whose texts they are.
        request: what was asked.
        drafted: token ids of one text.
        plain: token ids of the other, decoded one row at a time.
    """
    if tuple(drafted) == tuple(plain):
        return None
    position = _first_difference(drafted, plain)
    pair = [text[position] if position < len(text) else -1 for text in (drafted, plain)]
    if -1 in pair:
        # One text goes on where the other ended after equal tokens: never a matter of rounding.
        return Difference(position, pair[0], pair[1], math.inf, 0.0)
    logits_V = _one_row_logits(target, request, plain[:position])
    bound = rounding_bound(target, logits_V)
    gap, at_filter = _explain(target, request, plain[:position], logits_V, pair[1], pair[0], bound)
    return Difference(position, pair[0], pair[1], gap, bound, at_filter)


def rounding_bound(target: Target, logits_V: Tensor) -> float:
    """How far rounding may move a logit, as an estimate.

    Errors of independent roundings grow like a random walk: one rounding to the model's dtype per layer, and
    one float32 rounding per product term, each at most half an eps of the largest logit.
    """
    info = target.info
    rounding = torch.finfo(target.dtype).eps / 2 * math.sqrt(info.num_layers)
    summing = torch.finfo(torch.float32).eps / 2 * math.sqrt(info.num_layers * info.width)
    return float(logits_V.abs().max()) * (rounding + summing)  # host: report


def _first_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Index of the first unequal token, or where the shorter one ends."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


@torch.no_grad()
def _one_row_logits(target: Target, request: Request, said: Sequence[int]) -> Tensor:
    """Logits after the prompt and `said`, computed one token at a time as plain decoding does."""
    prompt = list(request.prompt_ids)
    cache = target.new_cache(1, len(prompt) + len(said) + 1)
    ids_BL = torch.tensor([prompt], device=target.device)
    length_B = torch.tensor([len(prompt)], device=target.device)
    logits_V = target.prefill(ids_BL, length_B, cache).logits_BV[0]
    for number, token in enumerate(said):
        token_B1 = torch.tensor([[token]], device=target.device)
        logits_V = target.verify(token_B1, length_B + number, cache).logits_BTV[0, 0]
    return logits_V


def _explain(
    target: Target,
    request: Request,
    said: Sequence[int],
    logits_V: Tensor,
    chosen: int,
    other: int,
    bound: float,
) -> tuple[float, bool]:
    """Whether rounding turns the choice of `chosen` into that of `other`.

    Returns:
        The gap and `at_filter` of a `Difference`. Noise counts in logits, scaled back by the temperature.
    """
    options, prompt = request.sampling, list(request.prompt_ids)
    ends = set(options.end_ids(target.info.eos_token_ids))
    scores = scores_with_history(logits_V.tolist(), prompt, list(said), ends, options)  # host: report
    gap = scores[chosen] - scores[other]
    if options.temperature == 0:
        return abs(gap), False
    position = torch.tensor([[len(prompt) + len(said)]])
    noise = gumbel(torch.tensor([options.seed]), position, len(scores))[0, 0]
    gap += options.temperature * float(noise[chosen] - noise[other])  # host: report
    kept = _kept(scores, other, options, 0.0)
    if not (kept or _kept(scores, other, options, bound)):
        return math.inf, False
    # Either a dropped token comes in and wins, or the winner is dropped.
    enters = not kept and gap <= bound
    leaves = gap > bound and not _kept(scores, chosen, options, -bound)
    return abs(gap), enters or leaves


def _kept(scores: Sequence[float], token: int, options: SamplingOptions, shift: float) -> bool:
    """Whether a token survives the filters after moving logits in its favour, or, below 0, to its harm.

    Every logit moves by half of `shift`, so that no two move apart by more. Rivals move against the token:
    the likelier ones, and, to its harm, those close enough to overtake it. All others move with it, as their
    mass speaks for it in top-p. Nothing better or worse can happen to it under any of the filters.
    """
    least = scores[token] + min(shift, 0.0)
    rivals = [score > least and v != token for v, score in enumerate(scores)]
    moved = [score + (-shift if rival else shift) / 2 for score, rival in zip(scores, rivals, strict=True)]
    return token in survivors([score / options.temperature for score in moved], options)
