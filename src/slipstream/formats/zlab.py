"""The z-lab layout, which the authors publish and vLLM and SGLang load: config.json and model.safetensors.

Strict both ways: what is not understood is refused with one sentence, and every write is read back.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from slipstream.formats.checkpoint import (
    DRAFTED_NAME,
    build_drafter,
    compare_back,
    read_drafted,
    read_json,
    read_tensors,
    stored_tensors,
    write_drafted,
    writing_folder,
)
from slipstream.formats.zlab_config import check_pair, parse_config, render_config
from slipstream.model import Drafter, TargetShape

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "model.safetensors"


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
    config = parse_config(read_json(folder / CONFIG_NAME))
    if info is not None:
        check_pair(config, info)
    drafter = build_drafter(config, read_tensors(folder), device, dtype)
    drafter.draft_vocabulary = read_drafted(folder, config.vocab_size)
    return drafter


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
    config = render_config(drafter.config, str(dtype).removeprefix("torch."))
    with writing_folder(Path(folder), force, lambda _: {DRAFTED_NAME}) as temporary:
        (temporary / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        save_file(stored_tensors(drafter, dtype), temporary / WEIGHTS_NAME, metadata={"format": "pt"})
        write_drafted(drafter, temporary)
        compare_back(drafter, read_zlab(temporary, dtype=dtype), dtype)
