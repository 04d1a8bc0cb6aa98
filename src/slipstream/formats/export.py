"""One drafter for one engine: the checkpoint in a layout that it loads, the target beside it where asked,
and SERVE.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from slipstream.core.errors import CheckpointError
from slipstream.formats.checkpoint import read_json, writing_folder
from slipstream.formats.engines import LAYOUTS_FOR, RULES, Engine, check_readable
from slipstream.formats.gguf_drafter import check_expressible, write_gguf_drafter
from slipstream.formats.gguf_target import write_gguf_target
from slipstream.formats.gguf_tokenizer import read_vocabulary
from slipstream.formats.layouts import Layout
from slipstream.formats.serving import Names, modelfile, serving_notes
from slipstream.formats.speculators import render_speculators, write_speculators
from slipstream.formats.zlab import write_zlab
from slipstream.model import Drafter

NOTES_NAME = "SERVE.md"
_HINT = (
    "Slipstream drafts from {count} frequent tokens alone with this drafter; {name} does not know "
    "that list and drafts from all tokens, so its acceptance may differ a little."
)
_NO_INT8 = (
    "8-bit weights are written in the gguf layout only, not in {layout}; leave --int8 out (vLLM and SGLang "
    "can quantise a drafter while they load it)"
)


@dataclass(frozen=True)
class Exported:
    """What an export made.

    Attributes:
        files: in the folder.
        notes: what was left out, or should be known.
    """

    files: tuple[str, ...]
    notes: tuple[str, ...]


def export_drafter(
    drafter: Drafter,
    out: Path,
    engine: Engine,
    *,
    layout: Layout | None = None,
    target: str = "TARGET",
    target_folder: Path | None = None,
    name: str = "drafter",
    int8: bool = False,
    force: bool = False,
) -> Exported:
    """Write a drafter so that an engine loads it and runs what it states.

    Args:
        drafter: to write, in bfloat16.
        out: folder to make.
        engine: that will serve it.
        layout: to write; None takes the engine's first.
        target: name of the target in commands.
        target_folder: Hugging Face folder of the target; for GGUF engines it is converted too.
        name: of the pair, in file names.
        int8: store the drafter's matrices in 8-bit weights; GGUF only.
        force: replace an existing export.

    Raises:
        CheckpointError: the engine would not load it or would run something else, the layout cannot express
            it, or the folder exists. Nothing is written then.
    """
    layout = layout or LAYOUTS_FOR[engine][0]
    if layout == "gguf" and target_folder is None:
        raise CheckpointError(
            f"{RULES[engine].name} wants the target's tokenizer in the drafter's file; name the "
            "target with -t"
        )
    if int8 and layout != "gguf":
        raise CheckpointError(_NO_INT8.format(layout=layout))
    raw = render_speculators(drafter.config, "bfloat16") if layout == "speculators" else None
    if layout == "gguf":
        check_expressible(drafter.config)
    check_readable(engine, drafter.config, layout, raw)
    notes: tuple[str, ...] = ()
    if drafter.draft_vocabulary is not None:
        notes = (_HINT.format(count=len(drafter.draft_vocabulary), name=RULES[engine].name),)
    with writing_folder(out, force, lambda _: set()) as temporary:
        names = Names(target, ".")
        if layout == "zlab":
            write_zlab(drafter, temporary, force=True)
        elif layout == "speculators":
            write_speculators(drafter, temporary, verifier=target, force=True)
        else:
            assert target_folder is not None
            names = _write_pair(drafter, temporary, target_folder, name, int8)
            if engine == "ollama":
                (temporary / "Modelfile").write_text(modelfile(drafter.config, names), encoding="utf-8")
        text = serving_notes(engine, layout, drafter.config, names, notes)
        (temporary / NOTES_NAME).write_text(text, encoding="utf-8")
        files = tuple(sorted(path.name for path in temporary.iterdir()))
    return Exported(files, notes)


def _write_pair(drafter: Drafter, folder: Path, target_folder: Path, name: str, int8: bool) -> Names:
    """Target and drafter as GGUF files that belong together."""
    names = Names(f"target-{name}.gguf", f"dflash-{name}.gguf")
    rows = read_json(target_folder / "config.json").get("vocab_size")
    if rows != drafter.config.vocab_size:
        raise CheckpointError(
            f"the drafter is not for {target_folder}: its vocabulary is {drafter.config.vocab_size}, "
            f"not {rows}"
        )
    vocabulary = read_vocabulary(target_folder, drafter.config.vocab_size)
    write_gguf_drafter(drafter, folder / names.drafter, vocabulary, name=f"{name} drafter", int8=int8)
    write_gguf_target(target_folder, folder / names.target, name=name)
    return names
