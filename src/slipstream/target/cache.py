"""Key/value buffers of fixed size, written at absolute positions per row; one file for all HF caches.

Not a store that knows its own length: what is valid is said by the positions of a pass and by its mask, so a
rejected draft needs no clean-up; the next pass writes over it.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from slipstream.core.errors import InputError

Saved = tuple[tuple[Tensor, Tensor], ...]
"""Copies of one row's keys and values per layer, [G, L, C]."""

_GENERATIONS = count(1)


class TargetCache(Cache):  # type: ignore[misc]
    """Keys and values of every layer of a target, for some rows and some slots.

    Buffers are made on the first pass, when the model shows its head counts and widths. They start as zeros:
    a masked slot has weight zero, but zero times an uninitialised NaN would still be NaN.

    Args:
        rows: sequences side by side.
        slots: positions per row; no pass may write at or past it.

    Attributes:
        generation: another number, among all caches, whenever a buffer is made anew.
    """

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(layers=[])
        if rows < 1 or slots < 1:
            raise InputError(f"a target cache needs at least one row and one slot, not {rows} and {slots}")
        self.rows = rows
        self.slots = slots
        self._buffers: list[tuple[Tensor, Tensor] | None] = []
        self._row_B1: Tensor | None = None
        self._some_B: Tensor | None = None
        self._position_BT: Tensor | None = None
        self._visible = slots
        self.generation = next(_GENERATIONS)

    def aim(self, position_BT: Tensor, visible: int, row_B: Tensor | None = None) -> None:
        """Says where the next pass writes and how many leading slots it may read.

        Args:
            position_BT: int64 positions, distinct within a row.
            visible: every slot that the pass reads or writes lies before it; at most `slots`.
            row_B: int64 rows of the cache that the pass is about, distinct; None is all of them, in order.
        """
        rows = self.rows if row_B is None else row_B.shape[0]
        if position_BT.shape[0] != rows or visible > self.slots:
            raise InputError(
                f"the cache has {rows} rows and {self.slots} slots, the pass needs "
                f"{position_BT.shape[0]} and {visible}"
            )
        every_B = torch.arange(self.rows, device=position_BT.device) if row_B is None else row_B
        self._row_B1 = every_B[:, None]
        self._some_B = row_B
        self._position_BT = position_BT
        self._visible = visible

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by the attention of layer `layer_idx`: stores new keys and values, returns all visible ones.

        Args:
            key_states: [B, G, T, C]
            value_states: [B, G, T, C] (its width may differ from the keys')
            layer_idx: the layer, 0-based.
            args: ignored (rotary tables that some models pass along).
            kwargs: ignored.

        Returns:
            Keys and values [B, G, S, C] with S the visible slots; views of the buffers for a pass over all
            rows.
        """
        if self._row_B1 is None or self._position_BT is None:
            raise InputError("the cache was not told the positions of this pass")
        keys, values = self._layer(layer_idx, key_states, value_states)
        index = (self._row_B1, slice(None), self._position_BT)
        # Two index tensors with a slice between them put their joint axes first: [B, T, G, C].
        keys[index] = key_states.transpose(1, 2)
        values[index] = value_states.transpose(1, 2)
        if self._some_B is not None:
            keys, values = keys[self._some_B], values[self._some_B]
        return keys[:, :, : self._visible], values[:, :, : self._visible]

    @property
    def row_B(self) -> Tensor:
        """Rows of the cache that the pass at hand is about."""
        if self._row_B1 is None:
            raise InputError("the cache was not told the positions of this pass")
        return self._row_B1[:, 0]

    def buffers(self, layers: int, groups: int, width: int, like: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Whole buffers of every layer, for a pass that reads and writes them itself.

        Args:
            layers: how many.
            groups: key/value heads.
            width: of a head.
            like: a tensor of the buffers' dtype and device.

        Returns:
            Keys and values per layer, [rows, groups, slots, width] with at least the visible slots.
        """
        shape = like.new_empty(1, groups, 1, width)
        return [self._layer(layer_idx, shape, shape) for layer_idx in range(layers)]

    def read(self, layer_idx: int, visible: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer in all rows, views [B, G, S, C] of the leading `visible` slots.

        Raises:
            InputError: nothing was written to the layer yet.
        """
        pair = self._buffers[layer_idx] if layer_idx < len(self._buffers) else None
        if pair is None:
            raise InputError(f"nothing was written to layer {layer_idx} of the cache")
        self._visible = visible
        keys, values = self._layer(layer_idx, *pair)
        return keys[:, :, :visible], values[:, :, :visible]

    def _layer(self, layer_idx: int, key_like: Tensor, value_like: Tensor) -> tuple[Tensor, Tensor]:
        """A layer's whole buffers, made if needed; at least as long as the visible slots."""
        while len(self._buffers) <= layer_idx:
            self._buffers.append(None)
        keys, values = self._buffers[layer_idx] or (None, None)
        pair = self._fitting(keys, key_like), self._fitting(values, value_like)
        self._buffers[layer_idx] = pair
        return pair

    def _fitting(self, buffer: Tensor | None, state: Tensor) -> Tensor:
        """The buffer, made or enlarged so that it holds the visible slots.

        A CPU's batched products copy what does not lie in one piece, so there the buffer is only as long as
        what is read; elsewhere it doubles.
        """
        if buffer is not None and buffer.shape[2] >= self._visible:
            return buffer
        doubled = min(1 << (self._visible - 1).bit_length(), self.slots)
        slots = self._visible if state.device.type == "cpu" else doubled
        grown = state.new_zeros(self.rows, state.shape[1], slots, state.shape[3])
        if buffer is not None:
            grown[:, :, : buffer.shape[2]] = buffer
        self.generation = next(_GENERATIONS)
        return grown

    @property
    def token_bytes(self) -> int:
        """Bytes that one token of one row takes, over all layers that were written to."""
        buffers = [buffer for pair in self._buffers for buffer in pair or ()]
        return sum(buffer.shape[1] * buffer.shape[3] * buffer.element_size() for buffer in buffers)

    def save(self, row: int, length: int) -> Saved:
        """Copies of a row's leading slots in every layer; empty where nothing was written yet."""
        if any(pair is None for pair in self._buffers):
            return ()
        return tuple(
            (keys[row, :, :length].clone(), values[row, :, :length].clone())
            for keys, values in filter(None, self._buffers)
        )

    def restore(self, row: int, saved: Saved, length: int) -> None:
        """Put the first `length` slots of what `save` gave into the leading slots of a row."""
        self._visible = max(self._visible, length) if self._buffers else length
        for layer_idx, pair in enumerate(saved):
            buffers = self._layer(layer_idx, *(part[None] for part in pair))
            for buffer, part in zip(buffers, pair, strict=True):
                buffer[row, :, :length] = part[:, :length]

    def reuse(self, rows: int, slots: int) -> bool:
        """Whether it can serve again for sequences of this number and length; then it is empty."""
        fits = self.rows == rows and self.slots >= slots
        if fits:
            self.clear()
        return fits

    def clear(self, row_B: Tensor | None = None) -> None:
        """Zeros in all rows or in some, so that a NaN of an earlier text cannot reach the next one."""
        for pair in self._buffers:
            for buffer in pair or ():
                if row_B is None:
                    buffer.zero_()
                else:
                    buffer[row_B] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Zero: lengths differ by row and are not the cache's business (passes state their positions)."""
        return 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Slots per row."""
        return self.slots

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """Slots per row, under the name that older transformers ask for."""
        return self.slots

    def get_mask_sizes(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Visible slots and offset 0; only asked by models that would build a mask of their own."""
        return self._visible, 0
