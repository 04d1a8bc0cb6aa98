"""Any Hugging Face causal language model seen as verbs: embed, unembed, head, prefill, verify, with taps and a cache."""

from slipstream.target.cache import TargetCache
from slipstream.target.family import TargetInfo
from slipstream.target.model import Prefill, Target, Verified, target_from_model

__all__ = ["Prefill", "Target", "TargetCache", "TargetInfo", "Verified", "target_from_model"]
