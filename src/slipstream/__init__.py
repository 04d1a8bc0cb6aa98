"""Slipstream: DFlash speculative decoding for Hugging Face models: several tokens per pass, the same text.

Public names and nothing else; each is imported when it is first used, so that `import slipstream` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.api import Session, Stream, load
    from slipstream.core.errors import (
        CheckpointError,
        InputError,
        MissingExtraError,
        SlipstreamError,
        TargetError,
    )
    from slipstream.core.options import EngineOptions, SamplingOptions, TargetOptions
    from slipstream.core.records import Completion, Piece, Request
    from slipstream.decode import Engine
    from slipstream.formats import read_drafter, read_zlab, write_zlab
    from slipstream.hf import speculate
    from slipstream.model import DraftConfig, Drafter
    from slipstream.target import Target, load_target, target_from_model

__version__ = "0.1.0.dev0"

__all__ = [
    "CheckpointError",
    "Completion",
    "DraftConfig",
    "Drafter",
    "Engine",
    "EngineOptions",
    "InputError",
    "MissingExtraError",
    "Piece",
    "Request",
    "SamplingOptions",
    "Session",
    "SlipstreamError",
    "Stream",
    "Target",
    "TargetError",
    "TargetOptions",
    "load",
    "load_target",
    "read_drafter",
    "read_zlab",
    "speculate",
    "target_from_model",
    "write_zlab",
]

_HOMES = {
    "slipstream.api": ("Session", "Stream", "load"),
    "slipstream.core.errors": (
        "CheckpointError",
        "InputError",
        "MissingExtraError",
        "SlipstreamError",
        "TargetError",
    ),
    "slipstream.core.options": ("EngineOptions", "SamplingOptions", "TargetOptions"),
    "slipstream.core.records": ("Completion", "Piece", "Request"),
    "slipstream.decode": ("Engine",),
    "slipstream.formats": ("read_drafter", "read_zlab", "write_zlab"),
    "slipstream.hf": ("speculate",),
    "slipstream.model": ("DraftConfig", "Drafter"),
    "slipstream.target": ("Target", "load_target", "target_from_model"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
