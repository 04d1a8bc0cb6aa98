"""Where a target runs and in which number format, when the user leaves it to Slipstream.

Not a benchmark: the choice is read off the hardware.
"""

from __future__ import annotations

from pathlib import Path

import torch

from slipstream.core.errors import InputError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
_CPU_DESCRIPTION = Path("/proc/cpuinfo")


def choose_device(name: str) -> torch.device:
    """The device of a name.

    Args:
        name: `auto` (CUDA, then MPS, then CPU), or a device of torch such as `cpu`, `cuda`, `cuda:1`, `mps`.

    Returns:
        The device.

    Raises:
        InputError: unknown, or not there.
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "mps" if mps else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device {name!r}; use auto, cpu, cuda, cuda:N or mps") from error
    available = {"cpu": True, "cuda": cuda, "mps": mps}.get(device.type, False)
    if available and device.type == "cuda" and device.index is not None:
        available = device.index < torch.cuda.device_count()
    if not available:
        raise InputError(f"device {name!r} is not available on this machine")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The number format of a name on a device.

    Args:
        name: `auto` (bfloat16 where the hardware multiplies it natively, else float32), or a format by name.
        device: where the target will run.

    Returns:
        The dtype.

    Raises:
        InputError: unknown name.
    """
    if name == "auto":
        return torch.bfloat16 if multiplies_bf16(device) else torch.float32
    if name not in _DTYPES:
        raise InputError(f"unknown dtype {name!r}; use auto, {', '.join(_DTYPES)}")
    return _DTYPES[name]


def multiplies_bf16(device: torch.device) -> bool:
    """Whether a device multiplies bfloat16 matrices natively (emulation is slower than float32)."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "mps":
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return cpu_flags_have_bf16(_CPU_DESCRIPTION.read_text() if _CPU_DESCRIPTION.exists() else "")


def cpu_flags_have_bf16(description: str) -> bool:
    """Whether a CPU lists bfloat16 products among its features.

    Args:
        description: text in the format of Linux's `/proc/cpuinfo`: `flags : ...` on x86 (avx512_bf16,
            amx_bf16), `Features : ...` on ARM (bf16). Empty on other systems, which answers no.

    Returns:
        The answer for the first CPU listed.
    """
    for line in description.splitlines():
        key, _, value = line.partition(":")
        if key.strip().lower() in ("flags", "features"):
            return not _CPU_BF16_FLAGS.isdisjoint(value.split())
    return False
