"""Training masks against an enumeration of who may see whom."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from slipstream.train.masks import training_masks
from tests.train.tiny import tiny_config


def may_see(query, key, anchors, starts, num_context, block, window, causal) -> bool:
    """The rule in words: context of the own document strictly before the own anchor, own block only, both
    inside the window.
    """
    own, offset = divmod(query, block)
    position = anchors[own] + offset
    if key < num_context:
        return starts[own] <= key < anchors[own] and (window is None or position - key < window)
    other, slot = divmod(key - num_context, block)
    if other != own:
        return False
    if causal and slot > offset:
        return False
    return window is None or abs(offset - slot) < window


@pytest.mark.parametrize("window", [None, 1, 3, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("block", [2, 4])
def test_masks_match_an_enumeration(window, causal, block) -> None:
    config = replace(
        tiny_config(), block_size=block, num_layers=2, windows=(None, window), causal=(False, causal)
    )
    anchors = torch.tensor([[1, 4, 5], [2, 3, 7]])
    starts = torch.tensor([[0, 3, 3], [1, 1, 5]])
    masks = training_masks(config, anchors, starts, 9)
    for layer, mask in enumerate(masks):
        for row in range(2):
            for query in range(3 * block):
                for key in range(9 + 3 * block):
                    expected = may_see(
                        query,
                        key,
                        anchors[row].tolist(),
                        starts[row].tolist(),
                        9,
                        block,
                        config.windows[layer],
                        config.causal[layer],
                    )
                    assert bool(mask[row, 0, query, key]) == expected, (layer, row, query, key)


def test_equal_layers_share_one_mask() -> None:
    config = replace(tiny_config(), num_layers=3, windows=(None, 4, None), causal=(False, False, False))
    masks = training_masks(config, torch.tensor([[2, 5]]), torch.tensor([[0, 0]]), 8)
    assert masks[0] is masks[2]
    assert masks[0] is not masks[1]
