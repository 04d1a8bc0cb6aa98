"""Acceptance against drawing, passes against counts by hand, and the accuracy that the page states."""

from __future__ import annotations

import importlib.util
import random
import statistics
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.errors import InputError
from slipstream.plan import Card, Constants, Pair, Setting, find_card, geometric, length, predict, read_shape
from slipstream.plan.cost import draft_pass, kv_bytes, target_pass, weights_bytes
from slipstream.plan.drafter import described_drafter
from slipstream.plan.predict import row

DENSE = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "tie_word_embeddings": False,
}
#: A thousand bytes and ten thousand operations per second.
SLOW = Card("slow", 1.0, 1e3, 1e4, 100.0, "made up", measured=True)


def accuracy() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "plan_accuracy.py"
    spec = importlib.util.spec_from_file_location("plan_accuracy", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules["plan_accuracy"] = module
    spec.loader.exec_module(module)
    return module


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_lengths_by_drawing(profile: list[float]) -> None:
    draw, rounds, said = random.Random(0), 4000, 0
    for _ in range(rounds):
        said += 1
        for share in profile:
            if draw.random() >= share:
                break
            said += 1
    assert length(profile) == pytest.approx(said / rounds, abs=0.25)


@given(st.integers(1, 15), st.floats(0, 1))
def test_one_rate_for_all_slots_has_the_length_that_was_asked_for(drafts: int, share: float) -> None:
    wanted = 1 + share * drafts
    assert length(geometric(wanted, drafts)) == pytest.approx(wanted, abs=1e-6)


def test_passes_by_hand() -> None:
    shape = read_shape(DENSE)
    setting = Setting(SLOW, context=10)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128 + 2 * 64
    head, kv = 64 * 100, 2 * 32 * 2  # keys and values of two heads of 16, two bytes, in one layer
    assert kv_bytes(shape, 10) == 10 * 2 * kv
    assert weights_bytes(shape, setting) == 2 * (2 * layer + 2 * head)
    one = target_pass(shape, setting, 3, 4)
    assert one.bytes == 2 * (2 * layer + head) + 3 * 10 * 2 * kv
    assert one.flops == 12 * (2 * (2 * layer + head) + 4 * 2 * 10 * 64)
    assert one.seconds == max(one.bytes / 1e3, one.flops / 1e4)
    drafter, fused = described_drafter(shape, 1, 2)
    draft = draft_pass(drafter, fused, setting, 3, 4)
    assert draft.bytes == 2 * (layer + 2 * 64 * 64 + head) + 3 * 10 * kv
    assert draft.flops == 12 * 2 * (layer + 2 * 64 * 64 + head)


def test_precision_windows_experts_and_cards_change_what_is_read() -> None:
    shape = read_shape(DENSE | {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4})
    assert kv_bytes(shape, 10) == (4 + 10) * 2 * 32 * 2
    setting = Setting(SLOW, context=10)
    half = target_pass(shape, replace(setting, precision="fp8"), 1, 1)
    whole = target_pass(shape, setting, 1, 1)
    layers = sum(x.attention + x.dense for x in shape.layers)
    assert whole.bytes - half.bytes == layers
    split = target_pass(shape, replace(setting, cards=2), 1, 1)
    assert split.seconds > whole.seconds / 2  # sums between cards are not free
    some = read_shape(DENSE | {"num_local_experts": 8, "num_experts_per_tok": 2, "model_type": "mixtral"})
    few, many = (target_pass(some, setting, 1, tokens).bytes for tokens in (1, 1000))
    assert many - few == pytest.approx(2 * 2 * (8 - 2) * 3 * 64 * 128, rel=1e-6)


def test_reading_and_computing_add_up_except_where_they_were_measured() -> None:
    shape = read_shape(DENSE)
    free = Constants(bandwidth_share=0.5, flops_share=0.25, graph_layer_s=0.0)
    printed = replace(SLOW, measured=False, fp8_flops=4e4)
    found = target_pass(shape, Setting(printed, context=10, constants=free), 2, 8)
    assert found.seconds == pytest.approx(found.bytes / 5e2 + found.flops / 2.5e3)
    halved = target_pass(shape, Setting(printed, context=10, precision="fp8", constants=free), 2, 8)
    assert halved.seconds == pytest.approx(halved.bytes / 5e2 + halved.flops / 1e4)
    # The drafter stays in bf16, and so do products with weights that are unpacked from four bits.
    packed = target_pass(shape, Setting(printed, context=10, precision="int4", constants=free), 2, 8)
    assert packed.seconds == pytest.approx(packed.bytes / 5e2 + packed.flops / 2.5e3)
    reached = target_pass(shape, Setting(SLOW, context=10), 2, 8)
    assert reached.seconds == pytest.approx(max(reached.bytes / 1e3, reached.flops / 1e4))


def test_rows_best_block_and_where_it_stops_paying() -> None:
    shape = read_shape(DENSE)
    drafter, fused = described_drafter(shape, 1, 2)
    setting = Setting(replace(SLOW, flops=3e4), context=10)
    pair = Pair(shape, drafter, fused, 8, geometric(3.0, 7))
    found = predict(pair, setting, [1, 4])
    first = found.rows[0]
    assert first.speedup == pytest.approx(
        found.acceptance_length * first.step_ms / (first.draft_ms + first.verify_ms)
    )
    assert found.break_even == pytest.approx(first.round_ms / first.step_ms)
    gains = {block: row(pair, setting, 1, block).speedup for block in range(2, 9)}
    assert gains[found.best_block_size] == max(gains.values())
    assert found.pays_up_to is not None
    assert row(pair, setting, max(1, found.pays_up_to), 8).speedup >= 1
    assert row(pair, setting, 2 * found.pays_up_to, 8).speedup < 1
    hopeless = predict(replace(pair, profile=(0.0,) * 7), setting, [1])
    assert (hopeless.best_block_size, hopeless.pays_up_to) == (1, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 0}, "context must be"),
        ({"cards": 0}, "number of cards"),
        ({"round_s": -1.0}, "cannot be negative"),
        ({"card": find_card("L4"), "cards": 2}, "not joined"),
    ],
)
def test_settings_that_cannot_be(change: dict[str, object], message: str) -> None:
    shape = read_shape(DENSE)
    pair = Pair(shape, *described_drafter(shape, 1), 4, (0.5,))
    with pytest.raises(InputError, match=message):
        predict(pair, replace(Setting(SLOW), **change), [1])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the profile has 4"):
        predict(replace(pair, profile=(0.5,) * 4), Setting(SLOW), [1])
    with pytest.raises(InputError, match="concurrency"):
        predict(pair, Setting(SLOW), [])


def test_unknown_cards_name_the_nearest() -> None:
    assert find_card("rtx-pro 6000").name == "RTX PRO 6000"
    with pytest.raises(InputError, match="did you mean H200"):
        find_card("H20O")


def test_the_accuracy_that_is_stated() -> None:
    module = accuracy()
    targets, rows = module.read()
    fitted_on, held_out = module.split(rows)
    assert not {id(one) for one in fitted_on} & {id(one) for one in held_out}
    again = module.fit(targets, fitted_on, Constants())
    for name in module.FITTED:
        assert getattr(again, name) == pytest.approx(getattr(Constants(), name), rel=0.05)
    wrong = [abs(value) for value in module.errors(targets, held_out, Constants())]
    assert statistics.median(wrong) < 0.06
    served = [one for one in held_out if one.table["execution"] == "graph"]
    assert statistics.median(map(abs, module.errors(targets, served, Constants()))) < 0.12
    mixed = [one for one in served if "experts" in str(targets[one.table["target"]])]
    assert statistics.median(map(abs, module.errors(targets, mixed, Constants()))) < 0.15
    assert statistics.median(map(abs, module.new_kind(targets, rows))) < 0.13
    page = module.PAGE.read_text(encoding="utf-8")
    assert module.groups(targets, held_out, Constants()) in page
    assert module.table(targets, rows, Constants()) in page
    assert module.by_card(targets) in module.CARDS_PAGE.read_text(encoding="utf-8")
