"""The doctor on the bundled pair: it is read rightly, and one that is stated wrongly is found out and
mended.
"""

import json
from dataclasses import replace

import pytest
import torch

from slipstream.api import drafter_path
from slipstream.cli.app import run
from slipstream.formats import read_drafter, write_speculators, write_zlab
from slipstream.model import Drafter

pytestmark = pytest.mark.real
FEW = ["-t", "smollm2", "--answer-tokens", "48", "--anchors", "12", "--json"]


def document(capsys, *words):
    status = run([str(word) for word in words])
    return status, json.loads(capsys.readouterr().out)


def test_the_bundled_pair_is_healthy(capsys):
    status, found = document(capsys, "inspect", "smollm2", *FEW)
    assert status == 0
    scores = {row["reading"]: row["acceptance_length"] for row in found["acceptance"]["mistakes"]}
    stated = found["acceptance"]["stated"]["acceptance_length"]
    assert found["acceptance"]["better"] is None
    assert stated > 1.5
    for wrong in ("mask token", "rope over neighbouring channels", "first draft at the anchor's slot"):
        assert next(score for name, score in scores.items() if name.startswith(wrong)) < stated - 0.3


def test_a_wrong_anchor_rule_is_found_and_mended(capsys, tmp_path):
    drafter = read_drafter(drafter_path("smollm2"), dtype=torch.bfloat16)
    wrong = Drafter(replace(drafter.config, from_anchor=True)).bfloat16()
    wrong.load_state_dict(drafter.state_dict())
    write_speculators(wrong, tmp_path / "wrong")
    _, found = document(capsys, "inspect", tmp_path / "wrong", *FEW, "--fix", tmp_path / "mended")
    assert found["acceptance"]["better"] == "first draft at the mask slot"
    mended = read_drafter(tmp_path / "mended", dtype=torch.bfloat16)
    assert mended.config == drafter.config
    assert all(torch.equal(a, b) for a, b in zip(mended.parameters(), drafter.parameters(), strict=True))


def test_taps_off_by_one_are_found_and_mended(capsys, tmp_path):
    """They cost a twentieth of the acceptance; only likelihood shows it on so few blocks."""
    drafter = read_drafter(drafter_path("smollm2"), dtype=torch.bfloat16)
    ids = tuple(number + 1 for number in drafter.config.target_layer_ids)
    wrong = Drafter(replace(drafter.config, target_layer_ids=ids)).bfloat16()
    wrong.load_state_dict(drafter.state_dict())
    write_zlab(wrong, tmp_path / "wrong")
    more = ["-t", "smollm2", "--answer-tokens", "64", "--anchors", "64", "--json"]
    status, found = document(capsys, "inspect", tmp_path / "wrong", *more, "--fix", tmp_path / "mended")
    assert status == 0, "it works, only worse"
    assert found["acceptance"]["better"] == "taps one layer too low"
    assert read_drafter(tmp_path / "mended").config == drafter.config
