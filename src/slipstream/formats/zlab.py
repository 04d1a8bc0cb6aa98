"""The z-lab layout, which the authors publish and vLLM and SGLang load: config.json and model.safetensors.

Strict both ways: what is not understood is refused with one sentence, and every write is read back.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.formats.zlab_config import check_pair, parse_config, render_config
from slipstream.model import Drafter, TargetShape

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"
#: Slipstream's own; other engines do not look at it and draft from all tokens.
VOCABULARY_NAME = "draft_vocabulary.json"


def read_zlab(
    folder: Path | str,
    info: TargetShape | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """Read a drafter.

    Args:
        folder: holds config.json and safetensors, in one file or in shards with an index.
        info: the target it must fit; None skips that check.
        device: where the drafter goes.
        dtype: of its weights.

    Raises:
        CheckpointError: one sentence that says what is wrong; nothing is guessed.
    """
    folder = Path(folder)
    config = parse_config(_read_json(folder / CONFIG_NAME))
    if info is not None:
        check_pair(config, info)
    with torch.device("meta"):
        drafter = Drafter(config)
    tensors = _read_tensors(folder)
    _check_tensors(tensors, {name: tuple(t.shape) for name, t in drafter.state_dict().items()})
    drafter.load_state_dict(
        {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}, assign=True
    )
    if (folder / VOCABULARY_NAME).exists():
        drafter.draft_vocabulary = _read_vocabulary(folder / VOCABULARY_NAME, config.vocab_size)
    return drafter.eval().requires_grad_(False)


def write_zlab(
    drafter: Drafter, folder: Path | str, *, dtype: torch.dtype = torch.bfloat16, force: bool = False
) -> None:
    """Write a drafter to a temporary folder, read it back, compare, then rename.

    Args:
        drafter: to write.
        folder: to make; other files of an existing folder are kept when forced.
        dtype: of the stored weights.
        force: replace an existing checkpoint.

    Raises:
        CheckpointError: the folder exists, or the layout cannot express the drafter.
    """
    folder = Path(folder)
    if folder.exists() and not force:
        raise CheckpointError(f"{folder} exists already; --force overwrites it")
    config = render_config(drafter.config, str(dtype).removeprefix("torch."))
    tensors = {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        (temporary / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(tensors, temporary / WEIGHTS_NAME, metadata={"format": "pt"})
        if drafter.draft_vocabulary is not None:
            ids = json.dumps({"token_ids": drafter.draft_vocabulary.tolist()})
            (temporary / VOCABULARY_NAME).write_text(ids + "\n", encoding="utf-8")
        _compare(drafter, tensors, temporary, dtype)
        _publish(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Move the finished files into place."""
    if not folder.exists():
        temporary.chmod(0o755)
        os.replace(temporary, folder)
        return
    for name in (WEIGHTS_NAME, CONFIG_NAME):
        os.replace(temporary / name, folder / name)
    if (temporary / VOCABULARY_NAME).exists():
        os.replace(temporary / VOCABULARY_NAME, folder / VOCABULARY_NAME)
    else:
        (folder / VOCABULARY_NAME).unlink(missing_ok=True)


def _read_vocabulary(path: Path, vocab_size: int) -> Tensor:
    """Ids of the tokens that are drafted.

    Raises:
        CheckpointError: they are not distinct ascending tokens.
    """
    ids: Any = _read_json(path).get("token_ids")
    numbers = isinstance(ids, list) and ids and all(isinstance(token, int) for token in ids)
    if not numbers or ids[0] < 0 or ids[-1] >= vocab_size or any(a >= b for a, b in pairwise(ids)):
        raise CheckpointError(f"{path} holds no ascending list of tokens below {vocab_size}")
    return torch.tensor(ids)


def _compare(drafter: Drafter, tensors: Mapping[str, Tensor], folder: Path, dtype: torch.dtype) -> None:
    """What was written must read back as what was meant."""
    again = read_zlab(folder, dtype=dtype)
    wrong = [name for name, tensor in again.state_dict().items() if not torch.equal(tensor, tensors[name])]
    if wrong:
        raise CheckpointError(f"tensor {wrong[0]} reads back differently, so nothing was written")
    before, after = drafter.config, again.config
    for name in before.__dataclass_fields__:
        if getattr(before, name) != getattr(after, name):
            raise CheckpointError(f"{name} reads back as {getattr(after, name)!r}, so nothing was written")


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path.parent} has no readable {path.name}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold an object")
    return raw


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} has no safetensors file")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            loaded = load_file(path)
        except (SafetensorError, OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file") from error
        twice = sorted(set(loaded) & set(tensors))
        if twice:
            raise CheckpointError(f"tensor {twice[0]} is stored twice in {folder}")
        tensors |= loaded
    return tensors


def _check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Exactly the expected names and shapes, all finite."""
    missing, extra = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing and extra:
        raise CheckpointError(f"tensor {missing[0]} is missing and {extra[0]} is unknown; was it renamed?")
    if missing:
        raise CheckpointError(f"tensor {missing[0]} is missing")
    if extra:
        raise CheckpointError(f"tensor {extra[0]} is unknown to this layout")
    for name, shape in expected.items():
        found = tuple(tensors[name].shape)
        if found != shape:
            turned = " (it is transposed)" if found == shape[::-1] else ""
            raise CheckpointError(f"tensor {name} has shape {list(found)}, not {list(shape)}{turned}")
        if not tensors[name].is_floating_point() or not bool(torch.isfinite(tensors[name]).all()):
            raise CheckpointError(f"tensor {name} holds numbers that are not finite floating point")
