"""What a target's configuration says: sizes, windows by layer type, and whether it can verify drafts.

Not a list of model names: a family is judged by its layer types and modules, before any weight is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from slipstream.core.errors import TargetError
from slipstream.target.masks import LayerWindows

_STATEFUL_CLASS = re.compile(
    r"Mamba|SSM|Ssm|R[Ww][Kk][Vv]|LSTM|DeltaNet|LinearAttention|LightningAttention|Recurrent|RGLRU|RgLru|ShortConv"
    r"|Hyena|Retention"
)


@dataclass(frozen=True)
class TargetInfo:
    """Everything about a target that others may read.

    Attributes:
        name: as the user gave it.
        model_type: of the configuration, such as `qwen3`.
        vocab_size: ids that the model can choose; padded rows of the output embedding are cut off.
        embedding_rows: rows of the input embedding, at least vocab_size.
        width: D of the hidden states.
        num_layers: decoder layers.
        num_heads: query heads.
        num_kv_heads: key/value heads.
        head_dim: width of a head.
        intermediate_size: feed-forward width.
        rms_norm_eps: of the norms.
        rope_theta: base of the rotary embedding (of the full layers where they differ).
        max_context: longest sequence in tokens.
        eos_token_ids: ids that end a text.
        embedding_multiplier: applied by the model after its embedding module (Granite), else 1.0.
    """

    name: str
    model_type: str
    vocab_size: int
    embedding_rows: int
    width: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    max_context: int
    eos_token_ids: tuple[int, ...]
    embedding_multiplier: float = 1.0


def layer_windows(config: PretrainedConfig) -> LayerWindows:
    """Window of every layer type of a model.

    Args:
        config: the text configuration.

    Returns:
        For each layer type: its window, or None for full attention.

    Raises:
        TargetError: a layer type keeps a state that cannot roll back, or an attention that is not supported.
    """
    types = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    window = getattr(config, "sliding_window", None)
    if not types:
        return {"full_attention" if window is None else "sliding_attention": window}
    windows: dict[str, int | None] = {}
    for layer_type in types:
        if layer_type in ("full_attention", "attention"):
            windows[layer_type] = None
        elif layer_type == "sliding_attention" and window is not None:
            windows[layer_type] = window
        else:
            raise _unsupported(config, str(layer_type))
    return windows


def check_config(config: PretrainedConfig) -> None:
    """Refuses what cannot be decoded speculatively, from the configuration alone.

    Args:
        config: the text configuration.

    Raises:
        TargetError: names the layer type or the feature in the way.
    """
    layer_windows(config)
    rope = _rope(config)
    reasons = (
        (getattr(config, "is_encoder_decoder", False), "an encoder"),
        (getattr(config, "alibi", False), "ALiBi position biases"),
        (getattr(config, "attention_chunk_size", None), "chunked attention"),
        (getattr(config, "use_bidirectional_attention", None), "bidirectional attention"),
        (rope.get("rope_type", rope.get("type")) == "dynamic", "rotary frequencies that change with length"),
    )
    for present, what in reasons:
        if present:
            raise TargetError(
                f"the target ({config.model_type}) uses {what}, which Slipstream cannot verify in blocks"
            )


def check_modules(config: PretrainedConfig, decoder: nn.Module) -> None:
    """Refuses recurrent or convolutional layers by looking at the modules themselves.

    Args:
        config: the text configuration.
        decoder: the decoder of the model.

    Raises:
        TargetError: names the class of the layer in the way.
    """
    for module in decoder.modules():
        name = type(module).__name__
        if isinstance(module, nn.Conv1d) or _STATEFUL_CLASS.search(name):
            raise _unsupported(config, name)


def describe(
    name: str, config: PretrainedConfig, rows: tuple[int, int], eos_token_ids: tuple[int, ...]
) -> TargetInfo:
    """Collects the description of a target from its text configuration.

    Args:
        name: as the user gave it.
        config: the text configuration.
        rows: rows of the input and of the output embedding.
        eos_token_ids: ids that end a text.

    Returns:
        The description.

    Raises:
        TargetError: the configuration does not state its longest context.
    """
    heads = config.num_attention_heads
    width = config.hidden_size
    return TargetInfo(
        name=name,
        model_type=config.model_type,
        vocab_size=min(config.vocab_size, rows[1]),
        embedding_rows=rows[0],
        width=width,
        num_layers=config.num_hidden_layers,
        num_heads=heads,
        num_kv_heads=_first(config, ("num_key_value_heads",), heads),
        head_dim=_first(config, ("head_dim",), width // heads),
        intermediate_size=_first(config, ("intermediate_size", "ffn_dim", "n_inner"), 4 * width),
        rms_norm_eps=_first(config, ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), 1e-6),
        rope_theta=float(_rope(config).get("rope_theta") or _first(config, ("rope_theta",), 10000.0)),
        max_context=_max_context(config),
        eos_token_ids=eos_token_ids,
        embedding_multiplier=float(_first(config, ("embedding_multiplier",), 1.0)),
    )


def _max_context(config: PretrainedConfig) -> int:
    longest = _first(config, ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 0)
    rope = _rope(config)
    if rope.get("rope_type", rope.get("type")) == "longrope":
        # Past the original length the frequencies change for the whole text, and cached keys would be stale.
        original = rope.get("original_max_position_embeddings")
        longest = original or _first(config, ("original_max_position_embeddings",), longest)
    if not longest:
        raise TargetError(
            f"the target ({config.model_type}) does not state its longest context in its configuration"
        )
    return int(longest)


def _rope(config: PretrainedConfig) -> dict[str, Any]:
    """Rotary parameters of the full layers, under the names of transformers 4 (`rope_scaling`) and 5."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    return dict(rope.get("full_attention") or rope)


def _first(config: PretrainedConfig, names: tuple[str, ...], otherwise: Any) -> Any:
    values = (getattr(config, name, None) for name in names)
    return next((v for v in values if v is not None), otherwise)


def _unsupported(config: PretrainedConfig, layer_type: str) -> TargetError:
    return TargetError(
        f"the target ({config.model_type}) has layers of type {layer_type}, "
        "whose cache cannot roll back a rejected draft"
    )
