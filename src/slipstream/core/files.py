"""Writing files so that nothing is lost: under a temporary name first, renamed once whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from slipstream.core.errors import InputError


@contextmanager
def replacing(path: Path, force: bool = False) -> Iterator[TextIO]:
    """A text file that takes its name only once the block has ended without an error.

    Raises:
        InputError: the file exists and `force` is not set, or it cannot be written (a full disk, say).
    """
    refuse_existing(path, force)
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("w", encoding="utf-8") as file:
            yield file
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):  # not there, as a rule
            temporary.unlink()


def replace_bytes(path: Path, data: bytes) -> None:
    """Write a file of bytes whole, in place of one that may be there.

    Raises:
        InputError: it cannot be written; what was there before is kept.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise InputError(
            f"cannot write {path}: {error.strerror or error}; what was there before is kept"
        ) from error
    finally:
        with suppress(OSError):  # not there, as a rule
            temporary.unlink()


def refuse_existing(path: Path, force: bool) -> None:
    """Stop before anything is overwritten.

    Raises:
        InputError: the path exists and `force` is not set.
    """
    if path.exists() and not force:
        raise InputError(f"{path} exists already; --force overwrites it")
