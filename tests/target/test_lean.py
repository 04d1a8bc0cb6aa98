"""The lean pass against transformers' own modules, family by family."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from slipstream.target import target_from_model
from slipstream.target.lean import lean_decoder
from tests.target.families import build

LEAN = ("llama", "llama_tied", "qwen2", "qwen2_window", "qwen3", "mistral_window")


def both(family):
    """One target that runs lean and one that runs the modules, with the same weights."""
    lean, general = target_from_model(build(family)), target_from_model(build(family))
    assert lean._lean is not None
    general._lean = None
    return lean, general


@pytest.mark.parametrize("family", LEAN)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_logits_and_features_are_those_of_the_modules(family, tokens, rows):
    torch.manual_seed(rows)
    lean, general = both(family)
    length_B = torch.randint(3, 12, (rows,))
    ids_BL, ids_BT = torch.randint(3, 97, (rows, 12)), torch.randint(3, 97, (rows, tokens))
    results = []
    for target in (lean, general):
        target.set_taps((0, target.info.num_layers - 1))
        cache = target.new_cache(rows, 20)
        filled = target.prefill(ids_BL, length_B, cache, chunk=5)
        results.append((filled, target.verify(ids_BT, length_B, cache, 18)))
    for mine, theirs in zip(*results, strict=True):
        for name, value in vars(theirs).items():
            if name == "features_BLE":
                continue  # past a row's length they mean nothing
            torch.testing.assert_close(getattr(mine, name), value, atol=2e-4, rtol=2e-4)
    for row, length in enumerate(length_B.tolist()):
        mine, theirs = (result[0].features_BLE[row, :length] for result in results)
        torch.testing.assert_close(mine, theirs, atol=2e-4, rtol=2e-4)


def test_the_weights_are_held_once(tmp_path):
    model = build("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    target_from_model(model)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.weight.untyped_storage().data_ptr() == (
        attention.k_proj.weight.untyped_storage().data_ptr()
    )
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(before[name], again[name]) for name in before)


def test_unknown_families_and_hooked_projections_run_their_own_modules():
    for family in ("gpt2", "gemma3", "phi3", "qwen3_moe"):
        model = build(family)
        config = model.config.get_text_config(decoder=True)
        assert lean_decoder(model.get_decoder(), config, 32, {"": None}) is None
    model = build("llama")
    model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert lean_decoder(model.model, model.config, 32, {"": None}) is None
