"""The compiled kernels of each kind; those for AVX-512 are emulated where the processor lacks it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.native import Kernels, build, load_kernels

EMULATION = Path(__file__).with_name("emulation")


def emulated() -> Kernels:
    """The kernels for AVX-512 with its instructions in plain C++: same logic, slow."""
    version = hashlib.sha256((EMULATION / "immintrin.h").read_bytes()).hexdigest()[:8]
    options = ("-mavx2", "-mfma", f"-I{EMULATION}", f"-DEMULATION=0x{version}")
    processor = build._Processor(frozenset({"avx2", "fma"}), options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(build._PROCESSORS, torch.bfloat16, processor)
        return load_kernels.__wrapped__(torch.bfloat16)


@pytest.fixture(scope="session", params=[torch.bfloat16, torch.float32], ids=["bf16", "float32"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    try:
        return load_kernels(request.param)
    except InputError:
        pass
    try:
        return emulated() if request.param == torch.bfloat16 else load_kernels(request.param)
    except InputError as error:
        if "cannot compile" in str(error):
            raise
        pytest.skip(str(error))
