"""`slipstream import`: a drafter in any layout as a z-lab folder, which everything here reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.session import say
from slipstream.cli.stored import read_stored


def import_(
    drafter: str,
    /,
    *,
    out: Annotated[Path, Parameter(alias="-o")],
    target: Annotated[str, Parameter(alias="-t")] = "",
    force: bool = False,
) -> int:
    """Turn a drafter in any layout (z-lab, speculators, GGUF) into a folder of the z-lab layout.

    Args:
        drafter: a folder, a GGUF file, a hub id, or smollm2 (the bundled one).
        out: folder to make.
        target: its target; needed where the checkpoint has its own embedding or head, or does not say how
            deep its target is.
        force: replace an existing checkpoint.
    """
    from slipstream.api import drafter_path
    from slipstream.formats import write_zlab

    write_zlab(read_stored(drafter_path(drafter, say), target), out, force=force)
    print(out)
    return 0
