"""From a path to a drafter in any known layout: what lies there decides, not its name."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from slipstream.core.errors import CheckpointError
from slipstream.formats.checkpoint import read_json
from slipstream.formats.deepspec import ARCHITECTURE as DEEPSPEC
from slipstream.formats.deepspec import read_deepspec
from slipstream.formats.ends import TargetEnds
from slipstream.formats.gguf_drafter import read_gguf_drafter
from slipstream.formats.speculators import read_speculators
from slipstream.formats.zlab import CONFIG_NAME, read_zlab
from slipstream.model import Drafter, TargetShape

Layout = Literal["zlab", "speculators", "deepspec", "gguf"]
_RELATIVES = {
    "DFlash2DraftModel": "DFlash 2",
    "DFlash2BeamDraftModel": "DFlash 2",
    "LiLiCorrDraftModel": "LiLiCorr",
    "MuseGlimmerAssistantModel": "Muse's assistant",
    "Qwen3XPressModel": "xPress",
    "DFlashLagunaForCausalLM": "Laguna's DFlash",
    "DSparkDraftModel": "DSpark",
}


def recognise(path: Path | str) -> tuple[Layout, Path]:
    """Which layout lies at a path.

    Args:
        path: a folder, or a GGUF file.

    Returns:
        The layout, and the folder or the GGUF file to read.

    Raises:
        CheckpointError: nothing there, or no DFlash drafter.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"{path} is a file but not a GGUF file; give a drafter's folder or a .gguf file"
            )
        return "gguf", path
    if not path.is_dir():
        raise CheckpointError(f"no drafter at {path}")
    if not (path / CONFIG_NAME).is_file():
        files = sorted(path.glob("*.gguf"))
        drafters = [file for file in files if file.name.startswith("dflash-")] or files
        if len(drafters) == 1:
            return "gguf", drafters[0]
        raise CheckpointError(
            f"{path} is not a drafter's folder: it has no config.json and no single GGUF file"
        )
    return _by_config(read_json(path / CONFIG_NAME), path), path


def read_drafter(
    path: Path | str,
    info: TargetShape | None = None,
    ends: TargetEnds | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> Drafter:
    """Read a drafter in any known layout.

    Args:
        path: a folder, or a GGUF file.
        info: the target it must fit; None skips that check.
        ends: of the target, for checkpoints with their own embedding or head.
        device: where the drafter goes.
        dtype: of its weights.

    Raises:
        CheckpointError: one sentence that says what is wrong.
        MissingExtraError: it is a GGUF file, and the gguf package is not installed.
    """
    layout, place = recognise(path)
    if layout == "zlab":
        return read_zlab(place, info, device=device, dtype=dtype)
    if layout == "speculators":
        return read_speculators(place, info, ends, device=device, dtype=dtype)
    if layout == "deepspec":
        return read_deepspec(place, info, ends, device=device, dtype=dtype)
    return read_gguf_drafter(place, info, ends, device=device, dtype=dtype)


def _by_config(raw: dict[str, Any], folder: Path) -> Layout:
    if "speculators_model_type" in raw:
        return "speculators"
    names = raw.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    if DEEPSPEC in names:
        return "deepspec"
    if "DFlashDraftModel" in names or (not names and "dflash_config" in raw):
        return "zlab"
    known = [_RELATIVES[name] for name in names if name in _RELATIVES]
    if known:
        raise CheckpointError(f"{folder} holds a {known[0]} drafter; only plain DFlash is supported")
    what = names[0] if names else raw.get("model_type", "unknown")
    raise CheckpointError(f"{folder} holds no DFlash drafter, its architecture is {what!r}")
