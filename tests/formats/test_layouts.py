"""Every layout keeps every bit, is recognised by what it holds, and refuses what it cannot say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.core.errors import CheckpointError, SlipstreamError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.formats import (
    read_drafter,
    read_speculators,
    recognise,
    write_gguf_drafter,
    write_speculators,
    write_zlab,
)
from slipstream.formats.speculators import parse_speculators, render_speculators
from slipstream.model import DraftConfig, Drafter, decode_masks
from slipstream.target import Target
from tests.formats.conftest import assert_same, random_drafter

BUNDLED = Path(__file__).parents[2] / "src" / "slipstream" / "drafters" / "smollm2"
# Causality and windows that every layout can express.
COMMON: dict[str, tuple[tuple[bool, ...], tuple[int | None, ...]]] = {
    "bidirectional": ((False, False), (None, None)),
    "causal": ((True, True), (None, None)),
    "causal sliding": ((True, True), (4, 4)),
    "bidirectional sliding and full": ((False, False), (4, None)),
}


def around(drafter: Drafter, folder: Path) -> Drafter:
    """z-lab, speculators, z-lab, GGUF, z-lab."""
    write_zlab(drafter, folder / "1")
    write_speculators(read_drafter(folder / "1", dtype=torch.bfloat16), folder / "2")
    write_zlab(read_drafter(folder / "2", dtype=torch.bfloat16), folder / "3")
    write_gguf_drafter(read_drafter(folder / "3", dtype=torch.bfloat16), folder / "4.gguf")
    write_zlab(read_drafter(folder / "4.gguf", dtype=torch.bfloat16), folder / "5")
    assert (folder / "5" / "config.json").read_bytes() == (folder / "1" / "config.json").read_bytes()
    return read_drafter(folder / "5", dtype=torch.bfloat16)


@pytest.mark.parametrize("kind", COMMON)
def test_a_round_trip_through_all_layouts_keeps_every_bit(
    config: DraftConfig, kind: str, tmp_path: Path
) -> None:
    causal, windows = COMMON[kind]
    # Neither 1e-5 as a float32 nor an odd base survives as a float32 alone.
    drafter = random_drafter(
        config, causal=causal, windows=windows, rms_norm_eps=1e-6, rope_theta=100_000.1, mask_token_id=7
    )
    assert_same(around(drafter, tmp_path), drafter)


def test_the_bundled_drafter_survives_the_round_trip(tmp_path: Path) -> None:
    drafter = read_drafter(BUNDLED, dtype=torch.bfloat16)
    again = around(drafter, tmp_path)
    assert_same(again, drafter)
    assert drafter.draft_vocabulary is not None
    assert again.draft_vocabulary is not None
    assert torch.equal(again.draft_vocabulary, drafter.draft_vocabulary)


@pytest.mark.parametrize("ids", [[], [5, 3], [3, 3], [-1, 3], [3, 10**6], ["3"]])
def test_a_damaged_list_of_drafted_tokens_is_refused(
    config: DraftConfig, ids: list[Any], tmp_path: Path
) -> None:
    write_speculators(random_drafter(config), tmp_path / "s")
    (tmp_path / "s" / "draft_vocabulary.json").write_text(json.dumps({"token_ids": ids}))
    with pytest.raises(CheckpointError, match="no ascending list of tokens"):
        read_drafter(tmp_path / "s")


def test_a_list_in_a_gguf_file_must_fit(config: DraftConfig, tmp_path: Path) -> None:
    drafter = random_drafter(config)
    drafter.draft_vocabulary = torch.tensor([1, 5])
    write_gguf_drafter(drafter, tmp_path / "d.gguf")
    data = (tmp_path / "d.gguf").read_bytes()
    place = data.index(b"slipstream.draft_vocabulary") + len("slipstream.draft_vocabulary") + 4 + 4 + 8
    assert data[place] == 1
    (tmp_path / "d.gguf").write_bytes(data[:place] + b"\x07" + data[place + 1 :])
    with pytest.raises(CheckpointError, match="no ascending list of tokens"):
        read_drafter(tmp_path / "d.gguf")


def test_layouts_are_recognised_by_what_they_hold(config: DraftConfig, tmp_path: Path) -> None:
    drafter = random_drafter(config)
    write_zlab(drafter, tmp_path / "a")
    write_speculators(drafter, tmp_path / "b")
    write_gguf_drafter(drafter, tmp_path / "c" / "dflash-x.gguf")
    (tmp_path / "c" / "target-x.gguf").write_bytes(b"")
    write_deepspec(drafter, tmp_path / "d")
    found = [recognise(tmp_path / name)[0] for name in "abcd"]
    assert found == ["zlab", "speculators", "gguf", "deepspec"]


def write_deepspec(drafter: Drafter, folder: Path, **extra: torch.Tensor) -> None:
    """What DeepSpec's trainer would save for a drafter of K = T - 1 drafts."""
    write_zlab(drafter, folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["dflash_config"], raw["auto_map"], raw["is_causal"]
    raw |= {"architectures": ["Qwen3DSparkModel"], "block_size": raw["block_size"] - 1, "num_anchors": 512}
    raw |= {"markov_rank": 0, "enable_confidence_head": False}
    (folder / "config.json").write_text(json.dumps(raw))
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | extra, folder / "model.safetensors")


def own_ends(target: Target) -> dict[str, torch.Tensor]:
    rows = torch.arange(target.info.embedding_rows)
    return {
        "embed_tokens.weight": target.embed(rows[None])[0].bfloat16().clone(),
        "lm_head.weight": target.output_rows(rows).bfloat16().clone(),
    }


def test_deepspec_drafts_from_the_anchor_slot(target: Target, config: DraftConfig, tmp_path: Path) -> None:
    """K slots give K drafts; the token that slot k gives stands at position k + 1."""
    write_deepspec(random_drafter(config), tmp_path / "d", **own_ends(target))
    drafter = read_drafter(tmp_path / "d", target.info, target)
    assert drafter.config == replace(config, mask_token_id=drafter.config.mask_token_id, from_anchor=True)
    target.set_taps(drafter.config.target_layer_ids)
    ids, drafts = torch.tensor([[3, 1, 4, 1, 5]]), drafter.config.block_size - 1
    filled = target.prefill(ids, torch.tensor([5]), target.new_cache(1, 16))
    proposer = DraftProposer(target, drafter)
    proposer.begin(1, 16)
    proposer.extend(filled.features_BLE, torch.arange(5)[None], 5)
    seen: dict[str, Any] = {}

    def chooser(logits: torch.Tensor, position: torch.Tensor, ids: torch.Tensor | None) -> Any:
        seen.update(logits=logits, position=position)
        from slipstream.decode.accept import Proposal

        return Proposal(logits.argmax(-1))

    proposer.propose(torch.tensor([9]), torch.tensor([5]), drafts, 5 + drafts + 1, chooser)
    assert seen["position"].tolist() == [[6, 7, 8, 9, 10]]
    block = torch.tensor([[9] + [drafter.config.mask_token_id] * (drafts - 1)])
    place = torch.arange(5)[None]
    context = drafter.context_kv(filled.features_BLE, place)
    masks = decode_masks(drafter.config, torch.tensor([5]), 5, drafts)
    hidden = drafter(target.embed(block), place + 5, context, masks)
    assert (seen["logits"] - target.unembed(hidden)).abs().max() < 1e-5


def test_deepspec_decodes_the_same_text(target: Target, config: DraftConfig, tmp_path: Path) -> None:
    write_deepspec(random_drafter(config), tmp_path / "d")
    drafter = read_drafter(tmp_path / "d", target.info)
    request = Request([3, 1, 4], SamplingOptions(max_tokens=24, ignore_eos=True))
    plain = Engine(target, None, EngineOptions()).generate([request])[0]
    proposer = DraftProposer(target, drafter)
    drafted = Engine(target, proposer, EngineOptions(drafts="max")).generate([request])[0]
    assert drafted.token_ids == plain.token_ids


def test_reading_at_the_anchor_slot_is_kept_or_refused(config: DraftConfig, tmp_path: Path) -> None:
    drafter = random_drafter(config, from_anchor=True)
    write_speculators(drafter, tmp_path / "s")
    raw = json.loads((tmp_path / "s" / "config.json").read_text())
    assert (raw["sample_from_anchor"], raw["block_size"]) == (True, config.block_size - 1)
    assert_same(read_drafter(tmp_path / "s", dtype=torch.bfloat16), drafter)
    with pytest.raises(CheckpointError, match="anchor"):
        write_zlab(drafter, tmp_path / "z")
    with pytest.raises(CheckpointError, match="anchor"):
        write_gguf_drafter(drafter, tmp_path / "g.gguf")


def test_taps_are_counted_from_one_elsewhere(config: DraftConfig) -> None:
    raw = render_speculators(config, "bfloat16")
    assert raw["aux_hidden_state_layer_ids"] == [number + 1 for number in config.target_layer_ids]
    with pytest.raises(CheckpointError, match="names the embedding"):
        parse_speculators(raw | {"aux_hidden_state_layer_ids": [0, 1, 2]})


@pytest.mark.parametrize(
    ("non_causal", "inner", "expected"),
    [
        (True, {}, (False, False)),
        (False, {}, (True, False)),
        (None, {}, (True, False)),
        (False, {"is_causal": False}, (False, False)),
        (False, {"is_causal": True}, (True, True)),
    ],
)
def test_causality_of_speculators(
    config: DraftConfig, non_causal: bool | None, inner: dict[str, bool], expected: tuple[bool, ...]
) -> None:
    raw = render_speculators(replace(config, windows=(4, None)), "bfloat16")
    raw["sliding_window_non_causal"] = non_causal
    layer = {key: value for key, value in raw["transformer_layer_config"].items() if key != "is_causal"}
    assert parse_speculators(raw | {"transformer_layer_config": layer | inner}).causal == expected


def test_a_reduced_head_becomes_a_list_of_tokens(target: Target, config: DraftConfig, tmp_path: Path) -> None:
    write_speculators(random_drafter(config), tmp_path / "s")
    ids = torch.tensor([1, 5, 6, 40])
    mask = torch.zeros(target.info.embedding_rows, dtype=torch.bool)
    mask[ids] = True
    ends = own_ends(target)
    ends["lm_head.weight"] = ends["lm_head.weight"][ids].clone()
    path = tmp_path / "s" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | ends | {"d2t": ids - torch.arange(4), "t2d": mask}, path)
    drafter = read_speculators(tmp_path / "s", target.info, target)
    assert drafter.draft_vocabulary is not None
    assert drafter.draft_vocabulary.tolist() == ids.tolist()
    with pytest.raises(CheckpointError, match="name its target with -t"):
        read_drafter(tmp_path / "s")
    ends["lm_head.weight"][2] += 1
    save_file(tensors | ends | {"d2t": ids - torch.arange(4)}, path)
    with pytest.raises(CheckpointError, match="own head is not the target's"):
        read_drafter(tmp_path / "s", target.info, target)
    save_file(tensors | ends | {"t2d": mask}, path)
    with pytest.raises(CheckpointError, match="t2d but no d2t"):
        read_drafter(tmp_path / "s", target.info, target)


@pytest.mark.parametrize(
    ("changes", "writer", "sentence"),
    [
        ({"causal": (True, False), "windows": (4, None)}, write_gguf_drafter, "mixes causal"),
        ({"windows": (4, 8)}, write_gguf_drafter, "several"),
        ({"windows": (4, 8)}, write_speculators, "several"),
        ({"output_multiplier": 0.5}, write_speculators, "scaled"),
        ({"causal": (True, False)}, write_speculators, "mix"),
    ],
)
def test_what_a_layout_cannot_say_is_refused(
    config: DraftConfig, changes: dict[str, Any], writer: Any, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        writer(random_drafter(config, **changes), tmp_path / "out")
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_gguf_keeps_scales_and_windows(config: DraftConfig, tmp_path: Path) -> None:
    drafter = random_drafter(
        config,
        input_embedding_scale=5.65685424949238,
        output_multiplier=0.196,
        final_logit_softcapping=20.0,
        windows=(None, 4),
    )
    write_gguf_drafter(drafter, tmp_path / "d.gguf")
    assert_same(read_drafter(tmp_path / "d.gguf", dtype=torch.bfloat16), drafter)


def test_what_gguf_writes_is_what_llama_cpp_reads(config: DraftConfig, tmp_path: Path) -> None:
    from gguf import GGUFReader

    write_gguf_drafter(random_drafter(config, windows=(4, None)), tmp_path / "d.gguf")
    reader = GGUFReader(tmp_path / "d.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "dflash"
    assert fields["dflash.block_size"] == config.block_size
    assert fields["dflash.target_layers"] == [number + 1 for number in config.target_layer_ids]
    assert fields["tokenizer.ggml.mask_token_id"] == config.mask_token_id
    assert fields["dflash.attention.causal"] is False
    assert fields["dflash.attention.sliding_window"] == 4
    assert fields["dflash.attention.sliding_window_pattern"] == [True, False]
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert kinds["enc.output_norm.weight"] == kinds["blk.0.attn_q_norm.weight"] == "F32"
    assert kinds["fc.weight"] == kinds["blk.1.ffn_down.weight"] == "BF16"
    assert len(kinds) == 3 + 2 * 11


def test_8_bit_weights_are_near(config: DraftConfig, tmp_path: Path) -> None:
    drafter = random_drafter(config)
    write_gguf_drafter(drafter, tmp_path / "b.gguf")
    write_gguf_drafter(drafter, tmp_path / "i.gguf", int8=True)
    again = read_drafter(tmp_path / "i.gguf")
    assert again.config == config
    for name, weight in drafter.state_dict().items():
        near = again.state_dict()[name]
        if weight.dim() == 1:
            assert torch.equal(near, weight.float())
        else:  # half a step of the largest of 32, whose scale is a float16
            runs = weight.float().unflatten(-1, (-1, 32))
            step = runs.abs().amax(-1, keepdim=True) / 127
            assert ((near.unflatten(-1, (-1, 32)) - runs).abs() <= 0.6 * step).all(), name
            assert not torch.equal(near, weight.float())
    assert (tmp_path / "i.gguf").stat().st_size < 0.75 * (tmp_path / "b.gguf").stat().st_size


OTHERS: dict[str, tuple[dict[str, Any] | None, str]] = {
    "no config": (None, "no config.json"),
    "DFlash 2": ({"architectures": ["DFlash2DraftModel"]}, "DFlash 2 drafter"),
    "a model": ({"architectures": ["LlamaForCausalLM"]}, "no DFlash drafter.*LlamaForCausalLM"),
    "EAGLE": ({"speculators_model_type": "eagle3"}, "eagle3 speculator"),
    "DSpark": ({"architectures": ["Qwen3DSparkModel"], "markov_rank": 256}, "DSpark"),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_other_families_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    raw, sentence = OTHERS[kind]
    if raw is not None:
        (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=sentence):
        read_drafter(tmp_path)


def test_nothing_is_overwritten_without_force(config: DraftConfig, tmp_path: Path) -> None:
    drafter, other = random_drafter(config), random_drafter(config, seed=2)
    for writer, path in ((write_speculators, tmp_path / "s"), (write_gguf_drafter, tmp_path / "d.gguf")):
        writer(drafter, path)
        with pytest.raises(SlipstreamError, match="--force"):
            writer(other, path)
        assert_same(read_drafter(path, dtype=torch.bfloat16), drafter)
        writer(other, path, force=True)
        assert_same(read_drafter(path, dtype=torch.bfloat16), other)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d.gguf", "s"]
