"""Sampling noise as a pure function of (seed, position, token), so that it needs no generator and no order.

A counter-based hash (the finaliser of splitmix64: Steele, Lea, Flood, OOPSLA 2014) gives the same bits for
any batch, block or device, which is what makes drafted and plain text equal at any temperature.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Streams keep draws for different purposes apart. CHOICE is the target's own choice (and coupled drafts).
CHOICE, DRAFT, ACCEPT, RESIDUAL = range(4)

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def uniform(seed_B: Tensor, position_BT: Tensor, tokens: int | Tensor, stream: int = CHOICE) -> Tensor:
    """Uniform numbers strictly between 0 and 1.

    Args:
        seed_B: int64 seed per row.
        position_BT: int64 absolute position of the token to be drawn.
        tokens: how many numbers per position (V, or 1); or int64 ids [B, T, N] whose numbers are wanted.
        stream: purpose of the draw.

    Returns:
        float64 of shape [B, T, tokens], or [B, T, N].
    """
    key_BT = key(seed_B, position_BT, stream)
    ids = torch.arange(tokens, device=seed_B.device) if isinstance(tokens, int) else tokens
    bits_BTV = _mix(key_BT[..., None] + (ids + 1) * _GOLDEN)
    # 52 bits and a half: never 0, never 1, and exact in float64.
    return (_shift(bits_BTV, 12).double() + 0.5) * 2.0**-52


def key(seed_B: Tensor, position_BT: Tensor, stream: int = CHOICE) -> Tensor:
    """What the noise of a position is a hash of, together with the token's id; int64 [B, T]."""
    return _mix(_mix(seed_B[:, None] ^ (stream << 40)) + position_BT * _GOLDEN)


def gumbel(seed_B: Tensor, position_BT: Tensor, tokens: int | Tensor, stream: int = CHOICE) -> Tensor:
    """Standard Gumbel noise -log(-log(u)) as float32, of all V tokens or of the named ones, as in
    `uniform`.
    """
    noise_BTV = uniform(seed_B, position_BT, tokens, stream)
    return noise_BTV.log_().neg_().log_().neg_().float()


def _mix(z: Tensor) -> Tensor:
    """The splitmix64 finaliser on wrapping int64."""
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
