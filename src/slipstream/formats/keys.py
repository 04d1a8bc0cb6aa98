"""Keys of a Hugging Face configuration that layouts share: those that shape a drafter, and the others.

A key that stands in none of a layout's lists is an error: it may change what is computed.
"""

from __future__ import annotations

from typing import Any, Final

#: Read from a Qwen3-style configuration.
QWEN3_KEYS: Final = frozenset(
    (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_theta",
        "rope_parameters",
        "rope_scaling",
        "layer_types",
        "sliding_window",
        "use_sliding_window",
        "attention_bias",
        "hidden_act",
    )
)

#: Keys that would change the computation, with the one value that leaves it as it is.
NEUTRAL_KEYS: Final[dict[str, Any]] = {
    "attention_sink_bias": False,
    "add_swa_attention_sink_bias": False,
    "add_full_attention_sink_bias": False,
    "attention_value_scale": 1.0,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
    "projector_type": None,
    "rope_interleaved": False,
    "rope_is_neox_style": True,
    "use_gemma_norm": False,
}

#: Keys of every Hugging Face configuration, and of training, that do not change what a drafter computes.
INERT_KEYS: Final = frozenset(
    (
        "_attn_implementation_autoset",
        "_name_or_path",
        "add_cross_attention",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "chunk_size_feed_forward",
        "cross_attention_hidden_size",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "dtype",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "exponential_decay_length_penalty",
        "finetuning_task",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "id2label",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "label2id",
        "length_penalty",
        "mask_token",
        "max_length",
        "max_window_layers",
        "min_length",
        "model_type",
        "name_or_path",
        "no_repeat_ngram_size",
        "num_anchors",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "pad_token_id",
        "prefix",
        "pretraining_tp",
        "problem_type",
        "pruned_heads",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "suppress_tokens",
        "task_specific_params",
        "temperature",
        "tf_legacy_loss",
        "tie_encoder_decoder",
        "tie_word_embeddings",
        "tokenizer_class",
        "top_k",
        "top_p",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "typical_p",
        "unk_token_id",
        "use_bfloat16",
        "use_cache",
    )
)
