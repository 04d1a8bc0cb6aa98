"""What is asked in a benchmark: bundled prompts of our own, a user's file, known sets of the hub."""

from slipstream.bench.workloads.hub import HUB
from slipstream.bench.workloads.tasks import Task, load_tasks
from slipstream.data.bundled import BUNDLED

__all__ = ["BUNDLED", "HUB", "Task", "load_tasks"]
