"""Compiling and loading the kernels: once per source and compiler, kept in the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from functools import cache
from pathlib import Path

import platformdirs

from slipstream.core.errors import InputError

_SOURCE = Path(__file__).with_name("kernels.cpp")
#: What the kernels are written for, as Linux names it.
_NEEDED = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "fma"})
# No contraction: a product and a sum are fused only where the source says so, whatever the compiler.
_OPTIONS = (
    *("-O3", "-std=c++17", "-shared", "-fPIC", "-fopenmp", "-ffp-contract=off", "-w"),
    *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512bf16", "-mavx2", "-mfma"),
)
_TIMEOUT_S = 120

Kernels = ctypes.CDLL
"""The loaded library."""


@cache
def load_kernels() -> Kernels:
    """The kernels, compiled if they are not in the cache yet (a few seconds).

    Raises:
        InputError: this machine cannot run or compile them; the reason is given.
    """
    kernels = compiled(_SOURCE)
    kernels.slipstream_contenders.restype = ctypes.c_int64
    return kernels


def compiled(source: Path) -> ctypes.CDLL:
    """One file of C++, compiled as the kernels are if it is not in the cache yet.

    Args:
        source: the file; its functions are extern "C".

    Raises:
        InputError: this machine cannot run or compile it; the reason is given.
    """
    _check_machine()
    compiler = next((found for name in ("g++", "c++") if (found := shutil.which(name))), None)
    if compiler is None:
        raise InputError("no C++ compiler (g++) is installed, so the CPU kernels cannot be compiled")
    version = _run([compiler, "--version"])
    key = hashlib.sha256("\0".join((source.read_text(), version, *_OPTIONS)).encode()).hexdigest()[:24]
    library = platformdirs.user_cache_path("slipstream") / "native" / f"{source.stem}-{key}.so"
    if not library.exists():
        _compile(compiler, source, library)
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise InputError(f"the CPU kernels in {library} cannot be loaded: {error}") from error


def _check_machine() -> None:
    """Refuse other systems and older processors."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise InputError("the CPU kernels are for Linux on x86-64")
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            flags = set(line.partition(":")[2].split())
            break
    if not flags >= _NEEDED:
        raise InputError(f"the CPU kernels need {', '.join(sorted(_NEEDED - flags))}")


def _compile(compiler: str, source: Path, library: Path) -> None:
    """Compile to a name of its own first: several processes may do it at once."""
    temporary = library.with_name(f"{library.name}.{os.getpid()}.tmp")
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        _run([compiler, *_OPTIONS, str(source), "-o", str(temporary)])
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
