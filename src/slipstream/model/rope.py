"""Rotary positions (Su et al., arXiv 2104.09864) in the half-split pairing of Llama and Qwen."""

from __future__ import annotations

import torch
from torch import Tensor


def rope_angles(position_BT: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines in float32, each of shape [B, 1, T, C], ready for [B, H, T, C].

    Args:
        position_BT: absolute positions.
        head_dim: C; channel i is rotated with channel i + C/2.
        theta: base of the frequencies theta^(-2i/C).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device=position_BT.device) / head_dim
    half = position_BT[:, None, :, None].float() * theta**-exponent
    angle = torch.cat([half, half], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x_BHTC: Tensor, cos_B1TC: Tensor, sin_B1TC: Tensor) -> Tensor:
    """Rotate channel pairs (i, i + C/2) by the angles; computed and returned in x's dtype."""
    first, second = x_BHTC.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return x_BHTC * cos_B1TC.to(x_BHTC.dtype) + turned * sin_B1TC.to(x_BHTC.dtype)
