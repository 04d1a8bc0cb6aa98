"""Target: description, padded vocabulary, tied weights, taps, misuse."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.core.errors import InputError, TargetError
from slipstream.target import TargetCache, target_from_model
from tests.target.families import build


@pytest.fixture(scope="module")
def target():
    return target_from_model(build("llama"), name="tiny")


def test_info_describes_the_model(target):
    info = target.info
    assert (info.name, info.model_type) == ("tiny", "llama")
    assert (info.vocab_size, info.embedding_rows, info.width, info.num_layers) == (97, 97, 32, 3)
    assert (info.num_heads, info.num_kv_heads, info.head_dim, info.intermediate_size) == (4, 2, 8, 48)
    assert (info.max_context, info.eos_token_ids, info.embedding_multiplier) == (128, (2,), 1.0)
    assert dataclasses.is_dataclass(info)


def test_granite_states_its_embedding_multiplier():
    assert target_from_model(build("granite")).info.embedding_multiplier == 6.0


@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_rows_past_the_vocabulary_are_cut(family):
    model = build(family)
    model.resize_token_embeddings(104, mean_resizing=False)
    model.config.vocab_size = 97
    with torch.no_grad():
        model.get_output_embeddings().weight[97:] = 100.0
    target = target_from_model(model)
    assert (target.info.vocab_size, target.info.embedding_rows) == (97, 104)
    ids_BL = torch.randint(3, 97, (1, 6))
    cache = target.new_cache(1, 8)
    first = target.prefill(ids_BL, torch.tensor([6]), cache)
    assert first.logits_BV.shape == (1, 97)
    assert target.verify(ids_BL[:, :2], torch.tensor([6]), cache).logits_BTV.shape == (1, 2, 97)
    torch.testing.assert_close(first.logits_BV, model(ids_BL).logits[:, -1, :97])


def test_tied_weights_are_one_tensor():
    model = build("llama_tied")
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    target = target_from_model(model)
    hidden_BTD = torch.randn(1, 2, 32)
    expected = hidden_BTD @ model.get_input_embeddings().weight.T
    torch.testing.assert_close(target.unembed(hidden_BTD), expected)


def test_logits_are_fp32_in_any_dtype():
    target = target_from_model(build("llama").to(torch.bfloat16))
    cache = target.new_cache(1, 8)
    first = target.prefill(torch.tensor([[5, 6, 7]]), torch.tensor([3]), cache)
    assert first.logits_BV.dtype == torch.float32
    assert target.dtype == torch.bfloat16


def test_head_passes_gradients_to_its_input(target):
    hidden_BTD = torch.randn(1, 2, 32, requires_grad=True)
    target.head(hidden_BTD).sum().backward()
    assert hidden_BTD.grad is not None


def test_features_follow_the_order_of_the_taps(target):
    ids_BL, length_B = torch.tensor([[5, 6, 7]]), torch.tensor([3])

    def features(taps):
        target.set_taps(taps)
        return target.prefill(ids_BL, length_B, target.new_cache(1, 4)).features_BLE

    both = features((2, 0))
    assert target.tap_ids == (2, 0)
    assert torch.equal(both, torch.cat([features((2,)), features((0,))], -1))
    assert features(()).shape == (1, 3, 0)


def test_taps_leave_no_hooks_behind(target):
    def hooks():
        return sum(len(layer._forward_hooks) for layer in target.layers)

    target.set_taps(())
    before = hooks()  # transformers has some of its own
    for taps in ((0, 1), (2,), ()):
        target.set_taps(taps)
        assert hooks() == before + len(taps)


def test_the_self_test_keeps_the_taps():
    target = target_from_model(build("llama"))
    assert target.tap_ids == ()


@pytest.mark.parametrize("taps", [(3,), (-1,), (1, 1)])
def test_bad_taps_are_refused(target, taps):
    with pytest.raises(InputError, match="from 0 to 2"):
        target.set_taps(taps)


def test_cache_misuse_is_refused(target):
    ids_BT, start_B = torch.tensor([[5, 6]]), torch.tensor([0])
    with pytest.raises(InputError, match="rows"):
        target.verify(ids_BT, start_B, target.new_cache(2, 8))
    with pytest.raises(InputError, match="slots"):
        target.verify(ids_BT, start_B, target.new_cache(1, 8), visible=9)
    with pytest.raises(InputError, match="at least one"):
        target.new_cache(0, 8)
    with pytest.raises(InputError, match="not told"):
        TargetCache(1, 8).update(torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 8), 0)


def test_a_failed_pass_leaves_the_target_usable(target):
    target.set_taps((1,))
    ids_BL, length_B = torch.tensor([[5, 6, 7]]), torch.tensor([3])
    before = target.prefill(ids_BL, length_B, target.new_cache(1, 4))
    with pytest.raises(IndexError):
        target.prefill(torch.tensor([[5, 6, 9999]]), length_B, target.new_cache(1, 4))
    after = target.prefill(ids_BL, length_B, target.new_cache(1, 4))
    assert torch.equal(before.logits_BV, after.logits_BV)
    assert torch.equal(before.features_BLE, after.features_BLE)
    target.set_taps(())


def test_rows_are_filled_one_after_another(target):
    """A prompt read into some rows leaves the others as they are, and finds nothing of what its row held."""
    ids_BL, length_B = torch.randint(3, 97, (3, 6)), torch.tensor([6, 4, 5])
    cache = target.new_cache(3, 20)
    target.prefill(ids_BL, length_B, cache)
    fresh_BL, fresh_B, row_B = torch.randint(3, 97, (2, 9)), torch.tensor([9, 7]), torch.tensor([2, 0])
    cache.clear(row_B)
    target.prefill(fresh_BL, fresh_B, cache, chunk=4, row_B=row_B)
    texts = [fresh_BL[1, :7], ids_BL[1, :4], fresh_BL[0, :9]]
    ids_BT = torch.randint(3, 97, (3, 3))
    start_B = torch.tensor([len(text) for text in texts])
    found = target.verify(ids_BT, start_B, cache).logits_BTV
    for row, text in enumerate(texts):
        whole = torch.cat([text, ids_BT[row]])
        torch.testing.assert_close(found[row], target.recompute(whole[None])[0, -3:], atol=1e-4, rtol=1e-4)


def test_a_cache_grows_with_what_is_read(target):
    """On a CPU the buffers are as long as the longest pass so far; what they held stays."""
    text_L = torch.randint(3, 97, (12,))
    cache = target.new_cache(1, 500)
    for position in range(0, 12, 3):
        part_BT = text_L[None, position : position + 3]
        found = target.verify(part_BT, torch.tensor([position]), cache, position + 3).logits_BTV
    torch.testing.assert_close(found[0], target.recompute(text_L[None])[0, -3:], atol=1e-4, rtol=1e-4)
    assert cache._buffers[0][0].shape[2] == 12


def test_drafts_past_the_context_limit_do_no_harm():
    """Learned positions end at the limit; a block may reach over it, its kept part must be right."""
    target = target_from_model(build("gpt2"))
    ids_BL = torch.randint(3, 97, (1, 128))
    cache = target.new_cache(1, 134)
    target.prefill(ids_BL[:, :126], torch.tensor([126]), cache)
    ids_BT = torch.cat([ids_BL[:, 126:], torch.tensor([[5, 6, 7]])], 1)
    logits_BTV = target.verify(ids_BT, torch.tensor([126]), cache).logits_BTV
    torch.testing.assert_close(logits_BTV[:, :2], target.recompute(ids_BL)[:, 126:], atol=1e-4, rtol=1e-4)


def test_the_self_test_finds_an_unknown_scale():
    model = build("llama")
    forward = model.forward

    def scaled(*args, **kwargs):
        out = forward(*args, **kwargs)
        out.logits = out.logits * 1.5
        return out

    model.forward = scaled
    with pytest.raises(TargetError, match="the head differs"):
        target_from_model(model)


def test_the_self_test_finds_a_wrong_window():
    model = build("mistral_window")
    model.config.layer_types = ["full_attention"] * 3  # a lie that the model itself does not read
    with pytest.raises(TargetError, match="differs from a plain pass"):
        target_from_model(model)


def test_code_that_cannot_take_the_cache_is_one_sentence():
    model = build("olmo2")  # a family that runs its own modules
    original = model.model.forward

    def forward(input_ids=None, position_ids=None, cache=None, **kwargs):
        if cache is not None:
            raise AttributeError("no such thing")
        return original(input_ids=input_ids, position_ids=position_ids, **kwargs)

    model.model.forward = forward
    with pytest.raises(TargetError, match="does not run with Slipstream's cache"):
        target_from_model(model)
