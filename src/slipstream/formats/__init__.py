"""Checkpoint layouts: one module each, strict readers and writers; no model is run here."""

from slipstream.formats.gguf_drafter import read_gguf_drafter, write_gguf_drafter
from slipstream.formats.layouts import Layout, read_drafter, recognise
from slipstream.formats.speculators import read_speculators, write_speculators
from slipstream.formats.zlab import read_zlab, write_zlab

__all__ = [
    "Layout",
    "read_drafter",
    "read_gguf_drafter",
    "read_speculators",
    "read_zlab",
    "recognise",
    "write_gguf_drafter",
    "write_speculators",
    "write_zlab",
]
