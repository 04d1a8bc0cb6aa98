"""Table 2.9 of loader rules: what each engine ends with, by configuration. Versions stand in `RULES`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream.core.errors import CheckpointError
from slipstream.formats.engines import LAYOUTS_FOR, RULES, check_readable, flatten_for_vllm, reading
from slipstream.formats.speculators import render_speculators
from slipstream.formats.zlab_config import parse_config, render_config
from slipstream.model import DraftConfig

FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2
C, B = (True, True), (False, False)
ALL = ("z-lab", "dflash", "vllm", "sglang", "trtllm", "llama.cpp", "ollama-mlx")

# (layer types, top level, dflash_config) to the causality of each engine, in the order of ALL.
TABLE: list[tuple[list[str], dict[str, Any], dict[str, Any], tuple[tuple[bool, ...], ...]]] = [
    (FULL, {}, {}, (B, B, B, B, B, B, B)),
    (SLIDING, {}, {}, (B, C, C, C, C, B, C)),
    (FULL, {"is_causal": True}, {}, (B, C, C, C, B, C, B)),
    (FULL, {"is_causal": False}, {}, (B, B, B, B, B, B, B)),
    (SLIDING, {"is_causal": False}, {}, (B, B, B, B, C, B, C)),
    (FULL, {}, {"causal": True}, (B, B, C, B, B, C, C)),
    (SLIDING, {}, {"causal": False}, (B, C, B, C, C, B, B)),
    (SLIDING, {"is_causal": False}, {"causal": False}, (B, B, B, B, C, B, B)),
    (FULL, {"is_causal": True}, {"causal": True}, (B, C, C, C, B, C, C)),
]


def bare(config: DraftConfig, kinds: list[str]) -> dict[str, Any]:
    """A configuration that states no causality."""
    raw = render_config(config, "bfloat16") | {"layer_types": kinds}
    raw.pop("is_causal")
    raw["dflash_config"].pop("causal")
    if kinds == SLIDING:
        raw |= {"sliding_window": 4, "use_sliding_window": True}
        raw["dflash_config"]["swa_window_size"] = 4
    return raw


@pytest.mark.parametrize("row", range(len(TABLE)))
@pytest.mark.parametrize("number", range(len(ALL)), ids=ALL)
def test_causality_inside_a_block(config: DraftConfig, row: int, number: int) -> None:
    kinds, top, nested, expected = TABLE[row]
    raw = bare(config, kinds) | top
    raw["dflash_config"] |= nested
    stated = parse_config(raw)
    found = reading(ALL[number], stated, "zlab", raw)
    assert found.causal == expected[number]
    assert bool(found.problems) == (found.causal != stated.causal)


def test_use_swa(config: DraftConfig) -> None:
    raw = bare(config, FULL)
    raw["dflash_config"] |= {"use_swa": True, "swa_window_size": 4}
    stated = parse_config(raw)
    assert (stated.causal, stated.windows) == (B, (4, 4))
    windows = {key: reading(key, stated, "zlab", raw).windows for key in ALL}
    assert {key for key, found in windows.items() if found == (4, 4)} == {"vllm", "trtllm", "llama.cpp"}


def test_llama_cpp_loses_a_window_without_its_flag(config: DraftConfig) -> None:
    raw = bare(config, SLIDING) | {"use_sliding_window": False, "is_causal": True}
    found = reading("llama.cpp", parse_config(raw), "zlab", raw)
    assert found.windows == (None, None)
    assert "windows" in found.problems[0]
    assert reading("vllm", parse_config(raw), "zlab", raw).windows == (4, 4)


@pytest.mark.parametrize(
    ("non_causal", "inner", "expected"),
    [(None, None, B), (True, None, B), (False, None, C), (False, False, B), (True, True, C)],
)
def test_vllm_reads_speculators(
    config: DraftConfig, non_causal: bool | None, inner: bool | None, expected: tuple[bool, ...]
) -> None:
    raw = render_speculators(config, "bfloat16")
    raw["transformer_layer_config"].pop("is_causal")
    raw.pop("sliding_window_non_causal")
    if non_causal is not None:
        raw["sliding_window_non_causal"] = non_causal
    if inner is not None:
        raw["transformer_layer_config"]["is_causal"] = inner
    found = reading("vllm", config, "speculators", raw)
    assert found.causal == expected
    assert found.target_layer_ids == config.target_layer_ids
    assert flatten_for_vllm(raw)["dflash_config"]["mask_token_id"] == config.mask_token_id


def test_where_ids_stand(config: DraftConfig) -> None:
    raw = render_config(config, "bfloat16")
    del raw["dflash_config"]["mask_token_id"], raw["dflash_config"]["target_layer_ids"]
    found = reading("ollama-mlx", config, "zlab", raw)
    assert found.mask_token_id is None
    assert len(found.problems) == 2
    assert not reading("vllm", config, "zlab", raw).problems


def test_block_sizes(config: DraftConfig) -> None:
    raw = render_config(config, "bfloat16")
    del raw["dflash_config"]["block_size"], raw["block_size"]
    assert reading("sglang", config, "zlab", raw).block_size == 16
    assert reading("vllm", config, "zlab", raw).block_size is None


@pytest.mark.parametrize("engine", LAYOUTS_FOR)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"causal": C},
        {"windows": (4, 4)},
        {"causal": C, "windows": (4, None)},
        {"causal": (True, False), "windows": (4, None)},
    ],
)
def test_what_is_written_is_read_as_stated_or_refused(
    config: DraftConfig, engine: Any, changes: dict[str, Any]
) -> None:
    config = replace(config, **changes)
    unsaid = {"trtllm": [{"causal": C}, {"windows": (4, 4)}, {"causal": C, "windows": (4, None)}]}
    if changes in unsaid.get(engine, []):
        with pytest.raises(CheckpointError, match=r"TensorRT-LLM 1[.]4rc runs"):
            check_readable(engine, config, "zlab", None)
        return
    assert not check_readable(engine, config, LAYOUTS_FOR[engine][0], None).problems


def test_vllm_refuses_mixed_causality_in_the_speculators_layout(config: DraftConfig) -> None:
    mixed = replace(config, causal=(True, False), windows=(4, None))
    with pytest.raises(CheckpointError, match=r"causal blocks where .* --to zlab"):
        check_readable("vllm", mixed, "speculators", render_speculators(mixed, "bfloat16"))


@pytest.mark.parametrize(
    ("engine", "layout"),
    [("sglang", "speculators"), ("vllm", "gguf"), ("llama.cpp", "zlab"), ("ollama", "zlab")],
)
def test_layouts_that_an_engine_does_not_load(config: DraftConfig, engine: Any, layout: Any) -> None:
    with pytest.raises(CheckpointError, match="does not load"):
        check_readable(engine, config, layout, None)


def test_scales_are_not_silently_lost(config: DraftConfig) -> None:
    scaled = replace(config, output_multiplier=0.5)
    with pytest.raises(CheckpointError, match="does not apply output_multiplier"):
        check_readable("vllm", scaled, "zlab", None)
    assert not check_readable("sglang", scaled, "zlab", None).problems


def test_every_row_names_its_version() -> None:
    assert all(any(character.isdigit() for character in rules.version) for rules in RULES.values())
