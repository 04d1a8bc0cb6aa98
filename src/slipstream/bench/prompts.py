"""Is a prompt language? Random tokens make acceptance and speed meaningless, so they are found and marked."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import torch

from slipstream.target import Target

#: Tokens that are looked at; fewer than the least say nothing.
_LOOK, _LEAST = 192, 24
#: Mean surprise as a share of that of a token drawn from all with equal chances. Language of any kind lies
#: below half of it under a trained model; tokens drawn at random lie above all of it.
_SHARE: Final = 0.85


@torch.no_grad()
def looks_random(target: Target, ids: Sequence[int]) -> bool:
    """Whether the target is as surprised by a prompt as by tokens drawn at random."""
    looked_at = list(ids[:_LOOK])
    if len(looked_at) < _LEAST:
        return False
    ids_BL = torch.tensor([looked_at], device=target.device)
    logits_BLV = target.recompute(ids_BL)
    surprise = torch.nn.functional.cross_entropy(logits_BLV[0, :-1], ids_BL[0, 1:])
    return float(surprise) > _SHARE * math.log(target.info.vocab_size)
