"""Drafters as GGUF files of the architecture `dflash`, which llama.cpp and Ollama load.

Keys and names are those of llama.cpp's converter. What they cannot hold exactly (a float64, the depth of
the target) stands beside them under `slipstream.`, which other readers skip.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from slipstream.core.errors import CheckpointError
from slipstream.formats.checkpoint import (
    build_drafter,
    check_layers,
    compare_back,
    drafted_tokens,
    integer,
    number,
    stored_tensors,
)
from slipstream.formats.ends import EMBEDDING, HEAD, TO_TARGET, TargetEnds, take_ends
from slipstream.formats.gguf_file import (
    FILE_TYPES,
    INT8_FILE_TYPE,
    one_architecture,
    put_int8,
    put_tensor,
    read_gguf,
    round_to_int8,
    takes_int8,
    writing_gguf,
)
from slipstream.formats.gguf_tokenizer import Vocabulary, put_vocabulary
from slipstream.formats.zlab_config import check_pair
from slipstream.model import DraftConfig, Drafter, TargetShape

ARCHITECTURE: Final = "dflash"
MASK_KEY: Final = "tokenizer.ggml.mask_token_id"
DRAFTED_KEY: Final = "slipstream.draft_vocabulary"
#: Ours to theirs, outside the layers.
_OUTER: Final = {"fc": "fc", "hidden_norm": "enc.output_norm", "norm": "output_norm"}
#: Ours to theirs, inside a layer.
_INNER: Final = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
#: Copies of the target's ends, theirs to ours.
ENDS: Final = {"token_embd.weight": EMBEDDING, "output.weight": HEAD, "d2t": TO_TARGET}
#: Configuration fields to keys that hold an integer.
_INTEGERS: Final = {
    "num_layers": "block_count",
    "max_position_embeddings": "context_length",
    "width": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "block_size": "block_size",
}
#: Configuration fields to keys that hold a float32, and the value that is left out.
_FLOATS: Final[dict[str, tuple[str, float | None]]] = {
    "rope_theta": ("rope.freq_base", None),
    "rms_norm_eps": ("attention.layer_norm_rms_epsilon", None),
    "input_embedding_scale": ("embedding_scale", 1.0),
    "output_multiplier": ("logit_scale", 1.0),
    "final_logit_softcapping": ("final_logit_softcapping", None),
}
_OTHER: Final = frozenset(
    (
        "attention.value_length",
        "attention.causal",
        "attention.sliding_window",
        "attention.sliding_window_pattern",
        "rope.dimension_count",
        "target_layers",
        "vocab_size",
    )
)
#: Keys under `slipstream.`.
_OURS: Final = frozenset((*_FLOATS, "num_target_layers", "vocab_size", "draft_vocabulary"))
_DSPARK: Final = frozenset(("sample_from_anchor", "has_confidence_head"))
_DFLASH2: Final = frozenset(("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"))
#: Prefixes of keys that say nothing about the computation.
_INERT: Final = ("general.", "tokenizer.", "quantize.", "split.")


def read_gguf_drafter(
    path: Path | str,
    info: TargetShape | None = None,
    ends: TargetEnds | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """Read a drafter, quantised or not.

    Args:
        path: GGUF file.
        info: the target it must fit; None skips that check. Its depth stands in where the file says none.
        ends: of the target, to compare the file's own embedding and head with.
        device: where the drafter goes.
        dtype: of its weights.

    Raises:
        CheckpointError: one sentence that says what is wrong.
        MissingExtraError: the gguf package is not installed.
    """
    path = Path(path)
    fields, load = read_gguf(path)
    name = one_architecture(fields)
    if name != ARCHITECTURE:
        raise CheckpointError(
            f"{path} is a GGUF file of the architecture {name}, not a {ARCHITECTURE} drafter"
        )
    stored = load()
    width = stored["fc.weight"].shape[-1] if "fc.weight" in stored and stored["fc.weight"].dim() == 2 else 0
    config = parse_fields(fields, width, None if info is None else info.num_layers)
    if info is not None:
        check_pair(config, info)
    names = {theirs: ours for ours, theirs in tensor_names(config.num_layers).items()} | ENDS
    tensors = {names.get(theirs, theirs): tensor for theirs, tensor in stored.items()}
    if TO_TARGET in tensors and tensors[TO_TARGET].dim() == 1:  # absolute here, offsets elsewhere
        tensors[TO_TARGET] = tensors[TO_TARGET] - torch.arange(len(tensors[TO_TARGET]))
    ids = take_ends(tensors, config.vocab_size, ends)
    drafter = build_drafter(config, tensors, device, dtype)
    own = fields.get(DRAFTED_KEY)
    if ids is None and own is not None:
        ids = drafted_tokens(own, config.vocab_size, f"{DRAFTED_KEY} in {path}")
    drafter.draft_vocabulary = ids
    return drafter


def write_gguf_drafter(
    drafter: Drafter,
    path: Path | str,
    vocabulary: Vocabulary | None = None,
    *,
    name: str = "drafter",
    dtype: torch.dtype = torch.bfloat16,
    int8: bool = False,
    force: bool = False,
) -> None:
    """Write a drafter, read it back, compare, then rename.

    Args:
        drafter: to write; its list of drafted tokens is a key of ours that other readers skip.
        path: of the file.
        vocabulary: the target's; llama.cpp wants it in the drafter's file as well.
        name: shown by engines.
        dtype: of the stored matrices; vectors are float32.
        int8: store matrices in 8-bit weights (Q8_0) instead.
        force: replace an existing file.

    Raises:
        CheckpointError: the file exists, or the layout cannot express the drafter.
        MissingExtraError: the gguf package is not installed.
    """
    path, config = Path(path), drafter.config
    check_expressible(config)
    tensors = stored_tensors(drafter, dtype)
    with writing_gguf(path, ARCHITECTURE, force) as (writer, finish):
        writer.add_type("model")
        writer.add_name(name)
        writer.add_file_type(INT8_FILE_TYPE if int8 else FILE_TYPES[dtype])
        writer.add_quantization_version(2)
        _put_config(writer, config)
        if vocabulary is not None:
            put_vocabulary(writer, vocabulary)
        writer.add_uint32(MASK_KEY, config.mask_token_id)
        if drafter.draft_vocabulary is not None:
            writer.add_array(DRAFTED_KEY, drafter.draft_vocabulary.tolist())
        for ours, theirs in tensor_names(config.num_layers).items():
            if int8 and takes_int8(tensors[ours]):
                put_int8(writer, theirs, tensors[ours])
            else:
                put_tensor(writer, theirs, tensors[ours], dtype)
        if int8:
            meant = build_drafter(config, round_to_int8(tensors), "cpu", torch.float32)
            meant.draft_vocabulary = drafter.draft_vocabulary
            compare_back(meant, read_gguf_drafter(finish()), torch.float32)
        else:
            compare_back(drafter, read_gguf_drafter(finish(), dtype=dtype), dtype)


def check_expressible(config: DraftConfig) -> None:
    """Refuse a drafter that GGUF has no words for.

    Raises:
        CheckpointError: says which of its properties it is.
    """
    if len(set(config.causal)) > 1:
        raise CheckpointError(
            "GGUF has one causality for all layers, this drafter mixes causal and bidirectional "
            "ones; llama.cpp and Ollama cannot run it"
        )
    if len({window for window in config.windows if window is not None}) > 1:
        raise CheckpointError("GGUF has one sliding window for all layers, this drafter has several")
    if config.from_anchor:
        raise CheckpointError(
            "llama.cpp reads drafts from the anchor's slot only of DSpark drafters, so this one "
            "cannot be expressed"
        )
    if config.target_width != config.width:
        raise CheckpointError("llama.cpp takes the target's width for the drafter's, here they differ")


def parse_fields(fields: Mapping[str, Any], feature_width: int, target_layers: int | None) -> DraftConfig:
    """Read the keys strictly.

    Args:
        fields: of the file.
        feature_width: of `fc.weight`.
        target_layers: depth of the target, for files that do not say it.

    Raises:
        CheckpointError: one sentence that names the key.
    """
    own = {key[len(ARCHITECTURE) + 1 :]: value for key, value in fields.items() if key.startswith("dflash.")}
    extra = {
        key[len("slipstream.") :]: value for key, value in fields.items() if key.startswith("slipstream.")
    }
    _refuse_unknown(fields, own, extra)
    integers: dict[str, Any] = {field: integer(_need(own, key), key) for field, key in _INTEGERS.items()}
    layers = integers["num_layers"]
    check_layers(layers)
    taps = _need(own, "target_layers")
    if not isinstance(taps, list) or not taps or not all(type(item) is int for item in taps):
        raise CheckpointError(f"dflash.target_layers must be a list of integers, not {taps!r}")
    depth = extra.get("num_target_layers", target_layers)
    if depth is None:
        raise CheckpointError("the GGUF file does not say how deep its target is; name the target with -t")
    causal = own.get("attention.causal", False)
    if type(causal) is not bool:
        raise CheckpointError(f"dflash.attention.causal must be true or false, not {causal!r}")
    floats: dict[str, Any] = {field: _exact(own, extra, key, field) for field, (key, _) in _FLOATS.items()}
    return DraftConfig(
        **integers,
        **floats,
        vocab_size=_vocab_size(fields, own, extra),
        mask_token_id=integer(fields.get(MASK_KEY), MASK_KEY),
        target_layer_ids=tuple(item - 1 for item in taps),
        num_target_layers=integer(depth, "slipstream.num_target_layers"),
        target_width=feature_width // len(taps),
        causal=(causal,) * layers,
        windows=_windows(own, layers),
    )


def tensor_names(layers: int) -> dict[str, str]:
    """Our name to the file's, one to one."""
    names = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in _OUTER.items()}
    for layer in range(layers):
        names |= {f"layers.{layer}.{a}.weight": f"blk.{layer}.{b}.weight" for a, b in _INNER.items()}
    return names


def _put_config(writer: Any, config: DraftConfig) -> None:
    for field, key in _INTEGERS.items():
        writer.add_uint32(f"{ARCHITECTURE}.{key}", getattr(config, field))
    writer.add_uint32(f"{ARCHITECTURE}.attention.value_length", config.head_dim)
    for field, (key, left_out) in _FLOATS.items():
        value = getattr(config, field)
        if value == left_out:
            continue
        writer.add_float32(f"{ARCHITECTURE}.{key}", value)
        if float(np.float32(value)) != value:
            writer.add_key_value(f"slipstream.{field}", value, _float64())
    writer.add_array(f"{ARCHITECTURE}.target_layers", [number_ + 1 for number_ in config.target_layer_ids])
    writer.add_bool(f"{ARCHITECTURE}.attention.causal", config.causal[0])
    sliding = [window is not None for window in config.windows]
    if any(sliding):
        writer.add_uint32(f"{ARCHITECTURE}.attention.sliding_window", next(w for w in config.windows if w))
        writer.add_array(f"{ARCHITECTURE}.attention.sliding_window_pattern", sliding)
    writer.add_uint32("slipstream.num_target_layers", config.num_target_layers)
    writer.add_uint32("slipstream.vocab_size", config.vocab_size)


def _float64() -> Any:
    from gguf import GGUFValueType

    return GGUFValueType.FLOAT64


def _refuse_unknown(fields: Mapping[str, Any], own: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    if any(own.get(key) for key in _DSPARK) or "markov_rank" in own:
        raise CheckpointError("this is a DSpark drafter, not a DFlash one")
    if any(own.get(key) for key in _DFLASH2):
        raise CheckpointError("this is a DFlash 2 drafter, which is not supported")
    known = _OTHER | _DSPARK | _DFLASH2 | set(_INTEGERS.values()) | {key for key, _ in _FLOATS.values()}
    wrong = [f"dflash.{key}" for key in own if key not in known]
    wrong += [f"slipstream.{key}" for key in extra if key not in _OURS]
    wrong += [key for key in fields if not key.startswith(("dflash.", "slipstream.", *_INERT))]
    if wrong:
        raise CheckpointError(f"key {min(wrong)} in the GGUF file is unknown to this layout")
    head, value, turned = (
        own.get(k) for k in ("attention.key_length", "attention.value_length", "rope.dimension_count")
    )
    if value not in (None, head) or turned not in (None, head):
        raise CheckpointError(
            "the GGUF file has heads of several widths or a partial rotation; neither is supported"
        )


def _exact(own: Mapping[str, Any], extra: Mapping[str, Any], key: str, field: str) -> float | None:
    """A float32, or the float64 that it was rounded from."""
    left_out = _FLOATS[field][1]
    if key not in own:
        if field in ("rope_theta", "rms_norm_eps"):
            raise CheckpointError(f"the GGUF file has no dflash.{key}")
        return left_out
    value = number(own[key], f"dflash.{key}")
    if field not in extra:
        return value
    exact = number(extra[field], f"slipstream.{field}")
    if float(np.float32(exact)) != value:
        raise CheckpointError(f"slipstream.{field} contradicts dflash.{key} in the GGUF file")
    return exact


def _windows(own: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    size = own.get("attention.sliding_window")
    if not size:
        return (None,) * layers
    size = integer(size, "dflash.attention.sliding_window")
    pattern = own.get("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise CheckpointError(f"dflash.attention.sliding_window_pattern must name {layers} layers")
    return tuple(size if sliding else None for sliding in pattern)


def _vocab_size(fields: Mapping[str, Any], own: Mapping[str, Any], extra: Mapping[str, Any]) -> int:
    tokens = fields.get("tokenizer.ggml.tokens")
    said = {len(tokens)} if isinstance(tokens, list) else set()
    said |= {integer(place["vocab_size"], "vocab_size") for place in (own, extra) if "vocab_size" in place}
    if len(said) != 1:
        raise CheckpointError(
            "the GGUF file does not say how many tokens there are, or says it in several ways"
        )
    return said.pop()


def _need(own: Mapping[str, Any], key: str) -> Any:
    if key == "block_size" and key not in own:
        return 16  # llama.cpp's own default
    if key not in own:
        raise CheckpointError(f"the GGUF file has no dflash.{key}")
    return own[key]
