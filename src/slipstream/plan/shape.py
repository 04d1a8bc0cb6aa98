"""How many weights a model has, which of them a pass reads, and what it keeps per token: from its config.

Not a loader: nothing but `config.json` is read. Recurrent layers are those of Qwen's hybrids (the gated delta
rule); other recurrences, and attention that an indexer chooses, are not described and refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.core.errors import InputError

#: Families with an output gate beside the queries, norms on queries and keys, four norms a layer, biases.
_GATED = {"qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"}
_QK_NORMS = {"qwen3", "qwen3_moe", "gemma3_text"} | _GATED
_FOUR_NORMS = {"gemma2", "gemma3_text"}
_QKV_BIAS = {"qwen2", "qwen2_moe"}
_KNOWN_LAYERS = {"full_attention", "sliding_attention"}
_RECURRENT = "linear_attention"
#: Keys of the number of experts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True)
class Layer:
    """One decoder layer, in weights.

    Attributes:
        attention: projections, their biases and sinks.
        dense: an MLP, shared experts and the router: what every token uses; norms as well.
        expert: one expert; 0 without experts.
        experts: that there are.
        per_token: experts that a token uses.
        queries: numbers of one token's queries.
        kv: keys and values of one token, in numbers.
        window: tokens that are kept; None keeps all.
        state: numbers of a recurrent state per row, whatever the context; 0 for attention.
        latent: keys and values are one latent that all heads share, so every card keeps and reads all of it.
    """

    attention: int
    dense: int
    expert: int
    experts: int
    per_token: int
    queries: int
    kv: int
    window: int | None
    state: int = 0
    latent: bool = False


@dataclass(frozen=True)
class Shape:
    """A decoder.

    Attributes:
        name: of its family.
        width: D.
        vocabulary: rows of the head.
        tied: whether head and input embedding are one matrix.
        layers: from first to last.
        expert_bits: bits per weight of the experts where the checkpoint stores them shorter; else None.
        bits: bits per weight of the layers where the checkpoint stores them shorter; else None.
    """

    name: str
    width: int
    vocabulary: int
    tied: bool
    layers: tuple[Layer, ...]
    expert_bits: float | None = None
    bits: float | None = None

    @property
    def head(self) -> int:
        """Weights of the output embedding."""
        return self.width * self.vocabulary

    @property
    def parameters(self) -> int:
        """All weights, the final norm included."""
        body = sum(x.attention + x.dense + x.expert * x.experts for x in self.layers)
        return body + self.head * (1 if self.tied else 2) + self.width

    @property
    def active(self) -> int:
        """Weights that one token is multiplied by, the head included."""
        return sum(x.attention + x.dense + x.expert * x.per_token for x in self.layers) + self.head


def read_shape(raw: Mapping[str, Any]) -> Shape:
    """The shape that a config states.

    Args:
        raw: the object in config.json; of a model with pictures, its text part is taken.

    Raises:
        InputError: a key is missing, or the family's layers are not described.
    """
    config = raw.get("text_config", raw)
    family = str(config.get("model_type", raw.get("model_type", "unknown")))
    if config.get("index_topk"):
        raise InputError(f"{family} attends to what an indexer chooses, which the plan does not describe")
    width, count = _size(config, "hidden_size"), _size(config, "num_hidden_layers")
    kinds = _kinds(config, count, family)
    layers = tuple(_layer(config, family, number, kind) for number, kind in enumerate(kinds))
    bits, expert_bits = _stored_bits(raw.get("quantization_config") or {})
    tied = bool(config.get("tie_word_embeddings", raw.get("tie_word_embeddings", family.startswith("gemma"))))
    return Shape(family, width, _size(config, "vocab_size"), tied, layers, expert_bits, bits)


def distinct_experts(experts: int, per_token: int, tokens: float) -> float:
    """Expected number of different experts that some tokens use, if each chooses for itself.

    E (1 - (1 - k/E)^n). Tokens of one block choose more alike than that, so it is an upper estimate.
    """
    return experts * (1 - (1 - per_token / experts) ** tokens) if experts else 0.0


def _layer(config: Mapping[str, Any], family: str, number: int, kind: str) -> Layer:
    width = _size(config, "hidden_size")
    norms = width * (4 if family in _FOUR_NORMS else 2)
    dense, expert, experts, per_token = _mlp(config, family, number)
    if kind == _RECURRENT:
        mixing, state = _recurrence(config)
        return Layer(mixing, dense + norms, expert, experts, per_token, 0, 0, None, state)
    if config.get("kv_lora_rank"):
        attention, queries, kept = _latent(config)
        return Layer(attention, dense + norms, expert, experts, per_token, queries, kept, None, latent=True)
    attention, queries, keys, own_norms = _attention(config, family)
    window = config.get("sliding_window") if kind == "sliding_attention" else None
    return Layer(attention, dense + norms + own_norms, expert, experts, per_token, queries, 2 * keys, window)


def _attention(config: Mapping[str, Any], family: str) -> tuple[int, int, int, int]:
    """Weights of projections, widths of queries and of keys, weights of norms on them."""
    width, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    groups = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or (256 if family in _GATED else width // heads))
    queries, keys = heads * head_dim, groups * head_dim
    asked = queries * (2 if family in _GATED else 1)
    attention = width * (asked + 2 * keys) + queries * width
    if family in _QKV_BIAS or config.get("attention_bias"):
        attention += asked + 2 * keys
    if config.get("attention_bias") and family in {"llama", "gpt_oss", "qwen3", "qwen3_moe"} | _GATED:
        attention += width
    attention += heads if family == "gpt_oss" else 0
    return attention, queries, keys, 2 * head_dim if family in _QK_NORMS else 0


def _latent(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): weights, queries, what is kept.

    Kept per token are the latent and a key for the positions. In decoding the up-projections are absorbed:
    each head's query meets both, its shares the latent alone, so queries count as their mean width.
    """
    width, heads = _size(config, "hidden_size"), _size(config, "num_attention_heads")
    latent, turned = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
    plain, value = _size(config, "qk_nope_head_dim"), _size(config, "v_head_dim")
    asked, inner = heads * (plain + turned), int(config.get("q_lora_rank") or 0)
    weights = width * inner + inner + inner * asked if inner else width * asked
    weights += width * (latent + turned) + latent + latent * heads * (plain + value) + heads * value * width
    if config.get("attention_bias"):
        weights += inner + latent + turned + width
    return weights, heads * (2 * latent + turned) // 2, latent + turned


def _recurrence(config: Mapping[str, Any]) -> tuple[int, int]:
    """Weights of a gated delta-rule layer (Yang et al., arXiv 2412.06464) and numbers of its state per row.

    The state is a matrix of keys by values per value head, and the last inputs of the short convolution.
    """
    width, value_heads = _size(config, "hidden_size"), _size(config, "linear_num_value_heads")
    key_dim = int(config.get("linear_key_head_dim") or 128)
    value_dim = int(config.get("linear_value_head_dim") or 128)
    keys, values = _size(config, "linear_num_key_heads") * key_dim, value_heads * value_dim
    channels, taps = 2 * keys + values, int(config.get("linear_conv_kernel_dim") or 4)
    # Projections in (with the output gate, decay and step size per head) and out, convolution, norm, decays.
    weights = width * (channels + values + 2 * value_heads) + values * width
    weights += channels * taps + value_dim + 2 * value_heads
    return weights, value_heads * key_dim * value_dim + channels * (taps - 1)


def _mlp(config: Mapping[str, Any], family: str, number: int) -> tuple[int, int, int, int]:
    """Weights of every token, of an expert, experts, and those of a token."""
    width, inner = _size(config, "hidden_size"), int(config.get("intermediate_size") or 0)
    experts = int(next(filter(None, (config.get(key) for key in _EXPERTS)), 0))
    if not experts or _is_dense(config, number):
        return 3 * width * inner + (2 * inner + width if config.get("mlp_bias") else 0), 0, 0, 0
    per_token = int(config.get("num_experts_per_tok") or config.get("experts_per_token") or 0)
    if not 0 < per_token <= experts:
        raise InputError(f"the config has {experts} experts but says not how many a token uses")
    own = int(config.get("moe_intermediate_size") or inner)
    expert, router = 3 * width * own, width * experts
    if family == "gpt_oss":
        expert, router = expert + 2 * own + width, router + experts
    shared = int(config.get("shared_expert_intermediate_size") or 0)
    gate = width if shared else 0
    shared += own * int(config.get("n_shared_experts") or 0)
    return router + 3 * width * shared + gate, expert, experts, per_token


def _is_dense(config: Mapping[str, Any], number: int) -> bool:
    """Whether a layer of a model with experts has none: each family says so in its own way."""
    step, only_dense = int(config.get("decoder_sparse_step") or 1), config.get("mlp_only_layers") or ()
    every, first = int(config.get("moe_layer_freq") or 1), int(config.get("first_k_dense_replace") or 0)
    return bool(number in only_dense or (number + 1) % step or number < first or number % every)


def _kinds(config: Mapping[str, Any], count: int, family: str) -> list[str]:
    """What every layer attends to."""
    kinds = config.get("layer_types")
    if kinds is None:
        if config.get("linear_num_value_heads"):
            whole = int(config.get("full_attention_interval") or 4)
            return ["full_attention" if (n + 1) % whole == 0 else _RECURRENT for n in range(count)]
        every = config.get("sliding_window") and family in {"mistral", "mixtral"}
        pattern = int(config.get("sliding_window_pattern") or (6 if family == "gemma3_text" else 0))
        if pattern:
            return [("full" if (n + 1) % pattern == 0 else "sliding") + "_attention" for n in range(count)]
        return ["sliding_attention" if every else "full_attention"] * count
    known = _KNOWN_LAYERS | ({_RECURRENT} if config.get("linear_num_value_heads") else set())
    unknown = sorted(set(kinds) - known)
    if unknown or len(kinds) != count:
        raise InputError(
            f"{family} has layers of the kind {unknown[0]}, which the plan does not describe"
            if unknown
            else f"the config has {count} layers but names {len(kinds)}"
        )
    return list(kinds)


def _stored_bits(stored: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Bits per weight of layers and of experts, by how the checkpoint is quantised."""
    method = str(stored.get("quant_method", ""))
    if method == "mxfp4":  # experts alone, with a scale of 8 bits for 32 weights
        return None, 4.25
    if "fp8" in method:
        return 8.0, 8.0
    if method in {"awq", "gptq", "bitsandbytes"} and (stored.get("bits") == 4 or stored.get("load_in_4bit")):
        return 4.25, 4.25
    return None, None


def _size(config: Mapping[str, Any], key: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"the config's {key} must be a whole number above 0, not {value!r}")
    return value
