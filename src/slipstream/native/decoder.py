"""The kernels as verbs on tensors: a decoder pass, a drafter's context, a product with an embedding."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from slipstream.native.build import Kernels

_P, _I = ctypes.c_void_p, ctypes.c_int64
#: Widths that are summed over come in steps of so many numbers.
_STEP = 32


class _Layer(ctypes.Structure):
    _fields_ = [
        *((name, _P) for name in ("input_norm", "qkv", "qkv_bias", "q_norm", "k_norm", "out", "mlp_norm")),
        *(("gate_up", _P), ("down", _P), ("window", _I), ("causal", _I)),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, _I) for name in ("layers", "width", "heads", "groups", "head_dim", "inner")),
        *(("eps", ctypes.c_float), ("layer", _P), ("norm", _P), ("cos", _P), ("sin", _P)),
    ]


class _Buffers(ctypes.Structure):
    _fields_ = [("keys", _P), ("values", _P), ("slots", _I)]


class _Pass(ctypes.Structure):
    _fields_ = [
        *(("rows", _I), ("tokens", _I), ("threads", _I), ("position", _P), ("rotary", _P), ("row", _P)),
        *(("buffers", _P), ("taps", _P), ("tap_row", _I), ("tap_token", _I), ("x", _P), ("out", _P)),
    ]


class _Context(ctypes.Structure):
    _fields_ = [
        *(("rows", _I), ("tokens", _I), ("features", _I), ("threads", _I), ("x", _P), ("fuse", _P)),
        *(("norm", _P), ("position", _P), ("row", _P), ("buffers", _P)),
    ]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer; projections that read the same input are joined along their output axis.

    Attributes:
        input_norm_D: gain before attention.
        qkv_OD: queries, keys, values.
        qkv_bias_O: of them, or None.
        q_norm_C: gain of every query head, or None.
        k_norm_C: gain of every key head, or None.
        out_DO: attention's output projection.
        mlp_norm_D: gain before the MLP.
        gate_up_ID: gates, then what they multiply.
        down_DI: the MLP's output projection.
        window: sees positions less than so many behind, or None.
        causal: a block's tokens see only what lies before them.
    """

    input_norm_D: Tensor
    qkv_OD: Tensor
    qkv_bias_O: Tensor | None
    q_norm_C: Tensor | None
    k_norm_C: Tensor | None
    out_DO: Tensor
    mlp_norm_D: Tensor
    gate_up_ID: Tensor
    down_DI: Tensor
    window: int | None = None
    causal: bool = True

    def tensors(self) -> list[Tensor]:
        """Those that are there."""
        values = (getattr(self, field.name) for field in fields(self))
        return [value for value in values if isinstance(value, Tensor)]


@dataclass(frozen=True)
class Place:
    """Where a pass's tokens stand.

    Attributes:
        position_BT: int64 slots that are written.
        rotary_BT: int64 rows of the rotary tables.
        row_B: int64 rows of the buffers.
        buffers: per layer keys and values, [rows, groups, slots, head_dim], contiguous.
    """

    position_BT: Tensor
    rotary_BT: Tensor
    row_B: Tensor
    buffers: Sequence[tuple[Tensor, Tensor]]

    def check(self, angles: int) -> None:
        """Refuse what would read or write outside the buffers or the rotary tables of so many positions.

        Raises:
            IndexError: a position or a row is outside.
        """
        rows, _, slots, _ = self.buffers[0][0].shape
        for index, size in ((self.position_BT, slots), (self.rotary_BT, angles), (self.row_B, rows)):
            least, most = torch.aminmax(index)
            if least < 0 or most >= size:
                raise IndexError(f"a pass reaches {int(least)} to {int(most)}, outside 0 to {size - 1}")


class NativeDecoder:
    """A Llama-like decoder whose passes are one call each.

    What a token gets depends on its row's tokens alone, to the last bit: not on how many share the pass.

    Args:
        kernels: loaded library.
        layers: weights, in the kernels' dtype; they are read in place and must not move.
        norm_D: final gain.
        eps: of all norms.
        heads: query heads.
        head_dim: C.
        cos_LC: cosines by position, float32.
        sin_LC: sines by position, float32, the first half's with a minus sign.
    """

    def __init__(
        self,
        kernels: Kernels,
        layers: Sequence[LayerWeights],
        norm_D: Tensor,
        eps: float,
        heads: int,
        head_dim: int,
        cos_LC: Tensor,
        sin_LC: Tensor,
    ) -> None:
        self._kernels = kernels
        self._kept = layers, norm_D, cos_LC, sin_LC
        first = layers[0]
        self.groups = (len(first.qkv_OD) // head_dim - heads) // 2
        self.head_dim = head_dim
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._model = _Model(
            *(len(layers), len(norm_D), heads, self.groups, head_dim, first.down_DI.shape[1], eps),
            *(ctypes.addressof(self._layers), _at(norm_D), _at(cos_LC), _at(sin_LC)),
        )

    def __call__(self, x_BTD: Tensor, place: Place, taps: Mapping[int, Tensor]) -> Tensor:
        """One pass.

        Args:
            x_BTD: embeddings, in the kernels' dtype.
            place: where they stand; keys and values are written there.
            taps: by 0-based layer id a [B, T, D] buffer that receives the layer's output; all of one layout.

        Returns:
            States after the final norm, [B, T, D].
        """
        rows, tokens, _ = x_BTD.shape
        x_BTD = x_BTD.clone(memory_format=torch.contiguous_format)
        out_BTD = torch.empty_like(x_BTD)
        place.check(len(self._kept[2]))
        position_BT, rotary_BT = place.position_BT.contiguous(), place.rotary_BT.contiguous()
        buffers, row_B = _buffers(place.buffers), place.row_B.contiguous()
        tapped: Any = None
        strides = 0, 0
        if taps:
            tapped = (_P * len(self._layers))(
                *(_at(taps[n]) if n in taps else None for n in range(len(self._layers)))
            )
            some = next(iter(taps.values()))
            strides = some.stride(0), some.stride(1)
        arguments = _Pass(
            *(rows, tokens, torch.get_num_threads(), _at(position_BT), _at(rotary_BT), _at(row_B)),
            *(ctypes.addressof(buffers), None if tapped is None else ctypes.addressof(tapped), *strides),
            *(_at(x_BTD), _at(out_BTD)),
        )
        self._kernels.library.slipstream_decode(ctypes.byref(self._model), ctypes.byref(arguments))
        return out_BTD

    def context(self, features_BLE: Tensor, fuse_DE: Tensor, norm_D: Tensor, place: Place) -> None:
        """Write the keys and values of context tokens as a drafter makes them: fuse, norm, project, rotate.

        Args:
            features_BLE: in the kernels' dtype.
            fuse_DE: their projection.
            norm_D: gain behind it.
            place: where they stand.
        """
        rows, tokens, width = features_BLE.shape
        place.check(len(self._kept[2]))
        features_BLE, position_BL = features_BLE.contiguous(), place.position_BT.contiguous()
        buffers, row_B = _buffers(place.buffers), place.row_B.contiguous()
        arguments = _Context(
            *(rows, tokens, width, torch.get_num_threads(), _at(features_BLE), _at(fuse_DE)),
            *(_at(norm_D), _at(position_BL), _at(row_B), ctypes.addressof(buffers)),
        )
        self._kernels.library.slipstream_context(ctypes.byref(self._model), ctypes.byref(arguments))


def native_product(kernels: Kernels, weight_VD: Tensor, x_BTD: Tensor) -> Tensor:
    """The product x W^T with float32 sums that are not rounded, [B, T, V].

    Args:
        kernels: loaded library.
        weight_VD: in the kernels' dtype and in one piece.
        x_BTD: in the same dtype; any leading axes.
    """
    x_BTD = x_BTD.contiguous()
    out_BTV = torch.empty(*x_BTD.shape[:-1], len(weight_VD), dtype=torch.float32)
    tokens = x_BTD.numel() // x_BTD.shape[-1]
    sizes = _I(len(weight_VD)), _I(weight_VD.shape[1])
    kernels.library.slipstream_product(
        *(_P(_at(weight_VD)), *sizes, _P(_at(x_BTD)), _I(tokens)),
        *(_I(torch.get_num_threads()), _P(_at(out_BTV))),
    )
    return out_BTV


def can_read(kernels: Kernels, tensors: Iterable[Tensor], *widths: int) -> bool:
    """Whether kernels can read such weights: their dtype, on the CPU, in one piece, widths in steps of 32.

    Args:
        kernels: loaded library.
        tensors: gains and matrices; their last axes count as widths.
        widths: more of them, such as that of a head.
    """
    tensors = list(tensors)
    plain = all(
        tensor.dtype == kernels.dtype and tensor.device.type == "cpu" and tensor.is_contiguous()
        for tensor in tensors
    )
    return plain and not any(width % _STEP for width in (*widths, *(tensor.shape[-1] for tensor in tensors)))


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _layer(weights: LayerWeights) -> _Layer:
    pointers = (
        *(weights.input_norm_D, weights.qkv_OD, weights.qkv_bias_O, weights.q_norm_C, weights.k_norm_C),
        *(weights.out_DO, weights.mlp_norm_D, weights.gate_up_ID, weights.down_DI),
    )
    return _Layer(*map(_at, pointers), weights.window or 0, int(weights.causal))


def _buffers(pairs: Sequence[tuple[Tensor, Tensor]]) -> Any:
    return (_Buffers * len(pairs))(*(_Buffers(_at(k), _at(v), k.shape[2]) for k, v in pairs))
