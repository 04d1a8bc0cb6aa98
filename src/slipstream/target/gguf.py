"""GGUF files as targets: turned once into a Hugging Face folder in the user's cache, then read from there.

Not a GGUF parser (transformers with the gguf package does that), and not a way to run quantized weights: they
are unpacked to bfloat16.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

from slipstream.core.errors import MissingExtraError, TargetError

Progress = Callable[[str], None]
_DTYPE = torch.bfloat16
_LAYOUT = "2"
"""Goes into the key of a conversion; raise it when what is written changes."""


def converted_folder(file: Path, progress: Progress, root: Path | None = None) -> Path:
    """The Hugging Face folder of a GGUF file; converts it on first use.

    Args:
        file: the GGUF file.
        progress: called with one line per step when there is something to wait for.
        root: cache folder; the user's cache folder of Slipstream otherwise.

    Returns:
        A complete folder (model and tokenizer).

    Raises:
        MissingExtraError: a package that reads GGUF is not installed.
        TargetError: the file cannot be read as a causal language model.
    """
    place = (root or platformdirs.user_cache_path("slipstream")) / "gguf"
    key = cache_key(file)
    folder = place / key
    if folder.is_dir():
        return folder
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "gguf")
    place.mkdir(parents=True, exist_ok=True)
    progress(f"Converting {file.name} once; this takes about a minute")
    # A folder is used only under its final name, which it gets complete or not at all.
    half = Path(tempfile.mkdtemp(prefix="half-", dir=place))
    try:
        _convert(file, half)
        # Another content under this key would be taken for this one by every later load.
        if cache_key(file) != key:
            raise TargetError(f"{file.name} changed while it was converted; try again once it is complete")
        _publish(half, folder)
    finally:
        shutil.rmtree(half, ignore_errors=True)
    progress(f"Kept the converted model in {folder}")
    return folder


def cache_key(file: Path) -> str:
    """Name of a file's conversion: a digest of its content and of what decides what becomes of it.

    All of the content is read, at 1.6 GB/s on a CPU with SHA instructions. Path and time stay out of it:
    every installation brings the bundled file along, and its conversion is three times as large.

    Args:
        file: the GGUF file.

    Returns:
        A folder name; the same for every copy of the file.

    Raises:
        TargetError: the file cannot be read.
    """
    try:
        with file.open("rb") as opened:
            digest = hashlib.file_digest(opened, "sha256")
    except OSError as error:
        raise TargetError(f"{file} cannot be read: {error.strerror or error}") from error
    digest.update("\0".join((str(_DTYPE), transformers.__version__, _LAYOUT)).encode())
    return digest.hexdigest()[:32]


def _convert(file: Path, folder: Path) -> None:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=_DTYPE, **_dequantize()
        )
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except Exception as error:  # a damaged file makes its readers raise anything
        reason = str(error).strip().split("\n")[0]
        raise TargetError(f"{file.name} cannot be read as a GGUF causal language model: {reason}") from error
    # What is written is a plain dense model; the record of its origin would have readers look for blocks.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for attribute in ("hf_quantizer", "quantization_method"):
        if hasattr(model, attribute):
            delattr(model, attribute)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _dequantize() -> dict[str, Any]:
    """Newer transformers keep GGUF blocks unless told to unpack them; older ones always unpack."""
    config_class = getattr(transformers, "GgufConfig", None)
    return {} if config_class is None else {"quantization_config": config_class(dequantize=True)}


def _publish(half: Path, folder: Path) -> None:
    """Gives a complete folder its name; a second process may have been faster, and its result is as good."""
    try:
        half.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise
