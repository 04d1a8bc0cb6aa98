"""FlexAttention under the training masks against the usual attention under dense ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import flex_attention as flex_module

from slipstream.core.errors import InputError
from slipstream.core.options import TrainOptions
from slipstream.data.blocks import build_batch, pack
from slipstream.model import Drafter
from slipstream.train.flex import flex_masks, mask_maker
from slipstream.train.masks import training_masks
from slipstream.train.step import BlockLoss, block_hidden
from tests.train.killing import ends
from tests.train.tiny import random_document, tiny_config

KINDS = [(None, False), (None, True), (3, False), (3, True), (1, False), (1, True)]
DEVICE = torch.device("cpu")
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def packed_batch():
    """Two rows: one of two documents, one of a longer one; a padded row, padded anchors, and anchors with no
    context (the first position of a document).
    """
    rows = pack([random_document(18, 0, 1), random_document(11, 0, 2), random_document(6, 0, 3)])
    assert [len(row.parts) for row in rows] == [1, 2]
    anchors = [torch.tensor([0, 5, 16]), torch.tensor([0, 4, 11, 12, 15])]
    return build_batch(rows, anchors, 3)


@pytest.fixture
def differentiable(monkeypatch):
    """Torch refuses gradients of FlexAttention on a CPU, though its plain form, which runs where nothing is
    compiled, has them.
    """
    monkeypatch.setattr(flex_module, "_validate_device", lambda *tensors: None)


def test_rules_are_those_of_the_dense_masks() -> None:
    batch = packed_batch()
    windows, causal = (list(kind) for kind in zip(*KINDS, strict=True))
    config = replace(
        tiny_config(), num_layers=len(KINDS), windows=tuple(windows), causal=tuple(causal), block_size=4
    )
    length = batch.features_BLE.shape[1]
    dense = training_masks(config, batch.anchor_BA, batch.start_BA, length)
    rows, _, queries, keys = dense[0].shape
    row, query = torch.arange(rows)[:, None, None], torch.arange(queries)[:, None]
    for mask, attend in zip(dense, flex_masks(config, batch.anchor_BA, batch.start_BA, length), strict=True):
        seen = attend._mask.mask_mod(row, torch.tensor(0), query, torch.arange(keys))
        assert torch.equal(seen, mask[:, 0])
        # So it does not matter what either attention makes of a query that sees nothing.
        assert seen.any(-1).all()


@pytest.mark.parametrize(("window", "causal"), KINDS)
def test_states_and_gradients_agree(differentiable, window, causal) -> None:
    torch.manual_seed(0)
    drafter = Drafter(tiny_config(windows=(None, window), causal=(False, causal)))
    batch = packed_batch()
    states, gradients = [], []
    for make in (training_masks, flex_masks):
        features = batch.features_BLE.clone().requires_grad_(True)
        hidden = block_hidden(drafter, ends(), batch, features, make)
        weight = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(1))
        found = torch.autograd.grad((hidden * weight).sum(), [features, *drafter.parameters()])
        states.append(hidden.detach())
        gradients.append(found)
    torch.testing.assert_close(*states, atol=1e-5, rtol=1e-4)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_bfloat16_products_agree(differentiable) -> None:
    torch.manual_seed(0)
    drafter, batch = Drafter(tiny_config()), packed_batch()
    with torch.autocast("cpu", torch.bfloat16):
        dense, flex = (
            block_hidden(drafter, ends(), batch, batch.features_BLE, make)
            for make in (training_masks, flex_masks)
        )
    assert dense.dtype == flex.dtype
    torch.testing.assert_close(dense, flex, atol=0.05, rtol=0.05)


def test_equal_layers_share_one_mask() -> None:
    config = replace(tiny_config(), num_layers=3, windows=(None, 4, None), causal=(False,) * 3)
    masks = flex_masks(config, torch.tensor([[2, 5]]), torch.tensor([[0, 0]]), 8)
    assert masks[0] is masks[2]
    assert masks[0] is not masks[1]


def test_the_choice_is_made_once_and_not_on_a_cpu() -> None:
    assert mask_maker("auto", DEVICE) is training_masks
    assert mask_maker("sdpa", torch.device("cuda")) is training_masks
    with pytest.raises(InputError, match="attention flex needs a CUDA device"):
        BlockLoss(Drafter(tiny_config()), ends(), TrainOptions(attention="flex"), None)


def test_the_choice_on_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr("slipstream.train.flex.find_spec", lambda name: object())
    assert mask_maker("auto", torch.device("cuda")) is flex_masks
    assert mask_maker("flex", torch.device("cuda")) is flex_masks
    monkeypatch.setattr("slipstream.train.flex.find_spec", lambda name: None)
    assert mask_maker("auto", torch.device("cuda")) is training_masks
