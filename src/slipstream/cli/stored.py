"""A drafter as it is stored, for the commands that convert it or look at it rather than decode with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from slipstream.cli.session import say

if TYPE_CHECKING:
    from slipstream.model import Drafter


def read_stored(path: Path, target: str) -> Drafter:
    """Read a drafter in bfloat16, with its target where one is named.

    Args:
        path: of a checkpoint in any layout.
        target: name of its target; empty reads without one.

    Raises:
        SlipstreamError: one of the two cannot be read, or they do not belong together.
    """
    import torch

    from slipstream.core.options import TargetOptions
    from slipstream.formats import read_drafter
    from slipstream.target import load_target

    if not target:
        return read_drafter(path, dtype=torch.bfloat16)
    loaded = load_target(target, TargetOptions(dtype="bfloat16", device="cpu", kernels="torch"), say)
    return read_drafter(path, loaded.info, loaded, dtype=torch.bfloat16)
