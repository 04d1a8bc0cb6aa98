"""Weights by arithmetic against models of transformers that are built without memory."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from slipstream.core.errors import InputError
from slipstream.model import DraftConfig, Drafter
from slipstream.plan import Setting, described_drafter, find_card, read_drafter_shape, read_shape
from slipstream.plan.cost import cache_bytes, kv_bytes
from slipstream.plan.shape import distinct_experts
from slipstream.testing import tiny_target

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
RECURRENT = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 3,
}
LATENT = {
    **{key: value for key, value in SIZES.items() if key not in ("head_dim", "num_key_value_heads")},
    "num_key_value_heads": 6,
    "kv_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
    "tie_word_embeddings": False,
}
SHARED = {**EXPERTS, **RECURRENT, "shared_expert_intermediate_size": 24}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "mistral": MistralConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, tie_word_embeddings=False),
    "qwen3 experts": Qwen3MoeConfig(**SIZES, **EXPERTS, tie_word_embeddings=False),
    "some layers with experts": Qwen3MoeConfig(
        **SIZES, **EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3], tie_word_embeddings=False
    ),
    "gemma 3": Gemma3TextConfig(**SIZES, tie_word_embeddings=True),
    "gpt-oss": GptOssConfig(
        **SIZES, num_local_experts=8, num_experts_per_tok=2, attention_bias=True, tie_word_embeddings=False
    ),
    "qwen 3.5": Qwen3_5TextConfig(**SIZES, **RECURRENT, tie_word_embeddings=True),
    "qwen 3.5 experts": Qwen3_5MoeTextConfig(**SIZES, **SHARED, tie_word_embeddings=False),
    "deepseek 2, lite": DeepseekV2Config(**LATENT, q_lora_rank=None),
    "deepseek 3": DeepseekV3Config(**LATENT, q_lora_rank=28),
    "deepseek 3 with biases": DeepseekV3Config(**LATENT, q_lora_rank=28, attention_bias=True),
    "qwen 3 next": Qwen3NextConfig(**SIZES, **SHARED, tie_word_embeddings=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_every_weight_is_counted(name: str) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = read_shape(config.to_dict())
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    cut = shape.parameters - sum(x.expert * (x.experts - x.per_token) for x in shape.layers)
    assert shape.active + shape.width + (0 if shape.tied else shape.head) == cut


def test_windows_and_kinds_of_layers() -> None:
    shape = read_shape(CONFIGS["gemma 3"].to_dict())
    kinds = CONFIGS["gemma 3"].layer_types
    assert [x.window is not None for x in shape.layers] == [kind == "sliding_attention" for kind in kinds]
    assert {x.kv for x in shape.layers} == {2 * 2 * 16}


@pytest.mark.parametrize("name", ["qwen 3.5", "qwen 3 next"])
def test_recurrent_layers_keep_a_state_instead_of_keys(name: str) -> None:
    config = CONFIGS[name]
    shape = read_shape(config.to_dict())
    recurrent = [layer.state > 0 for layer in shape.layers]
    assert (
        recurrent == [kind == "linear_attention" for kind in config.layer_types] == [True, True, True, False]
    )
    # Four heads of 8 by 12, and two earlier inputs of a convolution over 2 x 16 + 48 channels.
    assert shape.layers[0].state == 4 * 8 * 12 + 2 * (2 * 16 + 48)
    without = {key: value for key, value in config.to_dict().items() if key != "layer_types"}
    assert read_shape(without) == shape
    assert kv_bytes(shape, 100) - kv_bytes(shape, 10) == 90 * 2 * 2 * 16 * 2
    assert kv_bytes(shape, 0) == 3 * 4 * shape.layers[0].state


# The values of the published config.json that count.
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8"},
}
KIMI_K2 = DEEPSEEK_V3 | {
    "vocab_size": 163840,
    "num_attention_heads": 64,
    "n_routed_experts": 384,
    "first_k_dense_replace": 1,
}


def test_deepseek_v3_by_hand() -> None:
    """671 billion weights, 37 of them for one token, 576 numbers of cache per token and layer."""
    shape = read_shape(DEEPSEEK_V3)
    queries = 7168 * 1536 + 1536 + 1536 * 128 * 192
    latents = 7168 * 576 + 512 + 512 * 128 * 256
    attention, norms = queries + latents + 128 * 128 * 7168, 2 * 7168
    dense, expert, router = 3 * 7168 * 18432, 3 * 7168 * 2048, 7168 * 256
    body = 61 * (attention + norms) + 3 * dense + 58 * (router + 257 * expert)
    assert shape.parameters == body + 2 * 129280 * 7168 + 7168 == pytest.approx(671.0e9, rel=1e-3)
    assert shape.active == pytest.approx(37e9, rel=0.02)
    assert {layer.kv for layer in shape.layers} == {576}
    assert kv_bytes(shape, 1000) == 1000 * 61 * 576 * 2
    assert [layer.experts for layer in shape.layers[:4]] == [0, 0, 0, 256]
    # Scores over 576 numbers and values over 512, two operations each, per head.
    assert {4 * layer.queries for layer in shape.layers} == {128 * 2 * (576 + 512)}
    assert shape.bits == 8.0


def test_kimi_k2_by_hand() -> None:
    """A trillion weights, 32 billion of them for one token."""
    shape = read_shape(KIMI_K2)
    assert shape.parameters == pytest.approx(1.03e12, rel=0.01)
    assert shape.active == pytest.approx(32.6e9, rel=0.03)


def test_every_card_keeps_all_of_a_latent() -> None:
    shape = read_shape(DEEPSEEK_V3)
    one, eight = (Setting(find_card("H200"), cards, context=500) for cards in (1, 8))
    assert cache_bytes(shape, one) == kv_bytes(shape, 500)
    assert cache_bytes(shape, eight) == 8 * kv_bytes(shape, 500)
    qwen = read_shape(CONFIGS["qwen3"].to_dict())
    assert cache_bytes(qwen, eight) == kv_bytes(qwen, 500)


def test_a_drafter_of_a_latent_target_has_plain_attention() -> None:
    described, _ = described_drafter(read_shape(DEEPSEEK_V3), 5)
    assert {(layer.latent, layer.kv, layer.experts) for layer in described.layers} == {(False, 1792, 0)}


def test_a_drafter_of_a_hybrid_has_plain_attention() -> None:
    described, _ = described_drafter(read_shape(CONFIGS["qwen 3.5"].to_dict()), 2)
    assert {layer.attention for layer in described.layers} == {48 * (96 + 2 * 32) + 96 * 48}
    only = read_shape(CONFIGS["qwen 3.5"].to_dict() | {"layer_types": ["linear_attention"] * 4})
    with pytest.raises(InputError, match="no layer with attention"):
        described_drafter(only, 2)


# Totals that the makers publish for their checkpoints, or that follow from their files' sizes.
PUBLISHED_SIZES = {
    "Qwen3-4B": 4_022_468_096,
    "Qwen3-8B": 8_190_735_360,
    "Llama-3.1-8B": 8_030_261_248,
    "Qwen3-Coder-30B-A3B": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "Qwen3-Coder-Next": 79_674_391_296,
}


@pytest.mark.parametrize("name", PUBLISHED_SIZES)
def test_published_models_have_their_published_size(name: str) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "published.json"
    targets = json.loads(path.read_text(encoding="utf-8"))["targets"]
    assert read_shape(targets[name]).parameters == PUBLISHED_SIZES[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "hidden_size must be a whole number"),
        ({"layer_types": ["linear_attention"] * 4}, "linear_attention"),
        ({"layer_types": ["full_attention"] * 3}, "4 layers but names 3"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim must be a whole number"),
        ({"kv_lora_rank": 512, "index_topk": 2048}, "indexer"),
        ({"num_local_experts": 4}, "says not how many"),
    ],
)
def test_what_is_not_described_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_shape(CONFIGS["llama"].to_dict() | change)


def test_stored_bits_are_read() -> None:
    raw = CONFIGS["gpt-oss"].to_dict()
    assert read_shape(raw | {"quantization_config": {"quant_method": "mxfp4"}}).expert_bits == 4.25
    assert read_shape(raw | {"quantization_config": {"quant_method": "fp8"}}).bits == 8.0


@pytest.mark.parametrize("tokens", [1, 2, 7, 40])
def test_distinct_experts_by_drawing(tokens: int) -> None:
    draw, experts, each = random.Random(tokens), 16, 3
    tries = [
        len({expert for _ in range(tokens) for expert in draw.sample(range(experts), each)})
        for _ in range(4000)
    ]
    assert distinct_experts(experts, each, tokens) == pytest.approx(sum(tries) / len(tries), rel=0.02)
    assert distinct_experts(0, 0, tokens) == 0


def test_drafters_are_counted_too() -> None:
    target = tiny_target()
    shape = read_shape(target.model.config.to_dict())
    config = DraftConfig.for_target(target.info, num_layers=3, block_size=6, num_taps=2)
    made = Drafter(config)
    described, fused = described_drafter(shape, 3, 2)
    counted = sum(x.attention + x.dense for x in described.layers) + fused
    # Norms of the whole and of queries and keys are left out of the description: a few numbers per layer.
    left_out = 2 * config.width + 3 * 2 * config.head_dim
    assert counted + left_out == sum(p.numel() for p in made.parameters())
    raw = {
        "hidden_size": config.width,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": 3,
        "num_attention_heads": config.num_heads,
        "head_dim": config.head_dim,
        "num_key_value_heads": config.num_kv_heads,
        "vocab_size": config.vocab_size,
        "block_size": 6,
        "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 5},
    }
    read, also_fused, block = read_drafter_shape(raw, shape)
    assert (also_fused, block) == (fused, 6)
    assert sum(x.attention + x.dense for x in read.layers) + fused + 2 * config.width == sum(
        p.numel() for p in made.parameters()
    )
    with pytest.raises(InputError, match="no dflash_config"):
        read_drafter_shape({"block_size": 4}, shape)
    with pytest.raises(InputError, match="the drafter has width"):
        read_drafter_shape(raw | {"hidden_size": 64}, shape)
