"""The z-lab layout: a round trip keeps every bit, and each kind of wrong checkpoint gets one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.core.errors import CheckpointError
from slipstream.formats import read_zlab, write_zlab
from slipstream.formats.zlab_config import parse_config, render_config
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.testing import tiny_config, tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tiny_config(num_hidden_layers=6))


@pytest.fixture(scope="module")
def config(target: Target) -> DraftConfig:
    return DraftConfig.for_target(target.info, num_layers=2, block_size=6, num_taps=3)


@pytest.fixture
def folder(config: DraftConfig, tmp_path: Path) -> Path:
    torch.manual_seed(1)
    write_zlab(Drafter(config), tmp_path / "drafter", dtype=torch.float32)
    return tmp_path / "drafter"


def edit_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads((folder / "config.json").read_text())
    change(raw)
    (folder / "config.json").write_text(json.dumps(raw))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_round_trip_keeps_every_bit(config: DraftConfig, tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    config = replace(config, output_multiplier=0.5, final_logit_softcapping=20.0, input_embedding_scale=3.0)
    drafter = Drafter(config).to(dtype)
    write_zlab(drafter, tmp_path / "d", dtype=dtype)
    again = read_zlab(tmp_path / "d", dtype=dtype)
    assert again.config == config
    for (name, mine), (other, theirs) in zip(
        drafter.state_dict().items(), again.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(mine, theirs)


def test_tensor_names_are_those_of_published_checkpoints(folder: Path) -> None:
    layer = [
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{p}_proj" for p in "qkvo"),
        "self_attn.q_norm",
        "self_attn.k_norm",
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    ]
    expected = {f"layers.{i}.{name}.weight" for i in range(2) for name in layer}
    expected |= {"fc.weight", "hidden_norm.weight", "norm.weight"}
    assert set(load_file(folder / "model.safetensors")) == expected


def test_nothing_is_overwritten_without_force(config: DraftConfig, folder: Path) -> None:
    before = (folder / "model.safetensors").read_bytes()
    (folder / "README.md").write_text("kept")
    torch.manual_seed(8)
    other = Drafter(config)
    with pytest.raises(CheckpointError, match="--force"):
        write_zlab(other, folder)
    assert (folder / "model.safetensors").read_bytes() == before
    write_zlab(other, folder, dtype=torch.float32, force=True)
    assert torch.equal(read_zlab(folder).fc.weight, other.fc.weight)
    assert (folder / "README.md").read_text() == "kept"
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    ("causal", "windows"),
    [
        ((False, False), (None, None)),
        ((True, True), (None, None)),
        ((True, True), (8, None)),
        ((False, False), (8, 8)),
        ((True, False), (8, None)),
    ],
)
def test_causality_and_windows_survive(
    config: DraftConfig, causal: tuple[bool, ...], windows: tuple[int | None, ...]
) -> None:
    config = replace(config, causal=causal, windows=windows)
    raw = render_config(config, "float32")
    assert parse_config(raw) == config
    assert ("is_causal" in raw) == (len(set(causal)) == 1)
    assert ("causal" in raw["dflash_config"]) == (len(set(causal)) == 1)


@pytest.mark.parametrize(
    ("causal", "windows"),
    [((True, False), (None, None)), ((False, True), (8, None)), ((False, False), (8, 4))],
)
def test_what_the_layout_cannot_say_is_refused(
    config: DraftConfig, causal: tuple[bool, ...], windows: tuple[int | None, ...]
) -> None:
    with pytest.raises(CheckpointError, match="layout"):
        render_config(replace(config, causal=causal, windows=windows), "float32")


def test_older_and_newer_spellings_read_the_same(config: DraftConfig) -> None:
    raw = render_config(replace(config, causal=(True, False), windows=(8, None)), "float32")
    expected = parse_config(raw)
    for key in ("block_size", "mask_token_id", "target_layer_ids"):
        only_nested = {k: v for k, v in raw.items() if k != key}
        assert parse_config(only_nested) == expected
        nested = {k: v for k, v in raw["dflash_config"].items() if k != key}
        assert parse_config(raw | {"dflash_config": nested}) == expected
    assert parse_config({k: v for k, v in raw.items() if k != "rope_parameters"}) == expected
    assert parse_config({k: v for k, v in raw.items() if k != "rope_theta"}) == expected
    assert parse_config({k: v for k, v in raw.items() if k != "target_hidden_size"}) == expected


def test_nested_keys_win_over_the_top_level(config: DraftConfig) -> None:
    raw = render_config(config, "float32")
    assert parse_config(raw | {"block_size": 3}).block_size == config.block_size


WRONG_TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], str]] = {
    "missing": (lambda t: t.pop("norm.weight"), r"norm\.weight is missing"),
    "extra": (lambda t: t.update({"lm_head.weight": torch.ones(2)}), r"lm_head\.weight is unknown"),
    "renamed": (lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}), "was it renamed"),
    "transposed": (
        lambda t: t.update({"fc.weight": t["fc.weight"].T.contiguous()}),
        r"fc\.weight has shape .* \(it is transposed\)",
    ),
    "misshapen": (lambda t: t.update({"norm.weight": torch.ones(7)}), r"norm\.weight has shape \[7\]"),
    "not finite": (lambda t: t["norm.weight"].fill_(float("nan")), "not finite"),
    "integers": (lambda t: t.update({"norm.weight": torch.ones(32, dtype=torch.int64)}), "not finite"),
    "wrong depth": (
        lambda t: t.update(
            {k.replace("layers.1", "layers.2"): v.clone() for k, v in t.items() if "layers.1" in k}
        ),
        r"layers\.2.* is unknown",
    ),
}


@pytest.mark.parametrize("kind", WRONG_TENSORS)
def test_a_wrong_tensor_is_refused(folder: Path, kind: str) -> None:
    change, sentence = WRONG_TENSORS[kind]
    edit_tensors(folder, change)
    with pytest.raises(CheckpointError, match=sentence):
        read_zlab(folder)


def nested(**values: Any) -> Callable[[dict[str, Any]], None]:
    """Change a key both nested and at the top level."""

    def change(raw: dict[str, Any]) -> None:
        raw.update(values)
        raw["dflash_config"].update(values)

    return change


WRONG_CONFIGS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "mask id outside": (nested(mask_token_id=64), "mask token id 64 lies outside"),
    "tap outside": (nested(target_layer_ids=[1, 6]), "reach beyond"),
    "tap twice": (nested(target_layer_ids=[1, 1, 2]), "twice"),
    "taps not a list": (nested(target_layer_ids="1,2"), "list of integers"),
    "no block": (nested(block_size=1), "block_size must be at least 2"),
    "wrong depth": (lambda raw: raw.update(num_hidden_layers=3), "layer_types"),
    "fewer layers than tensors": (
        lambda raw: raw.update(num_hidden_layers=1, layer_types=["full_attention"]),
        r"layers\.1.* is unknown",
    ),
    "word for number": (lambda raw: raw.update(num_attention_heads="4"), "must be an integer"),
    "no theta": (lambda raw: raw.update(rope_theta=None, rope_parameters=None), "rope_theta"),
    "yarn": (lambda raw: raw.update(rope_parameters={"rope_theta": 1e4, "rope_type": "yarn"}), "yarn"),
    "strange layer": (lambda raw: raw.update(layer_types=["full_attention", "mamba"]), "mamba"),
    "window without size": (
        lambda raw: raw.update(layer_types=["sliding_attention"] * 2),
        "sliding_window",
    ),
    "contradiction": (lambda raw: raw["dflash_config"].update(causal=True), "contradict"),
    "other activation": (lambda raw: raw.update(hidden_act="gelu"), "gelu"),
    "bias": (lambda raw: raw.update(attention_bias=True), "attention_bias"),
    "DFlash 2": (lambda raw: raw["dflash_config"].update(selector_rank=256), "selector_rank"),
    "JetSpec": (lambda raw: raw["dflash_config"].update(causal_head=True), "causal_head"),
    "DSpark": (lambda raw: raw.update(markov_rank=256), "markov_rank"),
    "key missing": (lambda raw: raw.pop("num_target_layers"), "no num_target_layers"),
}


@pytest.mark.parametrize("kind", WRONG_CONFIGS)
def test_a_wrong_configuration_is_refused(folder: Path, kind: str) -> None:
    change, sentence = WRONG_CONFIGS[kind]
    edit_config(folder, change)
    with pytest.raises(CheckpointError, match=sentence):
        read_zlab(folder)


def test_broken_files_are_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no readable"):
        read_zlab(tmp_path / "nowhere")
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    with pytest.raises(CheckpointError, match="not a readable safetensors"):
        read_zlab(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="no safetensors"):
        read_zlab(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="not valid JSON"):
        read_zlab(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold an object"):
        read_zlab(folder)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"width": 48}, "width is 32, not 48"),
        ({"num_layers": 7}, "number of target layers is 6, not 7"),
        ({"vocab_size": 65, "embedding_rows": 65}, "vocabulary is 64, not 65"),
        ({"embedding_rows": 60}, "lies outside the embedding of 60 rows"),
    ],
)
def test_another_target_is_refused(
    folder: Path, target: Target, changes: dict[str, int], sentence: str
) -> None:
    read_zlab(folder, target.info)
    with pytest.raises(CheckpointError, match=sentence):
        read_zlab(folder, replace(target.info, **changes))


def test_the_tokens_that_are_drafted_are_kept_beside_the_weights(config: DraftConfig, tmp_path: Path) -> None:
    drafter = Drafter(config)
    drafter.draft_vocabulary = torch.tensor([1, 5, 7])
    write_zlab(drafter, tmp_path / "d")
    assert read_zlab(tmp_path / "d").draft_vocabulary.tolist() == [1, 5, 7]  # type: ignore[union-attr]
    drafter.draft_vocabulary = torch.tensor([2])
    write_zlab(drafter, tmp_path / "d", force=True)
    assert read_zlab(tmp_path / "d").draft_vocabulary.tolist() == [2]  # type: ignore[union-attr]
    drafter.draft_vocabulary = None
    write_zlab(drafter, tmp_path / "d", force=True)
    assert read_zlab(tmp_path / "d").draft_vocabulary is None


@pytest.mark.parametrize("ids", [[], [3, 3], [5, 2], [-1, 2], [10**6], ["a"], 7])
def test_a_wrong_list_of_drafted_tokens_is_refused(config: DraftConfig, tmp_path: Path, ids: Any) -> None:
    write_zlab(Drafter(config), tmp_path / "d")
    (tmp_path / "d" / "draft_vocabulary.json").write_text(json.dumps({"token_ids": ids}))
    with pytest.raises(CheckpointError, match="no ascending list of tokens"):
        read_zlab(tmp_path / "d")
