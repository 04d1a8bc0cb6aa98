"""What a checkpoint says, and how each engine will read it; no model is run here.

The part that needs a target, acceptance under wrong readings, is `bench.mistakes`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from slipstream.formats.checkpoint import read_json
from slipstream.formats.ends import EMBEDDING, HEAD, TargetEnds
from slipstream.formats.engines import RULES, Reading, reading
from slipstream.formats.gguf_drafter import ENDS
from slipstream.formats.gguf_file import read_gguf
from slipstream.formats.layouts import Layout, read_drafter, recognise
from slipstream.formats.zlab import CONFIG_NAME
from slipstream.model import DraftConfig, Drafter, TargetShape


@dataclass(frozen=True)
class Findings:
    """A checkpoint as it states itself and as engines read it.

    Attributes:
        path: of the folder or GGUF file.
        layout: it lies in.
        config: what it states.
        own_ends: its own copies of the target's embedding or head.
        drafted_tokens: size of its draft vocabulary; None for all tokens.
        parameters: of the drafter, without ends.
        readings: by the key of `engines.RULES`.
    """

    path: Path
    layout: Layout
    config: DraftConfig
    own_ends: tuple[str, ...]
    drafted_tokens: int | None
    parameters: int
    readings: Mapping[str, Reading]

    @property
    def facts(self) -> dict[str, Any]:
        """What the checkpoint says, by name, in an order for people."""
        config = self.config
        slot = (
            "slot k gives the token k after the anchor"
            if not config.from_anchor
            else ("slot k gives the token k + 1 after the anchor: the anchor's slot drafts")
        )
        return {
            "layout": self.layout,
            "layers": config.num_layers,
            "parameters": self.parameters,
            "width": config.width,
            "block size": config.block_size,
            "drafts": config.block_size - 1,
            "taps (0-based outputs)": list(config.target_layer_ids),
            "target layers": config.num_target_layers,
            "causal": list(config.causal),
            "windows": list(config.windows),
            "rope": f"theta {config.rope_theta:g}, half-split pairs, up to {config.max_position_embeddings}",
            "mask token": config.mask_token_id,
            "anchor rule": slot,
            "vocabulary": config.vocab_size,
            "drafts from": "all tokens" if self.drafted_tokens is None else f"{self.drafted_tokens} tokens",
            "own embedding or head": ", ".join(self.own_ends) or "none",
        }


def examine(
    path: Path | str, info: TargetShape | None = None, ends: TargetEnds | None = None
) -> tuple[Drafter, Findings]:
    """Read a checkpoint and say what it says.

    Args:
        path: a folder, or a GGUF file.
        info: its target, if there is one; the pair must fit.
        ends: of the target, for checkpoints with their own embedding or head.

    Returns:
        The drafter in bfloat16 and the findings.

    Raises:
        CheckpointError: it cannot be read, or does not fit the target.
    """
    layout, place = recognise(path)
    drafter = read_drafter(place, info, ends, dtype=torch.bfloat16)
    raw = None if layout == "gguf" else read_json(place / CONFIG_NAME)
    found = {key: reading(key, drafter.config, layout, raw) for key in RULES}
    if info is not None:
        found = {key: _with_target(key, one, drafter.config, info) for key, one in found.items()}
    ids = drafter.draft_vocabulary
    return drafter, Findings(
        place,
        layout,
        drafter.config,
        _own_ends(place, layout),
        None if ids is None else len(ids),
        sum(tensor.numel() for tensor in drafter.parameters()),
        found,
    )


def _with_target(key: str, found: Reading, config: DraftConfig, info: TargetShape) -> Reading:
    """What shows only beside the target."""
    if not found.loads:
        return found
    if RULES[key].checks_vocabulary and config.vocab_size != info.vocab_size:
        problem = f"refuses a vocabulary of {config.vocab_size} beside logits of {info.vocab_size}"
        return replace(found, problems=(*found.problems, problem))
    if key == "vllm" and config.max_position_embeddings < info.max_context:
        note = f"limit requests to {config.max_position_embeddings} tokens with --max-model-len"
        return replace(found, notes=(*found.notes, note))
    return found


def _own_ends(place: Path, layout: Layout) -> tuple[str, ...]:
    if layout == "gguf":
        names = {ENDS.get(name, name) for name in read_gguf(place)[1]()}
    else:
        names = set()
        for path in place.glob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                names |= set(file.keys())
    return tuple(name for name in (EMBEDDING, HEAD) if name in names)
