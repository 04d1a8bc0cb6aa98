"""Compiled kernels for small passes on a CPU: bf16 on AVX-512, float32 on AVX2. PyTorch does the rest."""

from slipstream.native.build import Kernels, load_kernels
from slipstream.native.choice import contenders
from slipstream.native.decoder import LayerWeights, NativeDecoder, Place, can_read, native_product

__all__ = [
    "Kernels",
    "LayerWeights",
    "NativeDecoder",
    "Place",
    "can_read",
    "contenders",
    "load_kernels",
    "native_product",
]
