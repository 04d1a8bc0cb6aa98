"""Compiling and loading the kernels: once per source and compiler, kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import platformdirs
import torch

from slipstream.core.errors import InputError

_SOURCE = Path(__file__).with_name("kernels.cpp")


@dataclass(frozen=True)
class _Processor:
    """What kernels for one kind of numbers are written for.

    Attributes:
        needs: features as Linux names them.
        options: of the compiler.
    """

    needs: frozenset[str]
    options: tuple[str, ...]


_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx2", "-mfma")
_PROCESSORS = {
    torch.bfloat16: _Processor(
        frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma"}), _AVX512
    ),
    torch.float32: _Processor(frozenset({"avx2", "fma"}), ("-mavx2", "-mfma")),
}
# No contraction: a product and a sum are fused only where the source says so, whatever the compiler.
_OPTIONS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w")
_TIMEOUT_S = 120


@dataclass(frozen=True)
class Kernels:
    """The loaded kernels for one kind of numbers.

    Attributes:
        library: their functions.
        dtype: what weights and states are in.
    """

    library: ctypes.CDLL
    dtype: torch.dtype


@cache
def load_kernels(dtype: torch.dtype) -> Kernels:
    """The kernels, compiled if they are not in the cache yet (a few seconds).

    Args:
        dtype: bfloat16 (AVX-512 with bf16) or float32 (AVX2).

    Raises:
        InputError: there are none for such numbers, or this machine cannot run or compile them; the reason is
            given.
    """
    library = compiled(_SOURCE, dtype)
    library.slipstream_contenders.restype = ctypes.c_int64
    return Kernels(library, dtype)


def compiled(source: Path, dtype: torch.dtype) -> ctypes.CDLL:
    """One file of C++, compiled as the kernels are if it is not in the cache yet.

    Args:
        source: the file; its functions are extern "C". Headers beside it count as part of it.
        dtype: whose processors it is written for.

    Raises:
        InputError: this machine cannot run or compile it; the reason is given.
    """
    if dtype not in _PROCESSORS:
        raise InputError("the CPU kernels are for bfloat16 and float32")
    processor = _PROCESSORS[dtype]
    _check_machine(processor.needs)
    compiler = next((found for name in ("g++", "c++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise InputError("no C++ compiler (g++) is installed, so the CPU kernels cannot be compiled")
    options = (*_OPTIONS, *processor.options)
    texts = [file.read_text() for file in (source, *sorted(source.parent.glob("*.h")))]
    told = "\0".join((*texts, _run([compiler, "--version"]), *options))
    key = hashlib.sha256(told.encode()).hexdigest()[:24]
    library = platformdirs.user_cache_path("slipstream") / "native" / f"{source.stem}-{key}.so"
    if not library.exists():
        _compile([compiler, *options, str(source)], library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise InputError(f"the CPU kernels in {library} cannot be loaded: {error}") from error


def _check_machine(needs: frozenset[str]) -> None:
    """Refuse other systems and older processors."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise InputError("the CPU kernels are for Linux on x86-64")
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    if not flags >= needs:
        raise InputError(f"the CPU kernels need {', '.join(sorted(needs - flags))}")


def _compile(command: list[str], library: Path) -> None:
    """Compile to a name of its own first: several processes may do it at once."""
    temporary = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        _run([*command, "-o", str(temporary)])
        os.replace(temporary, library)
    except OSError as error:
        raise InputError(f"the CPU kernels cannot be written to {library}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        raise InputError(f"{command[0]} cannot be run: {error}") from error
    if done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), "no message")
        raise InputError(f"{command[0]} cannot compile the CPU kernels: {said}")
    return done.stdout
