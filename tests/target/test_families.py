"""Cached, masked, ragged passes of every supported family against cache-free passes, row by row, in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.target import Target, target_from_model
from tests.target.families import FAMILIES, build

torch.set_num_threads(1)
LENGTHS = (11, 1, 7)
TAPS = (2, 0)
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def target(request: pytest.FixtureRequest) -> Target:
    made = target_from_model(build(request.param), name=request.param)
    made.set_taps(TAPS)
    return made


def plain(target: Target, ids_L: Tensor) -> tuple[Tensor, Tensor]:
    """Logits [L, V] and features [L, E] of one row by the model alone; taps by hooks of the test."""
    outputs: dict[int, Tensor] = {}

    def keep(layer_id: int):  # type: ignore[no-untyped-def]
        def hook(_module, _args, output) -> None:  # type: ignore[no-untyped-def]
            outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [target.layers[i].register_forward_hook(keep(i)) for i in TAPS]
    with torch.no_grad():
        out = target.model(input_ids=ids_L[None], use_cache=False, output_hidden_states=True)
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(outputs[0], out.hidden_states[1])
    return out.logits[0], torch.cat([outputs[i] for i in TAPS], -1)[0]


def close(found: Tensor, expected: Tensor) -> None:
    scale = max(1.0, float(expected.abs().max()))
    assert float((found - expected).abs().max()) <= TOLERANCE * scale


@pytest.mark.parametrize("chunk", [4, 512])
def test_prefill_verify_and_rollback_agree_with_plain_passes(target: Target, chunk: int) -> None:
    torch.manual_seed(1)
    ids_BL = torch.randint(3, 97, (3, 24))
    length_B = torch.tensor(LENGTHS)
    cache = target.new_cache(3, 30)
    prompt_BL = ids_BL[:, : max(LENGTHS)]
    first = target.prefill(prompt_BL, length_B, cache, chunk)
    rows = [plain(target, ids_L) for ids_L in ids_BL]
    for row, length in enumerate(LENGTHS):
        close(first.logits_BV[row], rows[row][0][length - 1])
        close(first.features_BLE[row, :length], rows[row][1][:length])

    start_B = length_B.clone()
    for block, kept in ((5, (5, 1, 3)), (4, (1, 4, 2)), (6, (2, 6, 1))):
        slot_BT = start_B[:, None] + torch.arange(block)
        right_BT = ids_BL.gather(1, slot_BT)
        keep_B = torch.tensor(kept)
        # Slots past the kept ones are wrong drafts; the next block must write over what they left behind.
        wrong_BT = (right_BT + 1) % 97
        ids_BT = torch.where(torch.arange(block) < keep_B[:, None], right_BT, wrong_BT)
        visible = None if block == 4 else int(start_B.max()) + block
        out = target.verify(ids_BT, start_B, cache, visible)
        for row, (begin, count) in enumerate(zip(start_B.tolist(), kept, strict=True)):
            close(out.logits_BTV[row, :count], rows[row][0][begin : begin + count])
            close(out.features_BTE[row, :count], rows[row][1][begin : begin + count])
        start_B = start_B + keep_B


def test_head_is_the_models_own(target: Target) -> None:
    ids_BL = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        hidden_BLD = target.decoder(input_ids=ids_BL, use_cache=False)[0]
        close(target.head(hidden_BLD), target.model(input_ids=ids_BL, use_cache=False).logits)


def test_embed_and_multiplier_give_the_first_layers_input(target: Target) -> None:
    ids_BL = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        first_BLD = target.model(input_ids=ids_BL, use_cache=False, output_hidden_states=True).hidden_states[
            0
        ]
    if target.info.model_type != "gpt2":  # GPT-2 adds a position to it
        close(target.embed(ids_BL) * target.info.embedding_multiplier, first_BLD)


def test_windows_and_sinks_matter_in_these_models(target: Target) -> None:
    """A guard of the tests: with a mask that ignores windows the logits would be others."""
    windows = {w for w in target._windows.values() if w is not None}
    if not windows:
        pytest.skip("full attention only")
    ids_BL = torch.randint(3, 97, (1, 20))
    far_BL = ids_BL.clone()
    far_BL[:, 0] = (far_BL[:, 0] + 5) % 97
    full = dict.fromkeys(target._windows, None)
    cache = target.new_cache(1, 20)
    length_B = torch.tensor([20])
    narrow = target.prefill(ids_BL, length_B, cache).logits_BV
    with pytest.MonkeyPatch.context() as patch:
        for owner in (target, target._lean):
            if owner is not None:
                patch.setattr(owner, "_windows", full)
        wide = target.prefill(ids_BL, length_B, cache).logits_BV
    assert float((narrow - wide).abs().max()) > 1e-3
