"""Key/value buffers of fixed size, written at absolute positions per row; one file for all HF caches.

Not a store that knows its own length: what is valid is said by the positions of a pass and by its mask, so a
rejected draft needs no clean-up; the next pass writes over it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from slipstream.core.errors import InputError


class TargetCache(Cache):  # type: ignore[misc]
    """Keys and values of every layer of a target, for some rows and some slots.

    Buffers are made on the first pass, when the model shows its head counts and widths. They start as zeros:
    a masked slot has weight zero, but zero times an uninitialised NaN would still be NaN.

    Args:
        rows: sequences side by side.
        slots: positions per row; no pass may write at or past it.
    """

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(layers=[])
        if rows < 1 or slots < 1:
            raise InputError(f"a target cache needs at least one row and one slot, not {rows} and {slots}")
        self.rows = rows
        self.slots = slots
        self._buffers: list[tuple[Tensor, Tensor] | None] = []
        self._row_B1: Tensor | None = None
        self._position_BT: Tensor | None = None
        self._visible = slots

    def aim(self, position_BT: Tensor, visible: int) -> None:
        """Says where the next pass writes and how many leading slots it may read.

        Args:
            position_BT: int64 positions, distinct within a row.
            visible: every slot that the pass reads or writes lies before it; at most `slots`.
        """
        rows = position_BT.shape[0]
        if rows != self.rows or visible > self.slots:
            raise InputError(
                f"the cache has {self.rows} rows and {self.slots} slots, the pass needs {rows} and {visible}"
            )
        if self._row_B1 is None:
            self._row_B1 = torch.arange(rows, device=position_BT.device)[:, None]
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
            Keys and values [B, G, S, C] with S the visible slots, views of the buffers.
        """
        if self._row_B1 is None or self._position_BT is None:
            raise InputError("the cache was not told the positions of this pass")
        while len(self._buffers) <= layer_idx:
            self._buffers.append(None)
        pair = self._buffers[layer_idx]
        if pair is None:
            pair = self._empty(key_states), self._empty(value_states)
            self._buffers[layer_idx] = pair
        index = (self._row_B1, slice(None), self._position_BT)
        # Two index tensors with a slice between them put their joint axes first: [B, T, G, C].
        pair[0][index] = key_states.transpose(1, 2)
        pair[1][index] = value_states.transpose(1, 2)
        return pair[0][:, :, : self._visible], pair[1][:, :, : self._visible]

    def _empty(self, state: Tensor) -> Tensor:
        return state.new_zeros(self.rows, state.shape[1], self.slots, state.shape[3])

    def clear(self, slots: int) -> None:
        """Zeros in the leading `slots`, so that a NaN of an earlier text cannot reach the next one."""
        for pair in self._buffers:
            if pair is not None:
                pair[0][:, :, :slots].zero_()
                pair[1][:, :, :slots].zero_()

    def keep(self, row_B: Tensor) -> None:
        """Keeps only the rows `row_B` (int64 indices), in that order."""
        self._buffers = [pair and (pair[0][row_B], pair[1][row_B]) for pair in self._buffers]
        self.rows = row_B.shape[0]
        self._row_B1 = None

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
