"""Measuring what drafting gains: plain and drafted decoding of the same prompts in one process."""

from slipstream.bench.compare import DEMO_PROMPTS, Comparison, Observer, compare, total_rate

__all__ = ["DEMO_PROMPTS", "Comparison", "Observer", "compare", "total_rate"]
