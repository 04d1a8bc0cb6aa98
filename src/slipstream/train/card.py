"""What a finished run says of itself: a model card, and the curve of its training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

from slipstream.core.files import replace_bytes
from slipstream.model import DraftConfig


def card(record: Mapping[str, Any], result: Any, target: str, config: DraftConfig) -> str:
    """The README of a drafter.

    Args:
        record: of the run folder: options, command, versions.
        result: figures of the run, a dataclass.
        target: name of the target.
        config: of the drafter.
    """
    figures, options = asdict(result), record["options"]
    thinking = options["synthesis"]["thinking"]
    mode = "as the template has it" if thinking is None else "on" if thinking else "off"
    taps = ", ".join(map(str, config.target_layer_ids))
    settings = json.dumps({name: options[name] for name in ("drafter", "training")}, indent=2)
    data = options["data"] or "written by the target itself"
    start = options["start"] or "a new drafter"
    lines = [
        "---\ntags: [dflash, speculative-decoding]\n---\n",
        f"# DFlash drafter for {target}\n",
        f"{config.num_layers} layers, blocks of {config.block_size} slots "
        f"({config.block_size - 1} drafts), reading the outputs of target layers {taps} (0-based); "
        f"mask token {config.mask_token_id}. It changes speed only: the text is the target's with any "
        "drafter.\n",
        "## Results\n",
        _results(figures),
        "## Data\n",
        f"Chats: {data}; {figures['chats']} of them, {figures['answer_tokens']} answer tokens trained on. "
        f"Chat template: the tokenizer's own, thinking {mode}.\n",
        "## Training\n",
        f"{figures['steps']} steps, {figures['seconds'] / 60:.1f} minutes. Started from {start}. Options:\n",
        f"```json\n{settings}\n```\n",
        "Versions: " + ", ".join(f"{name} {number}" for name, number in record["versions"].items()) + ".",
    ]
    return "\n".join(lines) + "\n"


def _results(figures: Mapping[str, Any]) -> str:
    if figures["acceptance_length"] is None:
        text = "No chat was held out.\n"
    else:
        rates = ", ".join(f"{rate:.2f}" for rate in figures["hit_rate"])
        text = (
            f"On held-out chats, teacher-forced over evenly spread anchors: acceptance length "
            f"**{figures['acceptance_length']:.2f}** (bonus token included), hit rate by slot {rates}. "
        )
        if figures["decoded"] is not None:
            text += f"By greedy decoding of a few held-out prompts: **{figures['decoded']:.2f}** per round."
        text += "\n"
    if figures["workloads"]:
        text += (
            "\nGreedy decoding of a few bundled prompts of each kind, which are unlike the training data:\n\n"
        )
        text += "| workload | tokens per round |\n|---|---:|\n"
        text += "".join(f"| {name} | {length:.2f} |\n" for name, length in figures["workloads"].items())
    return text


def draw_curve(metrics: Path, picture: Path) -> bool:
    """Draw loss and acceptance lengths over steps as a PNG.

    Args:
        metrics: JSONL of the loop.
        picture: where to.

    Returns:
        Whether it was drawn; False where matplotlib is not installed or there is nothing to draw.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    entries = [json.loads(line) for line in metrics.read_text().splitlines()]
    if not entries:
        return False
    steps = [entry["step"] for entry in entries]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    left = figure.subplots()
    left.plot(steps, _smooth([e["acceptance_length"] for e in entries]), label="training (teacher-forced)")
    held = [(e["step"], e["held_out"]) for e in entries if "held_out" in e]
    if held:
        left.plot([s for s, _ in held], [h["acceptance_length"] for _, h in held], "o-", label="held out")
        decoded = [(s, h["decoded"]) for s, h in held if h["decoded"] is not None]
        if decoded:
            left.plot([s for s, _ in decoded], [d for _, d in decoded], "s--", label="held out, decoded")
    left.set_xlabel("step")
    left.set_ylabel("acceptance length (tokens per round)")
    right = left.twinx()
    right.plot(steps, _smooth([e["loss"] for e in entries]), color="0.7", zorder=0)
    right.set_ylabel("loss per block (grey)")
    left.legend(loc="upper left")
    left.grid(alpha=0.3)
    drawn = BytesIO()
    figure.savefig(drawn, format="png")
    replace_bytes(picture, drawn.getvalue())
    return True


def _smooth(values: list[float], keep: float = 0.95) -> list[float]:
    """Running mean with a start that forgets quickly."""
    smooth: list[float] = []
    for number, value in enumerate(values):
        decay = min(keep, number / (number + 10))
        smooth.append(value if not smooth else decay * smooth[-1] + (1 - decay) * value)
    return smooth
