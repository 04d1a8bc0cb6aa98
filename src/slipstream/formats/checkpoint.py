"""What all layouts share: JSON, safetensors, exact names and shapes, the comparison after a write.

Not a layout: what names and keys a layout has stands in its own module.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from slipstream.core.errors import CheckpointError
from slipstream.model import DraftConfig, Drafter, decode_masks

#: A list of tokens to draft from is Slipstream's own; other engines do not look at it and draft from all.
DRAFTED_NAME = "draft_vocabulary.json"
#: Larger integers are damage, not shapes.
MOST = 1 << 31
_LAYERS = 512


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object.

    Raises:
        CheckpointError: there is none.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path.parent} has no readable {path.name}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON") from error
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold an object")
    return raw


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of the folder's safetensors files.

    Raises:
        CheckpointError: there is no file, a file cannot be read, or a name is stored twice.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder} has no safetensors file")
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            loaded = load_file(path)
        except (SafetensorError, OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"{path} is not a readable safetensors file; was it cut short?") from error
        twice = sorted(set(loaded) & set(tensors))
        if twice:
            raise CheckpointError(f"tensor {twice[0]} is stored twice in {folder}")
        tensors |= loaded
    return tensors


def check_layers(layers: int) -> None:
    """Refuse a number of layers that no drafter has, before anything of that size is made.

    Raises:
        CheckpointError: it is below 1 or beyond all reason.
    """
    if not 1 <= layers <= _LAYERS:
        raise CheckpointError(f"num_hidden_layers must be from 1 to {_LAYERS}, not {layers}")


def check_keys(raw: Mapping[str, Any], known: frozenset[str], place: str) -> None:
    """Every key must be explained by the layout.

    Raises:
        CheckpointError: names the first that is not.
    """
    unknown = sorted(set(raw) - known)
    if unknown:
        raise CheckpointError(f"key {unknown[0]} in {place} is unknown to this layout")


def integer(value: Any, key: str) -> int:
    """An integer of a size that a shape can have.

    Raises:
        CheckpointError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= MOST:
        raise CheckpointError(f"{key} must be an integer, not {_shown(value)}")
    return value


def number(value: Any, key: str) -> float:
    """A finite number.

    Raises:
        CheckpointError: it is none.
    """
    good = not isinstance(value, bool) and isinstance(value, int | float)
    if not good or abs(value) > 1e30 or not math.isfinite(value):
        raise CheckpointError(f"{key} must be a number, not {_shown(value)}")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def tensor_shapes(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of a drafter and its shape, [out, in]; the names are the z-lab layout's."""
    wide, inner = config.width, config.intermediate_size
    heads, groups = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (wide,),
        "post_attention_layernorm": (wide,),
        "self_attn.q_proj": (heads, wide),
        "self_attn.k_proj": (groups, wide),
        "self_attn.v_proj": (groups, wide),
        "self_attn.o_proj": (wide, heads),
        "self_attn.q_norm": (config.head_dim,),
        "self_attn.k_norm": (config.head_dim,),
        "mlp.gate_proj": (inner, wide),
        "mlp.up_proj": (inner, wide),
        "mlp.down_proj": (wide, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (wide, config.feature_width),
        "hidden_norm.weight": (wide,),
        "norm.weight": (wide,),
    }
    for number_ in range(config.num_layers):
        shapes |= {f"layers.{number_}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def check_tensors(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Exactly the expected names and shapes, all finite.

    Raises:
        CheckpointError: names the first tensor that is wrong.
    """
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
        if not tensors[name].is_floating_point() or not bool(torch.isfinite(tensors[name].float()).all()):
            raise CheckpointError(f"tensor {name} holds numbers that are not finite floating point")


def build_drafter(
    config: DraftConfig, tensors: Mapping[str, Tensor], device: torch.device | str, dtype: torch.dtype
) -> Drafter:
    """A drafter of exactly these tensors.

    Args:
        config: its shape.
        tensors: under the z-lab layout's names.
        device: where it goes.
        dtype: of its weights.

    Raises:
        CheckpointError: a tensor is missing, unknown or misshapen.
    """
    check_tensors(tensors, tensor_shapes(config))
    with torch.device("meta"):
        drafter = Drafter(config)
    drafter.load_state_dict(
        {name: tensor.to(device=device, dtype=dtype) for name, tensor in tensors.items()}, assign=True
    )
    return drafter.eval().requires_grad_(False)


def stored_tensors(drafter: Drafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """A drafter's tensors as they are written: on the CPU, in one piece, in a dtype."""
    return {name: t.detach().to("cpu", dtype).contiguous() for name, t in drafter.state_dict().items()}


def drafted_tokens(ids: Any, vocab_size: int, place: str) -> Tensor:
    """Ids of the tokens that are drafted.

    Raises:
        CheckpointError: they are not distinct ascending tokens.
    """
    numbers = isinstance(ids, list) and ids and all(type(token) is int for token in ids)
    if not numbers or ids[0] < 0 or ids[-1] >= vocab_size or any(a >= b for a, b in pairwise(ids)):
        raise CheckpointError(f"{place} holds no ascending list of tokens below {vocab_size}")
    return torch.tensor(ids)


def read_drafted(folder: Path, vocab_size: int) -> Tensor | None:
    """The list of drafted tokens beside a checkpoint, if there is one.

    Raises:
        CheckpointError: they are not distinct ascending tokens.
    """
    path = folder / DRAFTED_NAME
    if not path.exists():
        return None
    return drafted_tokens(read_json(path).get("token_ids"), vocab_size, str(path))


def write_drafted(drafter: Drafter, folder: Path) -> None:
    """The list of drafted tokens, if the drafter has one."""
    if drafter.draft_vocabulary is not None:
        ids = json.dumps({"token_ids": drafter.draft_vocabulary.tolist()})
        (folder / DRAFTED_NAME).write_text(ids + "\n", encoding="utf-8")


@contextmanager
def writing_folder(folder: Path, force: bool, names: Callable[[Path], set[str]]) -> Iterator[Path]:
    """A temporary folder that takes its name only once the block has ended without an error.

    Args:
        folder: to make.
        force: replace the files of an existing one; its other files are kept.
        names: files that belong to the layout; those of an existing folder that are not written again go.

    Raises:
        CheckpointError: the folder exists and `force` is not set, or it cannot be written.
    """
    if folder.exists() and not force:
        raise CheckpointError(f"{folder} exists already; --force overwrites it")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    try:
        yield temporary
        if not folder.exists():
            temporary.chmod(0o755)
            os.replace(temporary, folder)
            return
        written = {path.name for path in temporary.iterdir()}
        for name in sorted(written):
            os.replace(temporary / name, folder / name)
        for name in names(folder) - written:
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def compare_back(drafter: Drafter, again: Drafter, dtype: torch.dtype) -> None:
    """What was written must read back as what was meant: fields, tensors, and a fixed block's hidden states.

    Args:
        drafter: that was to be written.
        again: what was read from the files.
        dtype: of the stored weights.

    Raises:
        CheckpointError: names what differs.
    """
    before, after = drafter.config, again.config
    for name in before.__dataclass_fields__:
        if getattr(before, name) != getattr(after, name):
            raise CheckpointError(f"{name} reads back as {getattr(after, name)!r}, so nothing was written")
    lists = [
        None if one.draft_vocabulary is None else one.draft_vocabulary.tolist() for one in (drafter, again)
    ]
    if lists[0] != lists[1]:
        raise CheckpointError("the list of drafted tokens reads back differently, so nothing was written")
    meant, found = stored_tensors(drafter, dtype), again.state_dict()
    wrong = [
        name for name, tensor in meant.items() if not torch.equal(tensor.float(), found[name].float().cpu())
    ]
    if wrong:
        raise CheckpointError(f"tensor {wrong[0]} reads back differently, so nothing was written")
    ours, theirs = fixed_block(before, meant), fixed_block(after, found)
    if not torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
        raise CheckpointError("a block's hidden states read back differently, so nothing was written")


@torch.no_grad()
def fixed_block(config: DraftConfig, tensors: Mapping[str, Tensor]) -> Tensor:
    """Hidden states of one block after a context of fixed random features, in fp32 on the CPU.

    Args:
        config: of a drafter.
        tensors: its weights under the z-lab layout's names.

    Returns:
        hidden_BTD of one row.
    """
    drafter = build_drafter(config, tensors, "cpu", torch.float32)
    generator = torch.Generator().manual_seed(20260206)
    # Longer than small windows, so that a window that is lost shows.
    length = min(32, 1 + min((w for w in config.windows if w is not None), default=8))
    slots = config.block_size - 1 + config.first_draft_slot
    features_BLE = torch.randn(1, length, config.feature_width, generator=generator)
    x_BTD = torch.randn(1, slots, config.width, generator=generator)
    position = torch.arange(length + slots)[None]
    context = drafter.context_kv(features_BLE, position[:, :length])
    masks = decode_masks(config, torch.tensor([length]), length, slots)
    hidden_BTD: Tensor = drafter(x_BTD, position[:, length:], context, masks)
    return hidden_BTD
