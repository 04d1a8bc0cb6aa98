"""Exports: the files that an engine wants, a command that is right for it, and no half of anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from slipstream.core.errors import CheckpointError
from slipstream.formats import read_drafter
from slipstream.formats.export import export_drafter
from slipstream.formats.gguf_target import write_gguf_target
from slipstream.formats.gguf_tokenizer import read_vocabulary
from slipstream.model import DraftConfig, Drafter
from slipstream.target import load_target
from tests.formats.conftest import assert_same, random_drafter
from tests.tiny import save_target, tiny_tokenizer


def split_as_gpt2(folder: Path) -> Path:
    """llama.cpp has no name for byte-level BPE that does not split texts first."""
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"use_regex": false', '"use_regex": true', 1))
    return folder


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return split_as_gpt2(Path(save_target(tmp_path_factory.mktemp("target"))))


@pytest.fixture(scope="module")
def drafter(target_folder: Path) -> Drafter:
    info = load_target(str(target_folder)).info
    config = DraftConfig.for_target(info, num_layers=1, block_size=4, num_taps=2, mask_token_id=258)
    return random_drafter(config)


SHAPE: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "rope_theta": 5000.0,
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_target_in_gguf_says_the_same(family: str, tied: bool, tmp_path: Path) -> None:
    """Read back by transformers, which knows GGUF's names and turned rows by itself."""
    torch.manual_seed(3)
    kinds = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
    config, model = kinds[family]
    # transformers does not read the width of a head from a Qwen3 file.
    shape = SHAPE | ({"head_dim": 128} if family == "qwen3" else {})
    made = model(config(**shape, tie_word_embeddings=tied, eos_token_id=257)).bfloat16().eval()
    made.save_pretrained(tmp_path / "hf")
    tiny_tokenizer().save_pretrained(tmp_path / "hf")
    split_as_gpt2(tmp_path / "hf")
    write_gguf_target(tmp_path / "hf", tmp_path / "t.gguf")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="t.gguf", dtype=torch.float32).eval()
    made = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    ids = torch.tensor([[5, 70, 133, 9, 200]])
    with torch.no_grad():
        assert (made(ids).logits - again(ids).logits).abs().max() < 1e-4


def test_the_tokenizer_goes_along(target_folder: Path) -> None:
    vocabulary = read_vocabulary(target_folder, 262)
    assert len(vocabulary.tokens) == len(vocabulary.types) == 262
    assert vocabulary.tokens[257:] == ("<|end|>", "<|mask|>", "<|spare|>", "[PAD260]", "[PAD261]")
    assert set(vocabulary.types[256:260]) == {3}
    assert vocabulary.special["eos"] == 257
    assert "add_generation_prompt" in vocabulary.template


def test_another_tokenizer_is_left_to_the_converter(target_folder: Path, tmp_path: Path) -> None:
    text = (target_folder / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"BPE"', '"Unigram"'))
    with pytest.raises(CheckpointError, match="convert_hf_to_gguf"):
        read_vocabulary(tmp_path, 260)


def test_another_family_is_left_to_the_converter(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "gemma3"}')
    with pytest.raises(CheckpointError, match=r"family gemma3.*convert_hf_to_gguf"):
        write_gguf_target(tmp_path, tmp_path / "t.gguf")


COMMANDS = {
    ("vllm", "zlab"): ('"num_speculative_tokens": 3', "flash_attn", "vllm serve my/target"),
    ("vllm", "speculators"): ('"num_speculative_tokens": 3', "vllm serve my/target"),
    ("sglang", "zlab"): ("--speculative-num-draft-tokens 4", "--speculative-algorithm DFLASH"),
    ("trtllm", "zlab"): ("max_draft_len: 3", "decoding_type: DFlash", "target_layer_ids: [0, 1]"),
    ("llama.cpp", "gguf"): ("--spec-draft-n-max 3", "-m target-p.gguf -md dflash-p.gguf", "run and compared"),
    ("ollama", "gguf"): (
        "draft_num_predict 3",
        "$ ollama create",
        "$ ollama run",
        "draft-mtp",
        "not by a run",
    ),
}


@pytest.mark.parametrize(("engine", "layout"), COMMANDS)
def test_every_engine_gets_its_files_and_its_command(
    engine: Any, layout: Any, drafter: Drafter, target_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    made = export_drafter(
        drafter, out, engine, layout=layout, target="my/target", target_folder=target_folder, name="p"
    )
    text = (out / "SERVE.md").read_text()
    assert all(words in text for words in COMMANDS[engine, layout])
    assert sorted(path.name for path in out.iterdir()) == list(made.files)
    assert_same(read_drafter(out, dtype=torch.bfloat16), drafter)
    assert (out / "target-p.gguf").exists() == (layout == "gguf")
    if engine == "ollama":
        lines = (out / "Modelfile").read_text().splitlines()
        assert lines == ["FROM ./target-p.gguf", "DRAFT ./dflash-p.gguf", "PARAMETER draft_num_predict 3"]
    with pytest.raises(CheckpointError, match="--force"):
        export_drafter(drafter, out, engine, layout=layout, target_folder=target_folder)


def test_our_hint_is_kept_or_its_loss_is_said(drafter: Drafter, target_folder: Path, tmp_path: Path) -> None:
    hinted = random_drafter(drafter.config)
    hinted.draft_vocabulary = torch.tensor([3, 9])
    made = export_drafter(hinted, tmp_path / "a", "vllm")
    assert "draft_vocabulary.json" in made.files
    assert "2 frequent tokens" in made.notes[0]
    assert made.notes[0] in (tmp_path / "a" / "SERVE.md").read_text()
    made = export_drafter(hinted, tmp_path / "b", "llama.cpp", target_folder=target_folder, name="p")
    assert "2 frequent tokens" in made.notes[0]


def test_a_refusal_leaves_nothing(drafter: Drafter, target_folder: Path, tmp_path: Path) -> None:
    mixed = random_drafter(drafter.config, num_layers=2, causal=(True, False), windows=(4, None))
    with pytest.raises(CheckpointError, match="mixes causal"):
        export_drafter(mixed, tmp_path / "x", "llama.cpp", target_folder=target_folder)
    with pytest.raises(CheckpointError, match="name the target with -t"):
        export_drafter(drafter, tmp_path / "x", "ollama")
    other = random_drafter(replace(drafter.config, vocab_size=300))
    with pytest.raises(CheckpointError, match="vocabulary is 300, not 260"):
        export_drafter(other, tmp_path / "x", "ollama", target_folder=target_folder)
    with pytest.raises(CheckpointError, match="gguf layout only"):
        export_drafter(drafter, tmp_path / "x", "vllm", int8=True)
    assert not list(tmp_path.iterdir())
