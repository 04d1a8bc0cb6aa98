"""Tiny random models of every family that the target is proved on, built from configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import (
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "llama_tied": lambda: LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2_window": lambda: Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=5, layer_types=MIXED
    ),
    "qwen3": lambda: Qwen3Config(**SIZES),
    "qwen3_moe": lambda: Qwen3MoeConfig(**SIZES, **MOE),
    "mistral_window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "gemma2": lambda: Gemma2Config(**SIZES, sliding_window=5, query_pre_attn_scalar=8),
    "gemma3": lambda: Gemma3TextConfig(
        **SIZES, sliding_window=5, layer_types=MIXED, query_pre_attn_scalar=8, final_logit_softcapping=3.0
    ),
    "phi3": lambda: Phi3Config(**SIZES, sliding_window=6),
    "olmo2": lambda: Olmo2Config(**SIZES),
    "granite": lambda: GraniteConfig(
        **SIZES,
        logits_scaling=4.0,
        embedding_multiplier=6.0,
        residual_multiplier=0.5,
        attention_multiplier=0.3,
    ),
    "cohere": lambda: CohereConfig(**SIZES, logit_scale=0.25),
    "cohere2": lambda: Cohere2Config(**SIZES, logit_scale=0.25, sliding_window=5, layer_types=MIXED),
    "gpt_oss": lambda: GptOssConfig(
        **SIZES, sliding_window=5, layer_types=MIXED, num_local_experts=4, num_experts_per_tok=2
    ),
    "gpt2": lambda: GPT2Config(vocab_size=97, n_embd=32, n_layer=3, n_head=4, n_positions=128),
}


def build(family: str, seed: int = 0) -> PreTrainedModel:
    """A random fp32 model of a family, with weights so large that windows, sinks and caps show."""
    config = FAMILIES[family]()
    torch.manual_seed(seed)
    implementation = "eager" if family in ("gemma2", "gpt_oss") else "sdpa"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=implementation
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.15)
            else:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()
