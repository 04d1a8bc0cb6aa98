"""Taps: hooks on decoder layers that copy layer outputs into one feature buffer.

Not `output_hidden_states`, which keeps every layer of every pass alive. A tap id is the 0-based id of the
layer whose OUTPUT is read; for the last layer that is the state before the final norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slipstream.core.errors import InputError

Layers = Sequence[nn.Module] | nn.ModuleList
"""Decoder layers of a target, in order."""


def layer_output(output: Any) -> Tensor:
    """The hidden states [B, T, D] in what a decoder layer returned: a tensor, or a tuple led by it."""
    hidden: Tensor = output[0] if isinstance(output, tuple) else output
    return hidden


class Taps:
    """Hooks on some layers; while a buffer is open, each pass fills it.

    Args:
        layers: the decoder layers of the target, in order.
        layer_ids: taps; their outputs are concatenated in this order.
        width: D, width of a layer output.

    Raises:
        InputError: an id is outside the model or given twice.
    """

    def __init__(
        self, layers: Sequence[nn.Module] | nn.ModuleList, layer_ids: tuple[int, ...], width: int
    ) -> None:
        bad = [i for i in layer_ids if not 0 <= i < len(layers)]
        if bad or len(set(layer_ids)) != len(layer_ids):
            raise InputError(f"tap ids must be distinct and from 0 to {len(layers) - 1}, not {layer_ids}")
        self.layer_ids = layer_ids
        self.width = width
        self._buffer_BTE: Tensor | None = None
        self._handles: list[RemovableHandle] = [
            layers[layer_id].register_forward_hook(self._hook(place))
            for place, layer_id in enumerate(layer_ids)
        ]

    @property
    def feature_width(self) -> int:
        """E: taps times layer width."""
        return len(self.layer_ids) * self.width

    def aim(self, buffer_BTE: Tensor | None) -> None:
        """Passes from now on write into `buffer_BTE`; None lets them pass unread."""
        self._buffer_BTE = buffer_BTE

    def parts(self, buffer_BTE: Tensor) -> dict[int, Tensor]:
        """The share of the buffer of every tapped layer, for a pass that needs no hooks."""
        if not self.layer_ids:
            return {}
        return dict(zip(self.layer_ids, buffer_BTE.split(self.width, dim=-1), strict=True))

    def remove(self) -> None:
        """Takes the hooks off the layers."""
        for handle in self._handles:
            handle.remove()

    def _hook(self, place: int) -> Any:
        part = slice(place * self.width, (place + 1) * self.width)

        def copy_output(_module: nn.Module, _args: Any, output: Any) -> None:
            if self._buffer_BTE is not None:
                self._buffer_BTE[..., part].copy_(layer_output(output))

        return copy_output
