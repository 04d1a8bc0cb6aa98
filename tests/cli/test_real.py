"""The bundled model and its drafter, as a newcomer meets them."""

import json

import pytest

from slipstream.api import bundled_drafter
from slipstream.cli.app import run
from slipstream.target import load_target

pytestmark = pytest.mark.real
SHORT = ["--max-tokens", "24"]


def test_the_bundled_target_has_a_drafter():
    assert bundled_drafter(load_target("smollm2").info) is not None


def test_demo_says_the_same_both_ways(capsys):
    assert run(["demo", "Name three colours.", "What is a lake?", *SHORT, "--drafts", "max", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    # In bfloat16 a pass over a block may decide a tie the other way.
    assert document["identical"] or document["ties"]
    assert document["drafted"]["acceptance_length"] > 1.0
    assert document["plain"]["acceptance_length"] == 1.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_check_is_clean(capsys, dtype, temperature):
    words = ["--dtype", dtype, "--temperature", temperature, *SHORT, "--json"]
    assert run(["check", "Name three colours.", *words]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exact"] is True
    assert document["dtype"] == dtype
    assert all(request["same_shape"] is None for request in document["requests"])
