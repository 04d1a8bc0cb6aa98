"""export, import and inspect end to end on a tiny pair: what they write, what they say, how they exit."""

import json

import pytest
import torch

from slipstream.cli.app import run
from slipstream.formats import read_drafter, write_speculators, write_zlab
from slipstream.formats.zlab import read_zlab
from tests.formats.conftest import assert_same, random_drafter
from tests.formats.test_export import split_as_gpt2
from tests.tiny import TEMPLATE, save_drafter, save_target

FEW = ["--answer-tokens", "12", "--anchors", "4", "--dtype", "float32"]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return split_as_gpt2(save_target(tmp_path_factory.mktemp("target")))


@pytest.fixture(scope="module")
def drafter(tmp_path_factory, target):
    return save_drafter(tmp_path_factory.mktemp("drafter") / "d", target)


def call(capsys, *words):
    status = run([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_export_and_import_bring_back_every_bit(capsys, drafter, target, tmp_path):
    out = tmp_path / "out"
    status, printed, _ = call(
        capsys, "export", drafter, "--for", "llama.cpp", "-t", target, "-o", out, "--name", "p"
    )
    assert status == 0
    assert printed.split() == [str(out / name) for name in ("SERVE.md", "dflash-p.gguf", "target-p.gguf")]
    status, printed, _ = call(capsys, "import", out / "dflash-p.gguf", "-o", tmp_path / "back")
    assert (status, printed) == (0, f"{tmp_path / 'back'}\n")
    assert_same(
        read_zlab(tmp_path / "back", dtype=torch.bfloat16), read_drafter(drafter, dtype=torch.bfloat16)
    )
    assert (tmp_path / "back" / "config.json").read_text() == (drafter / "config.json").read_text()


def test_export_for_vllm_by_default(capsys, drafter, tmp_path):
    assert call(capsys, "export", drafter, "-o", tmp_path / "a")[0] == 0
    assert call(capsys, "export", drafter, "--to", "speculators", "-o", tmp_path / "b")[0] == 0
    assert "speculators_model_type" in (tmp_path / "b" / "config.json").read_text()
    status, _, err = call(capsys, "export", drafter, "-o", tmp_path / "a")
    assert status == 1
    assert "--force" in err
    assert call(capsys, "export", drafter, "-o", tmp_path / "a", "--force")[0] == 0


def test_a_gguf_drafter_decodes(capsys, drafter, target, tmp_path):
    call(capsys, "export", drafter, "--for", "ollama", "-t", target, "-o", tmp_path / "o", "--name", "p")
    words = [
        "generate",
        "hi",
        "-t",
        target,
        "--dtype",
        "float32",
        "--max-tokens",
        "8",
        "--ignore-eos",
        "--json",
    ]
    texts = [
        json.loads(call(capsys, *words, "-d", place)[1])["token_ids"]
        for place in (drafter, tmp_path / "o" / "dflash-p.gguf")
    ]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["export", "{d}", "--for", "sglang", "--to", "speculators", "-o", "{o}"], "does not load"),
        (["export", "{d}", "--for", "ollama", "-o", "{o}"], "name the target with -t"),
        (["export", "./nowhere", "-o", "{o}"], "no drafter at ./nowhere"),
        (["import", "./x.gguf", "-o", "{o}"], "no drafter at ./x.gguf"),
        (["import", "{t}", "-o", "{o}"], "holds no DFlash drafter"),
        (["inspect", "{d}", "--fix", "{o}"], "--fix needs the target"),
    ],
)
def test_refusals_are_one_line(capsys, drafter, target, tmp_path, words, hint):
    out = tmp_path / "out"
    status, printed, err = call(capsys, *(word.format(d=drafter, t=target, o=out) for word in words))
    assert (status, printed) == (1, "")
    assert hint in err
    assert err.count("\n") == 1
    assert not out.exists()


def test_inspect_without_a_target(capsys, drafter):
    status, out, _ = call(capsys, "inspect", drafter)
    assert status == 0
    for words in ("layout", "zlab", "vLLM", "SGLang", "as stated", "name its target with -t"):
        assert words in out
    status, out, _ = call(capsys, "inspect", drafter, "--json")
    document = json.loads(out)
    assert document["states"]["block size"] == 4
    assert len(document["engines"]) == 8
    assert document["acceptance"] is None
    assert document["works"] is True


def test_inspect_says_which_engine_reads_it_wrongly(capsys, drafter, tmp_path):
    mixed = read_drafter(drafter, dtype=torch.bfloat16)
    mixed = random_drafter(mixed.config, num_layers=2, causal=(True, False), windows=(4, None))
    write_speculators(mixed, tmp_path / "s")
    status, out, _ = call(capsys, "inspect", tmp_path / "s", "--engine", "vllm", "--json")
    assert status == 1
    assert "causal blocks" in json.loads(out)["verdict"][0]
    status, out, _ = call(capsys, "inspect", tmp_path / "s", "--engine", "sglang")
    assert status == 1
    assert "does not load" in out


def test_a_pair_that_cannot_work_exits_with_one(capsys, drafter, target, tmp_path):
    status, out, _ = call(capsys, "inspect", drafter, "-t", target, "--json", *FEW)
    document = json.loads(out)
    assert status == 1, "a random drafter has nothing accepted"
    assert "no draft is accepted" in document["verdict"][0]
    names = [row["reading"] for row in document["acceptance"]["mistakes"]]
    assert {"causal blocks", "no chat template"} <= set(names)
    assert any(name.startswith("mask token") for name in names)
    config = read_drafter(drafter).config
    write_zlab(random_drafter(config, num_target_layers=9), tmp_path / "deep")
    status, _, err = call(capsys, "inspect", tmp_path / "deep", "-t", target, *FEW)
    assert status == 1
    assert "number of target layers is 9, not 2" in err


def test_a_fix_overwrites_nothing(capsys, drafter, target, tmp_path):
    (tmp_path / "there").mkdir()
    status, out, err = call(capsys, "inspect", drafter, "-t", target, *FEW, "--fix", tmp_path / "there")
    assert (status, out) == (1, ""), "it is refused before anything is measured"
    assert "there" in err


def test_thinking_modes_are_tried_where_the_template_has_them(capsys, drafter, tmp_path):
    template = TEMPLATE + "{% if enable_thinking is defined and enable_thinking %}think{% endif %}"
    target = save_target(tmp_path / "t", template)
    _, out, _ = call(capsys, "inspect", drafter, "-t", target, "--json", *FEW)
    names = [row["reading"] for row in json.loads(out)["acceptance"]["mistakes"]]
    assert "thinking on" in names
    assert "thinking off" not in names, "it is the template's own mode"
