"""What computed: versions and hardware, as far as the system tells."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from slipstream.target import Target

_CPU = Path("/proc/cpuinfo")


def versions() -> dict[str, str]:
    """Of Slipstream and of what it computes with."""
    found = {"python": platform.python_version()}
    for package in ("slipstream", "torch", "transformers", "tokenizers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def machine(target: Target) -> dict[str, str]:
    """Processor, accelerator, threads and memory of what the target runs on."""
    found = {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": str(os.cpu_count() or 0),
        "threads": str(torch.get_num_threads()),
        "device": str(target.device),
    }
    if target.device.type == "cuda":
        card = torch.cuda.get_device_properties(target.device)
        found["accelerator"] = f"{card.name}, {card.total_memory / 2**30:.0f} GiB"
        found["graphs"] = f"none: {target.uncapturable}" if target.uncapturable else "where rounds allow it"
    return found


def loaded(target: Target) -> dict[str, str]:
    """The target in words."""
    kernels = "native" if target.kernels is not None else "torch"
    dtype = str(target.dtype).removeprefix("torch.")
    return {"name": target.info.name, "dtype": dtype, "kernels": kernels}


def weights_bytes(module: torch.nn.Module) -> int:
    """Bytes of a module's parameters, each storage once."""
    sizes = {item.data_ptr(): item.numel() * item.element_size() for item in module.parameters()}
    return sum(sizes.values())


def _processor() -> str:
    for line in _CPU.read_text().splitlines() if _CPU.exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or "unknown"
