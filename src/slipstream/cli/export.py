"""`slipstream export`: a drafter for another engine, with the command that serves it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from slipstream.cli.session import say
from slipstream.cli.stored import read_stored


def export(
    drafter: str,
    /,
    *,
    engine: Annotated[
        Literal["vllm", "sglang", "trtllm", "llama.cpp", "ollama"], Parameter(name="--for")
    ] = "vllm",
    to: Literal["auto", "zlab", "speculators", "gguf"] = "auto",
    out: Annotated[Path, Parameter(alias="-o")],
    target: Annotated[str, Parameter(alias="-t")] = "",
    name: str = "",
    int8: bool = False,
    force: bool = False,
) -> int:
    """Write a drafter so that another engine loads it and reads it right; SERVE.md holds its command.

    Args:
        drafter: a folder, a GGUF file, a hub id, or smollm2 (the bundled one).
        engine: the engine that will serve it.
        to: layout to write; auto takes the engine's own.
        out: folder to make.
        target: its target: a folder, a GGUF file, a hub id, or smollm2; llama.cpp and Ollama need it, and
            get it converted as well.
        name: of the pair in file names; the target's own otherwise.
        int8: store the drafter's matrices in 8-bit weights (Q8_0, GGUF only), half as large.
        force: replace an existing export.
    """
    from slipstream.api import drafter_path
    from slipstream.core.files import refuse_existing
    from slipstream.formats.export import export_drafter
    from slipstream.target import BUNDLED, model_folder

    refuse_existing(out, force)
    folder = model_folder(target, say) if target else None
    # Commands are run in the new folder: a path must hold there, and no other engine knows our short name.
    local = folder is not None and (target == BUNDLED or Path(target).exists())
    made = export_drafter(
        read_stored(drafter_path(drafter, say), target),
        out,
        engine,
        layout=None if to == "auto" else to,
        target=str(folder.resolve()) if folder is not None and local else target or "TARGET",
        target_folder=folder,
        name=name or (Path(target).stem if target else "drafter"),
        int8=int8,
        force=force,
    )
    for note in made.notes:
        say(f"note: {note}")
    for file in made.files:
        print(out / file)
    return 0
