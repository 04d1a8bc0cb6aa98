"""GGUF files as names, values and tensors, by the gguf package; what they mean for a drafter is
`gguf_drafter`'s business.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.core.errors import CheckpointError, MissingExtraError
from slipstream.formats.gguf_header import check_header

#: `general.file_type` by dtype.
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}
#: `general.file_type` of 8-bit weights.
INT8_FILE_TYPE = 7


def need_gguf() -> None:
    """Say how to install the gguf package where it is missing.

    Raises:
        MissingExtraError: it is not installed.
    """
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf")


def read_gguf(path: Path) -> tuple[dict[str, Any], Callable[[], dict[str, Tensor]]]:
    """Values by key, and a function that reads the tensors, unpacked and with torch's order of axes.

    Raises:
        CheckpointError: the file is damaged. The function raises it too.
    """
    need_gguf()
    check_header(path)
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if name[:5] != "GGUF."}
    except Exception as error:  # a damaged file makes the package raise anything
        raise CheckpointError(f"{path} is not a readable GGUF file; was it cut short?") from error

    def tensors() -> dict[str, Tensor]:
        try:
            return {tensor.name: _tensor(tensor) for tensor in reader.tensors}
        except Exception as error:  # likewise
            raise CheckpointError(f"{path} holds tensors that cannot be read; was it cut short?") from error

    return fields, tensors


def _tensor(stored: Any) -> Tensor:
    from gguf import GGMLQuantizationType, dequantize

    shape = tuple(int(size) for size in reversed(stored.shape))
    data = np.array(stored.data)  # out of the memory map, which ends with the reader
    if stored.tensor_type == GGMLQuantizationType.BF16:
        return torch.from_numpy(data.view(np.uint8).reshape(-1)).view(torch.bfloat16).reshape(shape)
    kept = (
        GGMLQuantizationType.F32,
        GGMLQuantizationType.F16,
        GGMLQuantizationType.I32,
        GGMLQuantizationType.I64,
    )
    if stored.tensor_type not in kept:
        data = dequantize(data, stored.tensor_type)
    return torch.from_numpy(data).reshape(shape)


def put_tensor(writer: Any, name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Store a tensor as llama.cpp's converter does: matrices in `dtype`, vectors in float32.

    Args:
        writer: `gguf.GGUFWriter`.
        name: in the file.
        tensor: on the CPU.
        dtype: float32, float16 or bfloat16.
    """
    from gguf import GGMLQuantizationType

    if tensor.dim() == 1 or dtype == torch.float32:
        writer.add_tensor(name, tensor.float().numpy())
    elif dtype == torch.float16:
        writer.add_tensor(name, tensor.half().numpy())
    else:
        raw = tensor.bfloat16().contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, raw, raw_dtype=GGMLQuantizationType.BF16)


def round_to_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every matrix as it reads back from 8-bit weights: rows in runs of 32 with one scale each (Q8_0).

    Args:
        tensors: on the CPU; vectors, and matrices whose rows are no multiple of 32, stay as they are.
    """
    need_gguf()
    from gguf import GGMLQuantizationType, dequantize, quantize

    kind, made = GGMLQuantizationType.Q8_0, dict(tensors)
    for name, tensor in tensors.items():
        if takes_int8(tensor):
            made[name] = torch.from_numpy(dequantize(quantize(tensor.float().numpy(), kind), kind))
    return made


def takes_int8(tensor: Tensor) -> bool:
    """Whether 8-bit weights can hold a tensor."""
    return tensor.dim() == 2 and tensor.shape[1] % 32 == 0


def put_int8(writer: Any, name: str, tensor: Tensor) -> None:
    """Store a matrix in 8-bit weights.

    Args:
        writer: `gguf.GGUFWriter`.
        name: in the file.
        tensor: on the CPU.
    """
    from gguf import GGMLQuantizationType, quantize

    kind = GGMLQuantizationType.Q8_0
    writer.add_tensor(name, quantize(tensor.float().numpy(), kind), raw_dtype=kind)


def stored_dtype(tensor: Tensor, dtype: torch.dtype) -> torch.dtype:
    """The dtype that `put_tensor` stores a tensor in."""
    return torch.float32 if tensor.dim() == 1 else dtype


@contextmanager
def writing_gguf(path: Path, architecture: str, force: bool) -> Iterator[tuple[Any, Callable[[], Path]]]:
    """A writer of a file that takes its name only once the block has ended without an error.

    Args:
        path: to make.
        architecture: `general.architecture`.
        force: replace an existing file.

    Yields:
        `gguf.GGUFWriter`, and a function that finishes the file under its temporary name and returns that.

    Raises:
        CheckpointError: the file exists and `force` is not set, or it cannot be written.
    """
    need_gguf()
    from gguf import GGUFWriter

    if path.exists() and not force:
        raise CheckpointError(f"{path} exists already; --force overwrites it")
    temporary = path.with_name(path.name + ".tmp")
    writer = GGUFWriter(None, architecture)

    def finish() -> Path:
        writer.write_header_to_file(temporary)
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return temporary

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield writer, finish
        os.replace(temporary, path)
    except OSError as error:
        raise CheckpointError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)


def one_architecture(fields: Mapping[str, Any]) -> str:
    """`general.architecture`.

    Raises:
        CheckpointError: the file names none.
    """
    name = fields.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError("the GGUF file does not name its architecture")
    return name
