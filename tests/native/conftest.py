"""The compiled kernels of each kind, where this machine can run and compile them."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.native import Kernels, load_kernels


@pytest.fixture(scope="session", params=[torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    try:
        return load_kernels(request.param)
    except InputError as error:
        pytest.skip(str(error))
