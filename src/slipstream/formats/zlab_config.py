"""`config.json` of the z-lab layout to a `DraftConfig` and back.

Keys are read in the order of the authors' package: `dflash_config`, then the top level, then a default. A key
that changes the computation in a way that we do not compute is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slipstream.core.errors import CheckpointError
from slipstream.formats.checkpoint import MOST, check_keys, check_layers, integer, number
from slipstream.formats.keys import INERT_KEYS, NEUTRAL_KEYS, QWEN3_KEYS
from slipstream.model import DraftConfig, TargetShape

_MISSING = object()

# Keys of relatives of DFlash (DFlash 2, DSpark, JetSpec, Domino): further modules or other masks.
_FOREIGN = (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
    "causal_head",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "sample_from_anchor",
    "shift_label",
)

_OWN_KEYS = frozenset(
    (
        "block_size",
        "mask_token_id",
        "target_layer_ids",
        "num_target_layers",
        "target_hidden_size",
        "is_causal",
        "input_embedding_scale",
        "output_multiplier",
        "final_logit_softcapping",
    )
)
NESTED_KEYS = (
    _OWN_KEYS | {"causal", "swa_window_size", "use_swa"} | frozenset(_FOREIGN) | frozenset(NEUTRAL_KEYS)
)
TOP_KEYS = (
    _OWN_KEYS | QWEN3_KEYS | INERT_KEYS | {"dflash_config"} | frozenset(_FOREIGN) | frozenset(NEUTRAL_KEYS)
)


def parse_config(raw: Mapping[str, Any]) -> DraftConfig:
    """Read a configuration strictly.

    Raises:
        CheckpointError: one sentence that names the key.
    """
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise CheckpointError("dflash_config in config.json must be an object")
    _refuse_foreign(raw, nested)
    check_keys(raw, TOP_KEYS, "config.json")
    check_keys(nested, NESTED_KEYS, "dflash_config in config.json")
    layers = _integer(raw, nested, "num_hidden_layers")
    check_layers(layers)
    heads, width = _integer(raw, nested, "num_attention_heads"), _integer(raw, nested, "hidden_size")
    windows = _windows(raw, nested, layers)
    theta, rope = _rope(raw)
    cap = nested.get("final_logit_softcapping", raw.get("final_logit_softcapping"))
    return DraftConfig(
        width=width,
        intermediate_size=_integer(raw, nested, "intermediate_size"),
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=_integer(raw, nested, "num_key_value_heads"),
        head_dim=_integer(raw, nested, "head_dim", width // max(heads, 1)),
        vocab_size=_integer(raw, nested, "vocab_size"),
        block_size=_integer(raw, nested, "block_size"),
        mask_token_id=_integer(raw, nested, "mask_token_id"),
        target_layer_ids=_layer_ids(raw, nested),
        num_target_layers=_integer(raw, nested, "num_target_layers"),
        target_width=_integer(raw, nested, "target_hidden_size", width),
        causal=_causal(raw, nested, windows),
        windows=windows,
        rope_theta=theta,
        max_position_embeddings=_integer(raw, nested, "max_position_embeddings"),
        rms_norm_eps=_number(raw, nested, "rms_norm_eps", 1e-6),
        rope_parameters=rope,
        input_embedding_scale=_number(raw, nested, "input_embedding_scale", 1.0),
        output_multiplier=_number(raw, nested, "output_multiplier", 1.0),
        final_logit_softcapping=None if cap is None else _number(raw, nested, "final_logit_softcapping", 0.0),
    )


def render_config(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """Write a configuration so that every known reader reads the same from it.

    Raises:
        CheckpointError: the layout cannot express the causality or the windows.
    """
    if config.from_anchor:
        raise CheckpointError(
            "the z-lab layout gives drafts at the mask slots, this drafter gives the first one at the "
            "anchor's; only the speculators layout can say so"
        )
    sliding = [window is not None for window in config.windows]
    sizes = {window for window in config.windows if window is not None}
    if len(sizes) > 1:
        raise CheckpointError(
            "the z-lab layout has one sliding window for all layers, this drafter has several"
        )
    window = sizes.pop() if sizes else None
    nested: dict[str, Any] = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "swa_window_size": window,
    }
    top = _common(config, dtype) | {
        "layer_types": ["sliding_attention" if s else "full_attention" for s in sliding],
        "sliding_window": window,
        "use_sliding_window": any(sliding),
        "max_window_layers": config.num_layers,
    }
    if len(set(config.causal)) == 1:
        top["is_causal"] = nested["causal"] = config.causal[0]
    elif list(config.causal) != sliding:
        raise CheckpointError(
            "the z-lab layout can mix causal and bidirectional layers only as causal sliding and "
            "bidirectional full ones"
        )
    return top | {"dflash_config": nested}


def check_pair(config: DraftConfig, info: TargetShape) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        CheckpointError: one sentence that says what differs.
    """
    pairs = (
        ("width", config.width, info.width),
        ("target width", config.target_width, info.width),
        ("number of target layers", config.num_target_layers, info.num_layers),
    )
    for name, ours, theirs in pairs:
        if ours != theirs:
            raise CheckpointError(f"the drafter is not for {info.name}: its {name} is {ours}, not {theirs}")
    if config.vocab_size not in (info.vocab_size, info.embedding_rows):
        raise CheckpointError(
            f"the drafter is not for {info.name}: its vocabulary is {config.vocab_size}, "
            f"not {info.vocab_size}"
        )
    if config.mask_token_id >= info.embedding_rows:
        raise CheckpointError(
            f"the drafter is not for {info.name}: its mask token id {config.mask_token_id} lies outside the "
            f"embedding of {info.embedding_rows} rows"
        )


def _common(config: DraftConfig, dtype: str) -> dict[str, Any]:
    """Keys that need no thought."""
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": config.block_size,
        "dtype": dtype,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.width,
        "intermediate_size": config.intermediate_size,
        "mask_token_id": config.mask_token_id,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "num_target_layers": config.num_target_layers,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rope_scaling": None,
        "rope_theta": config.rope_theta,
        "target_hidden_size": config.target_width,
        "target_layer_ids": list(config.target_layer_ids),
        "tie_word_embeddings": False,
        "vocab_size": config.vocab_size,
    }
    optional = {
        "input_embedding_scale": (config.input_embedding_scale, 1.0),
        "output_multiplier": (config.output_multiplier, 1.0),
        "final_logit_softcapping": (config.final_logit_softcapping, None),
    }
    return values | {key: value for key, (value, default) in optional.items() if value != default}


def _find(raw: Mapping[str, Any], nested: Mapping[str, Any], key: str, default: Any = _MISSING) -> Any:
    """The authors' order: nested, top level, default."""
    value = nested.get(key, raw.get(key, default))
    if value is _MISSING:
        raise CheckpointError(f"config.json has no {key}")
    return value


def _integer(raw: Mapping[str, Any], nested: Mapping[str, Any], key: str, default: Any = _MISSING) -> int:
    """An integer key."""
    return integer(_find(raw, nested, key, default), f"{key} in config.json")


def _number(raw: Mapping[str, Any], nested: Mapping[str, Any], key: str, default: float) -> float:
    """A number key."""
    return number(_find(raw, nested, key, default), f"{key} in config.json")


def _layer_ids(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[int, ...]:
    """The taps."""
    value = _find(raw, nested, "target_layer_ids")
    if not isinstance(value, list) or not all(type(item) is int for item in value):
        raise CheckpointError(f"target_layer_ids in config.json must be a list of integers, not {value!r}")
    return tuple(value)


def _windows(raw: Mapping[str, Any], nested: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Window of each layer from layer_types and sliding_window, or one for all by use_swa."""
    kinds = raw.get("layer_types")
    if kinds is None:
        kinds = ["full_attention"] * layers
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise CheckpointError(f"layer_types in config.json must name {layers} layers, not {kinds!r}")
    unknown = [kind for kind in kinds if kind not in ("full_attention", "sliding_attention")]
    if unknown:
        raise CheckpointError(f"layer type {unknown[0]!r} in config.json is not supported")
    if nested.get("use_swa") and "sliding_attention" not in kinds:
        kinds = ["sliding_attention"] * layers
    said = [w for w in (nested.get("swa_window_size"), raw.get("sliding_window")) if w]
    window = said[0] if said else None
    if "sliding_attention" in kinds:
        if type(window) is not int or not 1 <= window < MOST:
            raise CheckpointError(f"sliding layers need a sliding_window in config.json, which is {window!r}")
        if any(other != window for other in said):
            raise CheckpointError("sliding_window and swa_window_size in config.json contradict each other")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _causal(
    raw: Mapping[str, Any], nested: Mapping[str, Any], windows: tuple[int | None, ...]
) -> tuple[bool, ...]:
    """One word for all layers, or the default: sliding layers are causal (but not by use_swa)."""
    places = ((nested, "is_causal"), (raw, "is_causal"), (nested, "causal"))
    said = [source[key] for source, key in places if source.get(key) is not None]
    if not said:
        symmetric = bool(nested.get("use_swa"))
        return tuple(window is not None and not symmetric for window in windows)
    if any(type(value) is not bool for value in said) or len(set(said)) > 1:
        raise CheckpointError("is_causal and dflash_config.causal in config.json contradict each other")
    return (bool(said[0]),) * len(windows)


def _rope(raw: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Base and further rotary settings, from either spelling."""
    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(parameters, Mapping):
        raise CheckpointError("rope_parameters in config.json must be an object")
    theta = parameters.get("rope_theta", raw.get("rope_theta"))
    unknown = sorted(set(parameters) - {"rope_theta", "rope_type", "type", "partial_rotary_factor"})
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default" and unknown:
        raise CheckpointError(f"key {unknown[0]} in rope_parameters is unknown to this layout")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        raise CheckpointError("partial_rotary_factor in config.json is not supported")
    return number(theta, "rope_theta in config.json"), {"rope_type": kind}


def _refuse_foreign(raw: Mapping[str, Any], nested: Mapping[str, Any]) -> None:
    """Refuse other methods' checkpoints and settings that we do not compute."""
    for key in _FOREIGN:
        if nested.get(key) or raw.get(key):
            raise CheckpointError(f"{key} in config.json belongs to another drafting method than DFlash")
    for key, neutral in NEUTRAL_KEYS.items():
        for value in (nested.get(key), raw.get(key)):
            if value is not None and value != neutral:
                raise CheckpointError(f"{key} {value!r} in config.json is not supported, only {neutral!r} is")
    if raw.get("attention_bias"):
        raise CheckpointError("attention_bias in config.json is not supported, drafters have no biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(
            f"hidden_act {raw['hidden_act']!r} in config.json is not supported, only 'silu' is"
        )
