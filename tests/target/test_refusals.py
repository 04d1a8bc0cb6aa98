"""Families that cannot be decoded speculatively are refused by the name of the layer type in the way."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    FalconConfig,
    FalconH1Config,
    JambaConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from slipstream.core.errors import TargetError
from slipstream.target import load_target, target_from_model
from slipstream.target.family import check_config, layer_windows
from tests.target.families import SIZES

BASE = {key: value for key, value in SIZES.items() if key != "head_dim"}


def refusal(config):
    """The sentence with which a tiny model of a configuration is refused."""
    with pytest.raises(TargetError) as caught:
        target_from_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    return str(caught.value)


@pytest.mark.parametrize(
    ("config", "layer_type"),
    [
        (
            Qwen3NextConfig(**SIZES, num_experts=2, num_experts_per_tok=1, layer_types=None),
            "linear_attention",
        ),
        (Lfm2Config(**BASE, layer_types=["conv", "full_attention", "conv"]), "conv"),
        (
            Llama4TextConfig(**BASE, num_local_experts=2, layer_types=["chunked_attention"] * 3),
            "chunked_attention",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else value.model_type,
)
def test_a_layer_type_of_the_configuration_is_named(config, layer_type):
    with pytest.raises(TargetError, match=f"layers of type {layer_type}, "):
        check_config(config)


def test_mamba_is_named_by_its_module():
    config = MambaConfig(vocab_size=97, hidden_size=32, state_size=4, num_hidden_layers=2)
    assert "Mamba" in refusal(config) or "layers of type" in refusal(config)


def test_a_hybrid_without_layer_types_is_named():
    config = FalconH1Config(**BASE, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=4)
    assert "layers of type" in refusal(config)


def test_alibi_is_refused():
    assert "ALiBi" in refusal(
        FalconConfig(vocab_size=97, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True)
    )
    bloom = BloomConfig(vocab_size=97, hidden_size=32, n_layer=2, n_head=4)
    assert "no explicit positions" in refusal(bloom)


def test_rotary_frequencies_that_change_with_length_are_refused():
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(TargetError, match="change with length"):
        check_config(LlamaConfig(**SIZES, rope_parameters=rope))


def test_a_folder_is_refused_before_its_weights_are_read(tmp_path):
    Qwen3NextConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="linear_attention"):
        load_target(str(tmp_path))


def test_windows_by_layer_type():
    assert layer_windows(LlamaConfig(**SIZES)) == {"full_attention": None}


@pytest.mark.parametrize("config_class", [JambaConfig, RecurrentGemmaConfig])
def test_other_recurrent_families_are_refused(config_class):
    with pytest.raises(TargetError, match="layers of type"):
        target_from_model(_shell(config_class()))


def _shell(config):
    """A model without weights: refusal must come from the configuration or the modules."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(_small(config), dtype=torch.float32)


def _small(config):
    config.num_hidden_layers = 3
    return config
