"""A tiny pair that the tests of all layouts share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.testing import tiny_config, tiny_target


@pytest.fixture(scope="session")
def target() -> Target:
    return tiny_target(tiny_config(num_hidden_layers=6))


@pytest.fixture(scope="session")
def config(target: Target) -> DraftConfig:
    return DraftConfig.for_target(target.info, num_layers=2, block_size=6, num_taps=3)


def random_drafter(config: DraftConfig, seed: int = 1, **changes: Any) -> Drafter:
    """Random weights whose norms are no plain ones."""
    torch.manual_seed(seed)
    drafter = Drafter(replace(config, **changes))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.25)
    return drafter.to(torch.bfloat16).eval()


def assert_same(one: Drafter, other: Drafter) -> None:
    """Every field and every bit."""
    assert one.config == other.config
    for (name, mine), (again, theirs) in zip(
        one.state_dict().items(), other.state_dict().items(), strict=True
    ):
        assert name == again
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs), name
