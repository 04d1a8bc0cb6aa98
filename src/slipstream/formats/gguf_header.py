"""A bounded walk over a GGUF header, so that the reader of the gguf package is never given lengths that lie.

Not a GGUF reader: it keeps nothing. A flipped bit in a count would otherwise have that reader loop for hours.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Final

from slipstream.core.errors import CheckpointError

_MAGIC: Final = int.from_bytes(b"GGUF", "little")
_STRING, _ARRAY = 8, 9
_ALIGNMENT = 32
#: Bytes of a value by its type number (GGUF version 3).
_SIZES: Final = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def check_header(path: Path) -> None:
    """Refuse a file whose header does not lie wholly inside it.

    Raises:
        CheckpointError: it is no GGUF file, or it is damaged or cut short.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Walk(data, path).whole()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable GGUF file") from error


class _Walk:
    """A place in a file that never leaves it."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self._path, self._at = data, path, 0

    def whole(self) -> None:
        """Everything before the tensors' data."""
        magic, version = self._take("II")
        if magic != _MAGIC:
            raise CheckpointError(f"{self._path} is not a GGUF file")
        if version not in (2, 3):
            raise CheckpointError(f"{self._path} is GGUF version {version}; 2 and 3 are known")
        tensors, keys = self._take("QQ")
        alignment = _ALIGNMENT
        for _ in range(keys):
            name = self._text()
            (kind,) = self._take("I")
            if name == b"general.alignment":
                (alignment,) = struct.unpack_from("<I", self._data, self._at)
            self._value(kind)
        self._tensors(tensors, alignment)

    def _tensors(self, count: int, alignment: int) -> None:
        """One after the other without gaps, as llama.cpp demands, and inside the file."""
        end = 0
        for _ in range(count):
            self._text()
            (axes,) = self._take("I")
            if not 1 <= axes <= 4 or not 0 < alignment < 1 << 20:
                self._damaged()
            *shape, kind, offset = self._take(f"{axes}QIQ")
            if offset != end or any(not 1 <= size < 1 << 40 for size in shape):
                self._damaged()
            end += -(-self._bytes(shape, kind) // alignment) * alignment
        start = -(-self._at // alignment) * alignment
        # The last tensor may lack its padding.
        if start + end >= len(self._data) + alignment:
            self._damaged()

    def _bytes(self, shape: list[int], kind: int) -> int:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{self._path} has a tensor of the unknown type {kind}") from error
        if shape[0] % block:
            self._damaged()
        return math.prod(shape) // block * size

    def _take(self, form: str) -> tuple[int, ...]:
        form = "<" + form
        start, self._at = self._at, self._at + struct.calcsize(form)
        if self._at > len(self._data):
            self._damaged()
        return struct.unpack_from(form, self._data, start)

    def _skip(self, size: int) -> None:
        if size > len(self._data) - self._at:
            self._damaged()
        self._at += size

    def _text(self) -> bytes:
        (size,) = self._take("Q")
        self._skip(size)
        return self._data[self._at - size : self._at] if size < 64 else b""

    def _value(self, kind: int) -> None:
        if kind == _STRING:
            self._text()
        elif kind == _ARRAY:
            inner, count = self._take("IQ")
            if inner == _STRING:
                for _ in range(count):
                    self._text()
            elif inner in _SIZES:
                self._skip(_SIZES[inner] * count)
            else:
                self._damaged()
        elif kind in _SIZES:
            self._skip(_SIZES[kind])
        else:
            self._damaged()

    def _damaged(self) -> None:
        raise CheckpointError(f"{self._path} is damaged or cut short")
