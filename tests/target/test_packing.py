"""Packed linear layers against `nn.Linear`, and a packed target against its plain self."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from slipstream.target import packed, target_from_model
from slipstream.target.packing import PackedLinear, can_pack
from tests.target.families import build

pytestmark = pytest.mark.skipif(not can_pack(), reason="this torch has no packed products")


@pytest.mark.parametrize("shape", [(1, 70), (16, 70), (2, 5, 70), (0, 70)])
@pytest.mark.parametrize("bias", [True, False])
def test_products_agree_within_rounding(shape, bias):
    linear = nn.Linear(70, 130, bias=bias).requires_grad_(False)
    x = torch.randn(shape)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


def test_strided_input():
    linear = nn.Linear(70, 130).requires_grad_(False)
    x = torch.randn(4, 6, 140)[:, ::2, ::2]
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


def test_the_weight_can_be_read_back():
    linear = nn.Linear(70, 130)
    layer = PackedLinear(linear)
    assert torch.equal(layer.weight, linear.weight)
    assert not list(layer.parameters())


def test_a_packed_module_has_the_state_of_a_plain_one():
    module = nn.Sequential(nn.Linear(140, 130), nn.Linear(130, 140, bias=False))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    again = packed(module).state_dict()
    assert again.keys() == state.keys()
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_gradients_reach_the_input():
    linear = nn.Linear(70, 130)
    x = torch.randn(3, 70, requires_grad=True)
    PackedLinear(linear)(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(3, -1))


def test_only_fitting_layers_are_packed():
    module = nn.ModuleDict(
        {
            "large": nn.Linear(130, 130),
            "small": nn.Linear(4, 4),
            "narrow": nn.Linear(130, 130).bfloat16(),
            "bilinear": nn.Bilinear(4, 4, 4),
        }
    )
    module["hooked"] = nn.Linear(130, 130)
    module["hooked"].register_forward_hook(lambda *_: None)
    module["shared"] = module["large"]
    assert packed(module) is module
    kinds = {name: type(child).__name__ for name, child in module.items()}
    assert kinds["large"] == "PackedLinear"
    assert module["shared"] is module["large"]
    assert {kinds[name] for name in ("small", "narrow", "hooked")} == {"Linear"}


@pytest.mark.parametrize("family", ["llama_tied", "gemma3", "qwen3"])
def test_a_packed_target_says_the_same(family):
    model = build(family)
    plain, fast = target_from_model(copy.deepcopy(model)), target_from_model(packed(model, least_weights=0))
    assert type(fast.model.lm_head) is PackedLinear
    ids_BL, length_B = torch.randint(3, 97, (2, 9)), torch.tensor([9, 4])
    outs = [target.prefill(ids_BL, length_B, target.new_cache(2, 9)) for target in (plain, fast)]
    torch.testing.assert_close(outs[0].logits_BV, outs[1].logits_BV, atol=1e-4, rtol=1e-4)
    hidden_BTD = torch.randn(1, 2, 32)
    torch.testing.assert_close(plain.head(hidden_BTD), fast.head(hidden_BTD), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(plain.embed(ids_BL), fast.embed(ids_BL))
