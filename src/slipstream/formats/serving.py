"""`SERVE.md`: the exact command that serves an exported drafter, for each engine and the version it was
written for.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from slipstream.formats.engines import RULES, Engine
from slipstream.formats.layouts import Layout
from slipstream.model import DraftConfig


@dataclass(frozen=True)
class Names:
    """What stands in the commands.

    Attributes:
        target: name or path of the target, or its GGUF file.
        drafter: path of the exported folder or file, relative to the folder it was exported to.
    """

    target: str
    drafter: str


def serving_notes(
    engine: Engine, layout: Layout, config: DraftConfig, names: Names, notes: tuple[str, ...] = ()
) -> str:
    """The text of SERVE.md.

    Args:
        engine: to serve with.
        layout: that was written.
        config: of the drafter.
        names: for the commands.
        notes: what was left out or should be known.
    """
    rules = RULES[engine]
    drafts = config.block_size - 1
    proof = (
        f"exports were run and compared in {rules.ran}"
        if rules.ran
        else "by its published source, not by a run"
    )
    lines = [
        f"# Serving with {rules.name} {rules.version}",
        "",
        f"Written for this version: {proof}.",
        "",
        f"Drafter in the {layout} layout: blocks of {config.block_size} slots, the anchor and "
        f"{drafts} drafts; "
        f"it reads the outputs of target layers {', '.join(map(str, config.target_layer_ids))} (0-based) of "
        f"{config.num_target_layers}; mask token {config.mask_token_id}. Run the command in this folder.",
        "",
        *_COMMANDS[engine](config, names),
        "",
    ]
    lines += [f"- {note}" for note in (*_ADVICE[engine](config), *notes)]
    lines.append("- Use the chat template (and thinking mode) that the drafter was trained with.")
    return "\n".join(lines) + "\n"


def _vllm(config: DraftConfig, names: Names) -> list[str]:
    spec = json.dumps(
        {"method": "dflash", "model": names.drafter, "num_speculative_tokens": config.block_size - 1}
    )
    return _block(
        f"vllm serve {names.target} \\",
        f"  --speculative-config '{spec}' \\",
        "  --attention-backend flash_attn",
    )


def _vllm_advice(config: DraftConfig) -> list[str]:
    return [
        f"`num_speculative_tokens` leaves the anchor out: at most {config.block_size - 1}.",
        "Bidirectional blocks need an attention backend that can be non-causal: `flash_attn` on "
        "NVIDIA cards of compute capability 8 and more. On a CPU leave `--attention-backend` out and add "
        "`--enforce-eager`.",
        f"Keep `--max-model-len` within {config.max_position_embeddings}, the drafter's limit (vllm#57941).",
        "Mixed sliding and full layers need the V2 model runner."
        if len({window is None for window in config.windows}) > 1
        else 'Sampled drafts: `"draft_sample_method": "probabilistic"` in the same object.',
    ]


def _sglang(config: DraftConfig, names: Names) -> list[str]:
    return _block(
        f"python -m sglang.launch_server --model-path {names.target} \\",
        f"  --speculative-algorithm DFLASH --speculative-draft-model-path {names.drafter} \\",
        f"  --speculative-num-draft-tokens {config.block_size}",
    )


def _sglang_advice(config: DraftConfig) -> list[str]:
    return [
        f"`--speculative-num-draft-tokens` counts the anchor: {config.block_size} here, where vLLM says "
        f"{config.block_size - 1}.",
        "`SGLANG_SIMULATE_ACC_LEN` must be unset: it fakes acceptance.",
        "Pipeline parallelism must be 1; exact sampling needs the CUDA kernel.",
    ]


def _trtllm(config: DraftConfig, names: Names) -> list[str]:
    return [
        "Save as `speculation.yaml`:",
        "",
        "```yaml",
        "speculative_config:",
        "  decoding_type: DFlash",
        f"  max_draft_len: {config.block_size - 1}",
        f"  speculative_model: {names.drafter}",
        f"  mask_token_id: {config.mask_token_id}",
        f"  target_layer_ids: {list(config.target_layer_ids)}",
        "```",
        "",
        *_block(f"trtllm-serve {names.target} --config speculation.yaml"),
    ]


def _trtllm_advice(config: DraftConfig) -> list[str]:
    return [
        f"`max_draft_len` leaves the anchor out: at most {config.block_size - 1}.",
        "For sampling set `use_rejection_sampling: true`, with penalties also `enable_penalty: true`.",
    ]


def _llama_cpp(config: DraftConfig, names: Names) -> list[str]:
    return _block(
        f"llama-server -m {names.target} -md {names.drafter} \\",
        f"  --spec-type draft-dflash --spec-draft-n-max {config.block_size - 1}",
    )


def _llama_cpp_advice(config: DraftConfig) -> list[str]:
    return [
        f"Without `--spec-draft-n-max {config.block_size - 1}` only 3 tokens are drafted.",
        "`--spec-draft-p-min 0.5` ends a draft early where the drafter is unsure; on a CPU that often pays.",
        "On a GPU add `-ngl 99 -ngld 99`; `--parallel 1` keeps the memory for one request.",
    ]


def _ollama(config: DraftConfig, names: Names) -> list[str]:
    return [
        "`Modelfile` lies in this folder.",
        "",
        *_block("ollama create fast -f Modelfile", "$ ollama run fast"),
    ]


def _ollama_advice(config: DraftConfig) -> list[str]:
    return [
        "Ollama sees that the file after `DRAFT` is of the architecture `dflash` and starts its own "
        "llama-server with `--spec-type draft-dflash`, as the list of processes then shows. Releases up to "
        "0.31 start every drafter as one of another kind (`draft-mtp`): update those.",
        "Its MLX runner drafts with DFlash for targets of the Laguna and Muse families alone, so these are "
        "GGUF files; do not give the drafter as a folder.",
        f"`PARAMETER draft_num_predict {config.block_size - 1}` is in the Modelfile; without it 4 are "
        "drafted, 0 turns drafting off.",
        "`ollama create` quantises no GGUF file (`--quantize`, `--draft-quantize`): quantise before, the "
        "drafter with `slipstream export --int8`.",
        "See with `ollama show fast --template` that it found the target's chat template; otherwise add a "
        "`TEMPLATE` line to the Modelfile.",
    ]


def modelfile(config: DraftConfig, names: Names) -> str:
    """Ollama's Modelfile for a pair of GGUF files."""
    drafts = config.block_size - 1
    return f"FROM ./{names.target}\nDRAFT ./{names.drafter}\nPARAMETER draft_num_predict {drafts}\n"


def _block(*lines: str) -> list[str]:
    return ["```console", f"$ {lines[0]}", *lines[1:], "```"]


_COMMANDS: Final[dict[Engine, Callable[[DraftConfig, Names], list[str]]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "llama.cpp": _llama_cpp,
    "ollama": _ollama,
}
_ADVICE: Final[dict[Engine, Callable[[DraftConfig], list[str]]]] = {
    "vllm": _vllm_advice,
    "sglang": _sglang_advice,
    "trtllm": _trtllm_advice,
    "llama.cpp": _llama_cpp_advice,
    "ollama": _ollama_advice,
}
