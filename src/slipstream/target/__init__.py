"""Any Hugging Face causal language model seen as verbs: embed, head, prefill, verify; with taps."""

from slipstream.target.cache import TargetCache
from slipstream.target.family import TargetInfo
from slipstream.target.load import BUNDLED, bundled_file, load_target, model_folder
from slipstream.target.model import Prefill, Target, Verified, target_from_model
from slipstream.target.packing import packed

__all__ = [
    "BUNDLED",
    "Prefill",
    "Target",
    "TargetCache",
    "TargetInfo",
    "Verified",
    "bundled_file",
    "load_target",
    "model_folder",
    "packed",
    "target_from_model",
]
