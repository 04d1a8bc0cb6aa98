"""The layout of vLLM's speculators: a nested configuration, tap ids counted from 1, own ends or none.

Here only plain DFlash; its relatives (DFlash 2, DSpark, EAGLE) are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.core.errors import CheckpointError
from slipstream.formats.checkpoint import (
    DRAFTED_NAME,
    build_drafter,
    check_keys,
    compare_back,
    integer,
    read_drafted,
    read_json,
    read_tensors,
    stored_tensors,
    write_drafted,
    writing_folder,
)
from slipstream.formats.ends import TargetEnds, take_ends
from slipstream.formats.keys import INERT_KEYS
from slipstream.formats.zlab import CONFIG_NAME, WEIGHTS_NAME
from slipstream.formats.zlab_config import check_pair, parse_config, render_config
from slipstream.model import DraftConfig, Drafter, TargetShape

#: The release of the layout that we write.
VERSION = "0.7.0"
#: Keys of the top level that the z-lab layout has under the same name (`target_hidden_size` may be null).
_SAME = ("mask_token_id", "target_hidden_size")
_KEYS = INERT_KEYS | frozenset(
    (
        *_SAME,
        "aux_hidden_state_layer_ids",
        "block_size",
        "draft_vocab_size",
        "sample_from_anchor",
        "sliding_window_non_causal",
        "speculators_config",
        "speculators_model_type",
        "speculators_version",
        "transformer_layer_config",
    )
)
#: Not in the layer configuration: they stand at the top level.
_ELSEWHERE = frozenset(
    ("block_size", "mask_token_id", "target_layer_ids", "target_hidden_size", "dflash_config")
)


def read_speculators(
    folder: Path | str,
    info: TargetShape | None = None,
    ends: TargetEnds | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """Read a drafter.

    Args:
        folder: holds config.json and safetensors.
        info: the target it must fit; None skips that check. Its depth stands in where the file says none.
        ends: of the target, to compare the file's own embedding and head with.
        device: where the drafter goes.
        dtype: of its weights.

    Raises:
        CheckpointError: one sentence that says what is wrong.
    """
    folder = Path(folder)
    config = parse_speculators(read_json(folder / CONFIG_NAME), None if info is None else info.num_layers)
    if info is not None:
        check_pair(config, info)
    tensors = read_tensors(folder)
    ids = take_ends(tensors, config.vocab_size, ends)
    drafter = build_drafter(config, tensors, device, dtype)
    drafter.draft_vocabulary = read_drafted(folder, config.vocab_size) if ids is None else ids
    return drafter


def write_speculators(
    drafter: Drafter,
    folder: Path | str,
    *,
    verifier: str = "",
    dtype: torch.dtype = torch.bfloat16,
    force: bool = False,
) -> None:
    """Write a drafter, read it back, compare, then rename.

    Args:
        drafter: to write; its list of drafted tokens is not part of the layout and lies beside it.
        folder: to make.
        verifier: name or path of the target, for readers who look for it.
        dtype: of the stored weights.
        force: replace an existing checkpoint.

    Raises:
        CheckpointError: the folder exists, or the layout cannot express the drafter.
    """
    raw = render_speculators(drafter.config, str(dtype).removeprefix("torch."), verifier)
    with writing_folder(Path(folder), force, lambda _: {DRAFTED_NAME}) as temporary:
        (temporary / CONFIG_NAME).write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")
        save_file(stored_tensors(drafter, dtype), temporary / WEIGHTS_NAME, metadata={"format": "pt"})
        write_drafted(drafter, temporary)
        compare_back(drafter, read_speculators(temporary, dtype=dtype), dtype)


def parse_speculators(raw: Mapping[str, Any], target_layers: int | None = None) -> DraftConfig:
    """Read a configuration strictly, through the z-lab one that says the same.

    Args:
        raw: config.json.
        target_layers: depth of the target, for files that do not say it.

    Raises:
        CheckpointError: one sentence that names the key.
    """
    kind = raw.get("speculators_model_type")
    if kind != "dflash":
        raise CheckpointError(f"this is a {kind} speculator, not a DFlash drafter")
    check_keys(raw, _KEYS, "config.json")
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, Mapping):
        raise CheckpointError("config.json has no transformer_layer_config")
    same = {key: raw[key] for key in _SAME if raw.get(key) is not None}
    top = {key: value for key, value in inner.items() if key not in ("draft_vocab_size", *same)} | same
    top["target_layer_ids"] = _taps(raw)
    anchor = _flag(raw, "sample_from_anchor", False)
    top["block_size"] = integer(raw.get("block_size", 8), "block_size") + anchor
    if inner.get("is_causal") is None and _flag(raw, "sliding_window_non_causal", False):
        top["is_causal"] = False
    if "num_target_layers" not in top:
        if target_layers is None:
            raise CheckpointError(
                "the checkpoint does not say how deep its target is; name the target with -t"
            )
        top["num_target_layers"] = target_layers
    config = parse_config(top)
    drafted = integer(raw.get("draft_vocab_size") or config.vocab_size, "draft_vocab_size")
    if not 0 < drafted <= config.vocab_size:
        raise CheckpointError(f"draft_vocab_size is {drafted}, beyond the vocabulary of {config.vocab_size}")
    return config if not anchor else DraftConfig(**{**vars(config), "from_anchor": True})


def render_speculators(config: DraftConfig, dtype: str, verifier: str = "") -> dict[str, Any]:
    """Write a configuration so that vLLM reads the same from it.

    Raises:
        CheckpointError: the layout cannot express the drafter.
    """
    scaled = config.input_embedding_scale, config.output_multiplier, config.final_logit_softcapping
    if scaled != (1.0, 1.0, None):
        raise CheckpointError(
            "the speculators layout has no keys for scaled embeddings or logits, which this drafter has; "
            "use zlab"
        )
    plain = DraftConfig(**{**vars(config), "from_anchor": False})
    inner = {key: value for key, value in render_config(plain, dtype).items() if key not in _ELSEWHERE}
    inner["architectures"] = ["Qwen3ForCausalLM"]
    del inner["auto_map"]
    drafts = config.block_size - 1
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_version": VERSION,
        "dtype": dtype,
        "block_size": drafts if config.from_anchor else config.block_size,
        "mask_token_id": config.mask_token_id,
        "draft_vocab_size": config.vocab_size,
        "target_hidden_size": config.target_width,
        "aux_hidden_state_layer_ids": [number + 1 for number in config.target_layer_ids],
        # vLLM takes false for "every layer causal" (vllm#56692), so true stands wherever no layer is.
        "sliding_window_non_causal": not any(config.causal),
        "sample_from_anchor": config.from_anchor,
        "tie_word_embeddings": False,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": "dflash",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier or None, "architectures": []},
        },
    }


def _taps(raw: Mapping[str, Any]) -> list[int]:
    """Layer ids, 0-based, from ids that count the embedding as 0."""
    ids = raw.get("aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(item) is int for item in ids):
        raise CheckpointError(f"aux_hidden_state_layer_ids must be a list of integers, not {ids!r}")
    if 0 in ids:
        raise CheckpointError(
            "aux_hidden_state_layer_ids names the embedding (0), which is no layer's output"
        )
    return [item - 1 for item in ids]


def _flag(raw: Mapping[str, Any], key: str, default: bool) -> bool:
    value = raw.get(key)
    if value is None:
        return default
    if type(value) is not bool:
        raise CheckpointError(f"{key} in config.json must be true or false, not {value!r}")
    return value
