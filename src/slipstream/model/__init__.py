"""The drafter: configuration, modules and masks as pure tensors; it knows no target and draws no tokens."""

from slipstream.model.config import DraftConfig, TargetShape, default_tap_ids
from slipstream.model.drafter import ContextKV, Drafter
from slipstream.model.masks import decode_masks

__all__ = ["ContextKV", "DraftConfig", "Drafter", "TargetShape", "decode_masks", "default_tap_ids"]
