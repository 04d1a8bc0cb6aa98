"""What a new drafter copies of its target, and which tokens it drafts."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GemmaConfig, GemmaForCausalLM

from slipstream.cli.app import run
from slipstream.formats import read_zlab
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.train.initial import initialise_from_target, plain_gains
from tests.target.families import SIZES, build
from tests.tiny import save_target


def scrambled_gemma() -> GemmaForCausalLM:
    """Gemma 1 has Llama's layers, but its norms store their gain less one."""
    torch.manual_seed(0)
    model = GemmaForCausalLM(GemmaConfig(**SIZES)).eval()
    for module in model.modules():
        if type(module).__name__ == "GemmaRMSNorm":
            torch.nn.init.normal_(module.weight, std=0.3)
    return model


def begun(model: torch.nn.Module, sample_LE: torch.Tensor) -> tuple[Drafter, bool]:
    config = DraftConfig.for_target(
        Target(model, None, "tiny").info, num_layers=1, block_size=4, num_taps=3, mask_token_id=96
    )
    torch.manual_seed(1)
    drafter = Drafter(config)
    return drafter, initialise_from_target(drafter, plain_gains(model), (2,), sample_LE)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma"])
def test_the_context_begins_as_the_keys_and_values_of_the_target_layer(family: str) -> None:
    model = scrambled_gemma() if family == "gemma" else build(family)
    ids = torch.arange(3, 20)[None]
    cache = model(ids, use_cache=True).past_key_values
    hidden = model(ids, output_hidden_states=True).hidden_states
    features_BLE = torch.cat([hidden[0], hidden[1], hidden[2]], dim=-1).detach()
    drafter, copied = begun(model, features_BLE[0])
    assert copied
    position_BL = torch.arange(ids.shape[1])[None]
    ((k_BGLC, v_BGLC),) = drafter.context_kv(features_BLE, position_BL)
    torch.testing.assert_close(v_BGLC, cache.layers[2].values, atol=1e-4, rtol=1e-4)
    if family == "qwen3":  # elsewhere ours are normed and the target's are not
        torch.testing.assert_close(k_BGLC, cache.layers[2].keys, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2"])
def test_layers_with_other_norms_are_not_copied(family: str) -> None:
    model = build(family)
    before = begun(model, torch.randn(5, 96))
    assert not before[1]


def test_a_new_drafter_drafts_what_its_data_shows(tmp_path) -> None:
    target = str(save_target(tmp_path / "target"))
    chats = tmp_path / "chats.jsonl"
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "abba"}]
    chats.write_text("".join(json.dumps({"messages": messages}) + "\n" for _ in range(3)))
    options = ["--max-steps", "1", "--num-layers", "1", "--taps", "1", "--block-size", "4"]
    options += ["--dtype", "float32", "--workload-prompts", "0", "--draft-vocabulary", "100"]
    command = ["train", "-t", target, "--data", str(chats)]
    assert run([*command, "-o", str(tmp_path / "new"), *options]) == 0
    shown = read_zlab(tmp_path / "new" / "drafter").draft_vocabulary
    assert shown is not None
    assert 2 < len(shown) < 100
    start = ["--from", str(tmp_path / "new" / "drafter")]
    options[options.index("--draft-vocabulary") + 1] = "0"
    assert run([*command, "-o", str(tmp_path / "all"), *options, *start]) == 0
    assert read_zlab(tmp_path / "all" / "drafter").draft_vocabulary is None
    start[1] = str(tmp_path / "all" / "drafter")
    options[options.index("--draft-vocabulary") + 1] = "100"
    assert run([*command, "-o", str(tmp_path / "on"), *options, *start]) == 0
    assert read_zlab(tmp_path / "on" / "drafter").draft_vocabulary is None, "it knows what is not shown"
