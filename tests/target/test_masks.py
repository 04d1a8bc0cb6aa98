"""Masks by enumeration."""

from __future__ import annotations

import pytest
import torch

from slipstream.target.masks import causal_mask, pass_masks


@pytest.mark.parametrize("window", [None, 1, 3])
def test_a_mask_shows_exactly_the_window_before_each_token(window):
    position_BT = torch.tensor([[0, 1], [4, 5]])
    mask_BTS = causal_mask(position_BT, 7, window, torch.float32)
    assert mask_BTS.shape == (2, 1, 2, 7)
    for row in range(2):
        for token in range(2):
            position = int(position_BT[row, token])
            for slot in range(7):
                seen = slot <= position and (window is None or position - slot < window)
                assert (float(mask_BTS[row, 0, token, slot]) == 0.0) is seen


def test_equal_windows_share_one_mask():
    position_BT = torch.zeros(1, 1, dtype=torch.int64)
    same = pass_masks(position_BT, 4, {"sliding_attention": 3}, torch.float32)
    assert isinstance(same, torch.Tensor)
    mixed = pass_masks(position_BT, 4, {"full_attention": None, "sliding_attention": 3}, torch.float32)
    assert set(mixed) == {"full_attention", "sliding_attention"}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_masks_are_finite_in_every_dtype(dtype):
    assert bool(causal_mask(torch.tensor([[0]]), 3, None, dtype).isfinite().all())
