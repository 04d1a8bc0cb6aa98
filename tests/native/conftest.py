"""The compiled kernels, where this machine can run and compile them."""

from __future__ import annotations

import pytest

from slipstream.core.errors import InputError
from slipstream.native import Kernels, load_kernels


@pytest.fixture(scope="session")
def kernels() -> Kernels:
    try:
        return load_kernels()
    except InputError as error:
        pytest.skip(str(error))
