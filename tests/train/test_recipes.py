"""What the recipes say of themselves is what the arithmetic gives, and the arithmetic is the drafter's."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from slipstream.model import DraftConfig, Drafter
from slipstream.train.recipes import (
    QWEN3_8B,
    QWEN3_30B_A3B,
    TOKENS_PER_CHAT,
    Shape,
    cost,
    dense_8b,
    moe_30b,
    smollm2_on_a_cpu,
)


@pytest.mark.parametrize(("recipe", "shape"), [(dense_8b, QWEN3_8B), (moe_30b, QWEN3_30B_A3B)])
def test_docstrings_state_what_cost_gives(recipe, shape) -> None:
    said = " ".join(recipe.__doc__.split())
    one, eight = (
        cost(shape, recipe(Path("run"), "model", "chats.jsonl", gpus), TOKENS_PER_CHAT, gpus)
        for gpus in (1, 8)
    )
    billions, gigabytes = re.search(r"([\d.]+) B trained weights, (\d+) GB", said).groups()
    days = re.search(r"([\d.]+) days on one H100, ([\d.]+) on eight", said).groups()
    assert float(billions) == round(one.drafter_parameters / 1e9, 2)
    assert int(gigabytes) == round(one.gigabytes)
    assert [float(day) for day in days] == [round(one.days, 1), round(eight.days, 1)]


def test_parameters_are_the_drafters() -> None:
    info = SimpleNamespace(
        width=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        num_layers=12,
        embedding_rows=50,
        eos_token_ids=(),
        rope_theta=1e4,
        max_context=64,
        rms_norm_eps=1e-6,
        embedding_multiplier=1.0,
    )
    plan = smollm2_on_a_cpu(Path("run"))
    config = DraftConfig.for_target(info, num_layers=plan.drafter.num_layers, block_size=8)
    matrices = sum(p.numel() for p in Drafter(config).parameters() if p.ndim == 2)
    shape = Shape(64, 96, 4, 2, 16, 1e6, 1e6)
    assert cost(shape, plan, 100, 1).drafter_parameters == matrices
