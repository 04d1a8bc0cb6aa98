"""Checkpoint layouts: one module each, strict readers and writers; no model is run here."""

from slipstream.formats.zlab import read_zlab, write_zlab

__all__ = ["read_zlab", "write_zlab"]
