"""A tiny target and a random drafter for it."""

from __future__ import annotations

import pytest
import torch

from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.testing import tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target()


@pytest.fixture(scope="module")
def drafter(target: Target) -> Drafter:
    """Two layers, blocks of six slots."""
    torch.manual_seed(0)
    return Drafter(DraftConfig.for_target(target.info, num_layers=2, block_size=6, num_taps=2)).eval()
