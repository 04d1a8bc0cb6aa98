"""Compiled kernels for small passes on a CPU with AVX-512 and bf16; PyTorch does the same work elsewhere."""

from slipstream.native.build import Kernels, load_kernels
from slipstream.native.choice import contenders
from slipstream.native.decoder import LayerWeights, NativeDecoder, Place, can_multiply, native_product

__all__ = [
    "Kernels",
    "LayerWeights",
    "NativeDecoder",
    "Place",
    "can_multiply",
    "contenders",
    "load_kernels",
    "native_product",
]
