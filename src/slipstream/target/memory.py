"""Whether something fits into memory, said before it is begun.

Not an allocator and not a limit: what other programs take meanwhile is theirs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import psutil
import torch

from slipstream.core.errors import InputError

_GIB = 1024**3
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_UNLIMITED = 2**62
#: Of what is free, what a plan may take: tensors do not fill memory without gaps.
_USABLE = 0.95
#: Types of numbers in a safetensors header that a load turns into the target's own.
_FLOATING = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


def free_memory(device: torch.device) -> int | None:
    """Bytes that can be had on a device now; None where nobody says.

    On the host a container's own limit counts as well.
    """
    if device.type == "cuda":
        free: int = torch.cuda.mem_get_info(device)[0]
        return free
    if device.type != "cpu":
        return None
    return min(int(psutil.virtual_memory().available), _left_in_control_group(_CONTROL_GROUP))


def _left_in_control_group(folder: Path) -> int:
    """Bytes that a control group (version 2) leaves its processes; huge without a limit."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        cached = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return _UNLIMITED
    if limit == "max":
        return _UNLIMITED
    # Cached files give way to whoever needs the memory.
    return max(0, int(limit) - used + int(cached.get("inactive_file", 0)))


def require(parts: Mapping[str, int], device: torch.device, advice: str) -> None:
    """Refuse a plan that does not fit.

    Args:
        parts: bytes by what they are for.
        device: where.
        advice: what can be lowered, such as "lower max_rows".

    Raises:
        InputError: with the numbers and the advice.
    """
    free, needed = free_memory(device), sum(parts.values())
    if free is None or needed <= free * _USABLE:
        return
    listed = ", ".join(f"{size / _GIB:.2f} GiB for {what}" for what, size in parts.items() if size)
    raise InputError(
        f"{needed / _GIB:.2f} GiB do not fit into the {free / _GIB:.2f} GiB that are free on {device} "
        f"({listed}); {advice}"
    )


def weight_bytes(folder: Path, dtype: torch.dtype) -> int:
    """Bytes that the safetensors files of a folder take once loaded; 0 where there are none or they are
    damaged (loading says so).
    """
    total = 0
    for file in folder.glob("*.safetensors"):
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                if length > file.stat().st_size:
                    return 0
                header = json.loads(opened.read(length))
            total += sum(_loaded(entry, dtype) for name, entry in header.items() if name != "__metadata__")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error):
            return 0
    return total


def _loaded(entry: Mapping[str, object], dtype: torch.dtype) -> int:
    """Bytes of one tensor after its numbers were turned into `dtype`, where they are floating."""
    begin, end = entry["data_offsets"]  # type: ignore[misc]
    stored = _FLOATING.get(str(entry["dtype"]))
    size: int = end - begin  # type: ignore[has-type]
    return size if stored is None else size // stored * dtype.itemsize
