"""Requests whose prompts are being read, and the first token of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from slipstream.core.records import Request, TokenLogprob
from slipstream.decode.accept import Proposal
from slipstream.decode.grammar import follow
from slipstream.decode.history import History
from slipstream.decode.logprobs import most_logprobs, read_logprobs
from slipstream.decode.prefix import Kept
from slipstream.decode.sampling import RowSettings, choose
from slipstream.decode.stopping import Tracker
from slipstream.target import Prefill, Target


@dataclass
class Reading:
    """Requests whose prompts are being read together.

    Attributes:
        newcomers: by row.
        row_B: the rows.
        kept: per newcomer an earlier text that its prompt begins like, and how far.
        start_B: where reading begins, behind what is kept.
        length_B: of the rest of the prompts.
        parts: what reads them.
    """

    newcomers: dict[int, Tracker]
    row_B: Tensor
    kept: list[tuple[Kept | None, int]]
    start_B: Tensor
    length_B: Tensor
    parts: Iterator[int | Prefill]


def settings_of(target: Target, requests: list[Request]) -> RowSettings:
    """Sampling settings of requests on their target's device."""
    options = [request.sampling for request in requests]
    return RowSettings.of(options, target.info.vocab_size, target.device, target.kernels)


def first_tokens(
    target: Target, newcomers: list[Tracker], logits_BV: Tensor, length_B: Tensor
) -> tuple[Tensor, list[tuple[int, list[TokenLogprob]]]]:
    """The target's own choice after every prompt, in every mode.

    Args:
        target: whose choice it is.
        newcomers: in the order of the rows.
        logits_BV: after the last tokens of their prompts.
        length_B: of the prompts, which is the position of the choice.

    Returns:
        Tokens on the device; and each on the host, with its log-probabilities where its request asks.
    """
    requests = [tracker.request for tracker in newcomers]
    tokens_B = _choose(target, newcomers, logits_BV, length_B)
    ids: list[int] = tokens_B.tolist()  # host: once per newcomers
    most = most_logprobs(requests)
    likely: list[list[TokenLogprob]] = [[] for _ in ids]
    if most is not None:
        likely = read_logprobs(logits_BV[:, None], tokens_B[:, None], most)
    return tokens_B, list(zip(ids, likely, strict=True))


def _choose(target: Target, newcomers: list[Tracker], logits_BV: Tensor, length_B: Tensor) -> Tensor:
    info, device = target.info, target.device
    requests = [tracker.request for tracker in newcomers]
    history = History(requests, info.vocab_size, info.eos_token_ids, device)
    settings = settings_of(target, requests)
    position_BT = length_B[:, None]
    nothing = Proposal(length_B.new_empty(len(requests), 0))
    logits_BTV = history.adjust(logits_BV[:, None], nothing.drafts_BK, position_BT)
    guides = {place: t.guide for place, t in enumerate(newcomers) if t.guide is not None}
    if guides:
        logits_BTV = follow(guides, nothing, info.vocab_size)[1].constrain(logits_BTV)
    choice = choose(logits_BTV, position_BT, settings)
    if choice.short_B.any():  # host: once per newcomers
        choice = choose(logits_BTV, position_BT, settings, info.vocab_size)
    return choice.ids_BT[:, 0]
