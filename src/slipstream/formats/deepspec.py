"""The layout of DeepSpec's DFlash: DSpark's class without a Markov head; the anchor's slot drafts too.

Read only: Slipstream trains no such drafters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.core.errors import CheckpointError
from slipstream.formats.checkpoint import build_drafter, integer, read_json, read_tensors
from slipstream.formats.ends import TargetEnds, take_ends
from slipstream.formats.zlab import CONFIG_NAME
from slipstream.formats.zlab_config import check_pair, parse_config
from slipstream.model import DraftConfig, Drafter, TargetShape

ARCHITECTURE = "Qwen3DSparkModel"
_OWN = frozenset(
    (
        "confidence_head_with_markov",
        "enable_confidence_head",
        "markov_head_type",
        "markov_rank",
        "sample_from_anchor",
    )
)


def read_deepspec(
    folder: Path | str,
    info: TargetShape | None = None,
    ends: TargetEnds | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """Read a drafter.

    Args:
        folder: holds config.json and safetensors, with copies of the target's embedding and head.
        info: the target it must fit; None skips that check.
        ends: of the target, to compare those copies with.
        device: where the drafter goes.
        dtype: of its weights.

    Raises:
        CheckpointError: one sentence that says what is wrong.
    """
    folder = Path(folder)
    config = parse_deepspec(read_json(folder / CONFIG_NAME))
    if info is not None:
        check_pair(config, info)
    tensors = read_tensors(folder)
    take_ends(tensors, config.vocab_size, ends)
    return build_drafter(config, tensors, device, dtype)


def parse_deepspec(raw: Mapping[str, Any]) -> DraftConfig:
    """Read a configuration strictly; `block_size` B there gives B drafts, so T is B + 1.

    Raises:
        CheckpointError: it has a Markov or a confidence head, or a key is wrong.
    """
    if raw.get("markov_rank") or raw.get("enable_confidence_head"):
        raise CheckpointError("this is a DSpark drafter with a Markov or confidence head, not a DFlash one")
    if raw.get("sample_from_anchor") is False:
        raise CheckpointError("sample_from_anchor false contradicts the DeepSpec layout")
    plain = {key: value for key, value in raw.items() if key not in _OWN}
    plain["block_size"] = integer(raw.get("block_size"), "block_size in config.json") + 1
    return replace(parse_config(plain), from_anchor=True)
