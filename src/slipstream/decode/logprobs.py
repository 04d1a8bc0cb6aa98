"""Log-probabilities of what was said: the model's own, before penalties, grammar, temperature and filters."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from slipstream.core.records import Request, TokenLogprob


def most_logprobs(requests: Iterable[Request]) -> int | None:
    """The most that any of some requests wants; None where none wants any."""
    return max((r.logprobs for r in requests if r.logprobs is not None), default=None)


def read_logprobs(logits_BTV: Tensor, tokens_BT: Tensor, most: int) -> list[list[TokenLogprob]]:
    """Log-softmax of the logits at some tokens and at the `most` likeliest; a copy to the host of its own.

    Args:
        logits_BTV: float32, as the model gave them.
        tokens_BT: one token per slot.
        most: 0 reports the tokens alone.
    """
    mass_BT1 = logits_BTV.logsumexp(-1, keepdim=True)
    own = logits_BTV.gather(-1, tokens_BT[..., None]) - mass_BT1
    top = logits_BTV.topk(min(most, logits_BTV.shape[-1]), dim=-1)
    # float64 holds every token id and every float32 exactly.
    packed = torch.cat(
        [
            *(own.double(), tokens_BT[..., None].double()),
            (top.values - mass_BT1).double(),
            top.indices.double(),
        ],
        dim=-1,
    )
    rows: list[list[list[float]]] = packed.tolist()  # host: only where a request asks for log-probabilities
    return [[_unpacked(numbers) for numbers in row] for row in rows]


def _unpacked(numbers: list[float]) -> TokenLogprob:
    """One token of the packed numbers: its own, its id, values, indices."""
    count = (len(numbers) - 2) // 2
    values, ids = numbers[2 : 2 + count], numbers[2 + count :]
    top = tuple((int(token), value) for token, value in zip(ids, values, strict=True))
    return TokenLogprob(int(numbers[1]), numbers[0], top)
