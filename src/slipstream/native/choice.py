"""Which tokens sampling noise could make the choice: found without taking the noise of all of them."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from slipstream.native.build import Kernels

#: Most tokens per position that are told apart exactly; more than one is already rare.
_MOST = 8


def contenders(kernels: Kernels, scores_BTV: Tensor, key_BT: Tensor, ids_V: Tensor | None) -> Tensor | None:
    """Places of the tokens among which argmax(scores + noise) lies, whatever rounding does to the sums.

    Args:
        kernels: loaded library.
        scores_BTV: float32 on the CPU, -inf for tokens that cannot be chosen.
        key_BT: int64 keys of the noise (`slipstream.decode.noise.key`).
        ids_V: int64 ids of the tokens; None where places are ids.

    Returns:
        int64 [B, T, N], ascending, the last one repeated; None where N does not suffice (equal scores, NaN).
    """
    scores_BTV, key_BT = scores_BTV.contiguous(), key_BT.contiguous()
    places = torch.empty(*key_BT.shape, _MOST, dtype=torch.int64)
    failed = kernels.library.slipstream_contenders(
        *(_at(scores_BTV), ctypes.c_int64(key_BT.numel()), ctypes.c_int64(scores_BTV.shape[-1])),
        *(_at(key_BT), None if ids_V is None else _at(ids_V.contiguous())),
        *(ctypes.c_int64(_MOST), ctypes.c_int64(torch.get_num_threads()), _at(places)),
    )
    return None if failed else places


def _at(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
