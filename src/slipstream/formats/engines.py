"""What each engine makes of a checkpoint: its published loader rules as a table, and what follows from them.

No engine is imported or run here; every row names the version it describes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from slipstream.core.errors import CheckpointError
from slipstream.formats.layouts import Layout
from slipstream.formats.zlab_config import render_config
from slipstream.model import DraftConfig

#: Engines that `export` writes for.
Engine = Literal["vllm", "sglang", "trtllm", "llama.cpp", "ollama"]
Place = Literal["nested", "top"]
_SCALES: Final = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


@dataclass(frozen=True)
class Rules:
    """How one engine reads a configuration of the z-lab layout.

    Attributes:
        name: of the engine and its path, if it has several.
        version: that the rules describe.
        ran: where our exports were run and compared; empty where the rules are known from what is published.
        layouts: that it loads.
        causal_keys: where it looks for one causality of all layers, in this order: `is_causal` (top level),
            `dflash_config.is_causal`, `dflash_config.causal`.
        sliding_causal: of sliding layers where no such key stands; full layers are then bidirectional.
        use_swa: it turns all layers sliding and symmetric by `dflash_config.use_swa`.
        window_flag: it keeps a window only with `use_sliding_window` or `use_swa`.
        ids: where it looks for tap ids and the mask token.
        block_default: where no block size stands; None where the command line says it.
        scales: keys of scaled embeddings and logits that it applies.
        checks_vocabulary: it compares `vocab_size` with the width of the target's logits.
        notes: what else its users should know.
    """

    name: str
    version: str
    ran: str = ""
    layouts: tuple[Layout, ...] = ("zlab",)
    causal_keys: tuple[str, ...] = ("is_causal", "dflash_config.causal")
    sliding_causal: bool = True
    use_swa: bool = True
    window_flag: bool = False
    ids: tuple[Place, ...] = ("nested", "top")
    block_default: int | None = 16
    scales: frozenset[str] = frozenset()
    checks_vocabulary: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Reading:
    """What an engine would run.

    Attributes:
        engine: its name.
        version: of the rules.
        loads: whether it loads this layout at all.
        causal: per layer.
        windows: per layer.
        target_layer_ids: 0-based outputs; empty where it finds none.
        mask_token_id: None where it finds none.
        block_size: T; None where its command line says it.
        ignored: scales that it does not apply although they are set.
        problems: how this differs from what the checkpoint states; empty where it does not.
        notes: what else its users should know.
    """

    engine: str
    version: str
    loads: bool
    causal: tuple[bool, ...] = ()
    windows: tuple[int | None, ...] = ()
    target_layer_ids: tuple[int, ...] = ()
    mask_token_id: int | None = None
    block_size: int | None = None
    ignored: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())


RULES: Final[dict[str, Rules]] = {
    "z-lab": Rules(
        "z-lab/dflash (git)",
        "44947fb, April 2026",
        causal_keys=(),
        sliding_causal=False,
        use_swa=False,
        notes=("a sliding window is honoured only by FlashAttention 2",),
    ),
    "dflash": Rules(
        "dflash (PyPI)",
        "0.1.0",
        ran="dflash 0.1.0 on a CPU",
        causal_keys=("dflash_config.is_causal", "is_causal"),
        use_swa=False,
        scales=frozenset(_SCALES),
        notes=(
            "the last block of a text is shortened, which changes what a bidirectional drafter says there",
        ),
    ),
    "vllm": Rules(
        "vLLM",
        "0.33.0",
        ran="vLLM 0.32.0 on a CPU",
        layouts=("zlab", "speculators", "deepspec"),
        block_default=None,
        notes=(
            "num_speculative_tokens does not count the anchor",
            "requests beyond the drafter's max_position_embeddings fail (vllm#57941)",
        ),
    ),
    "sglang": Rules(
        "SGLang",
        "0.5.23",
        layouts=("zlab", "deepspec"),
        causal_keys=("is_causal",),
        use_swa=False,
        scales=frozenset(("output_multiplier", "final_logit_softcapping")),
        notes=(
            "--speculative-num-draft-tokens counts the anchor",
            "tensors whose names it does not know are dropped without a word",
        ),
    ),
    "trtllm": Rules(
        "TensorRT-LLM",
        "1.4rc",
        causal_keys=(),
        block_default=None,
        notes=(
            "whether it reads is_causal is not published",
            "the drafter's layers must share one rope and one number of key heads",
        ),
    ),
    "llama.cpp": Rules(
        "llama.cpp",
        "b11434, October 2026",
        ran="llama.cpp b11434 on a CPU",
        layouts=("gguf",),
        sliding_causal=False,
        window_flag=True,
        ids=("nested", "top"),
        scales=frozenset(_SCALES),
        notes=("--spec-draft-n-max is 3 unless it is given",),
    ),
    "ollama": Rules(
        "Ollama (GGUF)",
        "0.35 (source 00f6d620)",
        layouts=("gguf",),
        sliding_causal=False,
        window_flag=True,
        scales=frozenset(_SCALES),
        notes=(
            "draft_num_predict is 4 unless it is given",
            "releases up to 0.31 start every drafter as one of another kind (draft-mtp)",
        ),
    ),
    "ollama-mlx": Rules(
        "Ollama (MLX)",
        "0.35 (source 7b003b5a)",
        causal_keys=("dflash_config.causal",),
        use_swa=False,
        ids=("nested",),
        block_default=None,
        checks_vocabulary=True,
        notes=("only Laguna and Muse targets are wired", "tap ids must ascend", "rope scaling is not read"),
    ),
}
#: What `export --for` writes by default, and what else it can write.
LAYOUTS_FOR: Final[dict[Engine, tuple[Layout, ...]]] = {
    "vllm": ("zlab", "speculators"),
    "sglang": ("zlab",),
    "trtllm": ("zlab",),
    "llama.cpp": ("gguf",),
    "ollama": ("gguf",),
}


def reading(key: str, config: DraftConfig, layout: Layout, raw: Mapping[str, Any] | None = None) -> Reading:
    """What an engine would run of a checkpoint.

    Args:
        key: of `RULES`.
        config: what the checkpoint states.
        layout: it lies in; for GGUF engines a z-lab one is taken as converted by llama.cpp's own script.
        raw: its config.json; None takes what our writer would write.
    """
    rules = RULES[key]
    converted = "gguf" in rules.layouts and layout == "zlab"
    if layout not in rules.layouts and not converted:
        return Reading(
            rules.name, rules.version, False, notes=(f"{rules.name} does not load the {layout} layout",)
        )
    if layout == "deepspec":
        note = f"{rules.name} loads it as a DSpark drafter without a Markov head"
        return _stated(rules, config, (note, *rules.notes))
    if config.from_anchor:
        problem = f"{rules.name} refuses drafts from the anchor's slot in the {layout} layout"
        return Reading(rules.name, rules.version, False, problems=(problem,))
    if layout == "gguf":
        return _stated(rules, config, rules.notes)
    if raw is None:
        raw = render_config(config, "bfloat16")
    elif layout == "speculators":
        raw = flatten_for_vllm(raw)
    return _compared(rules, raw, config)


def flatten_for_vllm(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A speculators configuration as vLLM 0.33 turns it into one of the z-lab layout (vllm#56692)."""
    nested = {
        "mask_token_id": raw.get("mask_token_id"),
        "target_layer_ids": [number - 1 for number in raw["aux_hidden_state_layer_ids"]],
        "causal": not raw.get("sliding_window_non_causal", True),
    }
    return dict(raw["transformer_layer_config"]) | {"dflash_config": nested}


def _compared(rules: Rules, raw: Mapping[str, Any], config: DraftConfig) -> Reading:
    nested = raw.get("dflash_config") or {}
    causal, windows = _attention(rules, raw, nested, config.num_layers)
    taps = tuple(_first(rules, raw, nested, "target_layer_ids") or ())
    mask = _first(rules, raw, nested, "mask_token_id")
    block = None
    if rules.block_default is not None:
        block = nested.get("block_size", raw.get("block_size", rules.block_default))
    ignored = tuple(key for key in _SCALES if _set(config, key) and key not in rules.scales)
    found = Reading(rules.name, rules.version, True, causal, windows, taps, mask, block, ignored)
    return Reading(**{**vars(found), "problems": _problems(found, config), "notes": rules.notes})


def _attention(
    rules: Rules, raw: Mapping[str, Any], nested: Mapping[str, Any], layers: int
) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Causality and window of every layer."""
    kinds = raw.get("layer_types") or ["full_attention"] * layers
    symmetric = rules.use_swa and bool(nested.get("use_swa")) and "sliding_attention" not in kinds
    sliding = [symmetric or kind == "sliding_attention" for kind in kinds]
    places = {
        "is_causal": raw.get("is_causal"),
        "dflash_config.is_causal": nested.get("is_causal"),
        "dflash_config.causal": nested.get("causal"),
    }
    said = [places[key] for key in rules.causal_keys if places[key] is not None]
    if said:
        causal = [bool(said[0])] * layers
    else:
        causal = [rules.sliding_causal and slides and not symmetric for slides in sliding]
    window = nested.get("swa_window_size") or raw.get("sliding_window")
    if rules.window_flag and not (raw.get("use_sliding_window") or nested.get("use_swa")):
        window = None
    return tuple(causal), tuple(window if slides else None for slides in sliding)


def _first(rules: Rules, raw: Mapping[str, Any], nested: Mapping[str, Any], key: str) -> Any:
    places = {"nested": nested.get(key), "top": raw.get(key)}
    return next((places[place] for place in rules.ids if places[place] is not None), None)


def _problems(found: Reading, config: DraftConfig) -> tuple[str, ...]:
    """Sentences on what differs from what is stated."""
    problems = []
    if found.causal != config.causal:
        problems.append(f"runs {_kinds(found.causal)} where the checkpoint states {_kinds(config.causal)}")
    if found.windows != config.windows:
        problems.append(f"has the windows {list(found.windows)} where {list(config.windows)} are stated")
    if found.target_layer_ids != config.target_layer_ids:
        problems.append(f"reads layers {list(found.target_layer_ids)}, not {list(config.target_layer_ids)}")
    if found.mask_token_id != config.mask_token_id:
        problems.append(f"takes mask token {found.mask_token_id}, not {config.mask_token_id}")
    if found.block_size not in (None, config.block_size):
        problems.append(f"takes blocks of {found.block_size}, not {config.block_size}")
    problems += [f"does not apply {key}" for key in found.ignored]
    return tuple(problems)


def _kinds(causal: tuple[bool, ...]) -> str:
    if len(set(causal)) == 1:
        return "causal blocks" if causal[0] else "bidirectional blocks"
    return "layers " + "/".join("causal" if one else "bidirectional" for one in causal)


def _stated(rules: Rules, config: DraftConfig, notes: tuple[str, ...]) -> Reading:
    """An engine that runs just what the checkpoint states."""
    return Reading(
        rules.name,
        rules.version,
        True,
        config.causal,
        config.windows,
        config.target_layer_ids,
        config.mask_token_id,
        config.block_size,
        notes=notes,
    )


def _set(config: DraftConfig, key: str) -> bool:
    return getattr(config, key) not in (None, 1.0)


def check_readable(
    key: Engine, config: DraftConfig, layout: Layout, raw: Mapping[str, Any] | None
) -> Reading:
    """An engine's reading of what is about to be written for it.

    Raises:
        CheckpointError: the engine would not load it, or would run something else.
    """
    if layout not in LAYOUTS_FOR[key]:
        known = " or ".join(LAYOUTS_FOR[key])
        raise CheckpointError(f"{RULES[key].name} does not load the {layout} layout; use --to {known}")
    found = reading(key, config, layout, raw)
    if found.problems:
        better = " (with --to zlab it would not)" if layout == "speculators" else ""
        raise CheckpointError(
            f"{found.engine} {found.version} {found.problems[0]}{better}, so nothing was written"
        )
    return found
