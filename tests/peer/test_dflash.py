"""Agreement with the authors' package, dflash 0.1.0: hidden states, tokens and acceptance per round."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Qwen3Config

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.formats import read_zlab, write_zlab
from slipstream.model import DraftConfig, Drafter, decode_masks
from slipstream.target import Target
from slipstream.testing import tiny_target

pytestmark = pytest.mark.peer
pytest.importorskip("dflash", reason="dflash is not installed")

BLOCKS = (2, 5, 8, 16)
TOKENS = 48
# Windows small enough to hide context in every test.
KINDS: dict[str, tuple[tuple[bool, ...], tuple[int | None, ...]]] = {
    "full": ((False, False, False), (None, None, None)),
    "causal": ((True, True, True), (None, None, None)),
    "sliding": ((True, True, True), (6, 6, 6)),
    "bidirectional sliding": ((False, False, False), (6, 6, 6)),
    "mixed": ((True, True, False), (6, 6, None)),
}


@pytest.mark.real
def test_an_export_that_went_through_every_layout_says_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bundled pair: z-lab, speculators, GGUF, and the z-lab export that the authors' package loads."""
    import dflash.model as reference

    from slipstream.api import drafter_path
    from slipstream.core.options import TargetOptions
    from slipstream.formats import read_drafter, write_gguf_drafter, write_speculators
    from slipstream.formats.export import export_drafter
    from slipstream.target import load_target

    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)
    drafter = read_drafter(drafter_path("smollm2"))
    write_speculators(drafter, tmp_path / "s")
    write_gguf_drafter(read_drafter(tmp_path / "s"), tmp_path / "d.gguf")
    export_drafter(read_drafter(tmp_path / "d.gguf"), tmp_path / "out", "vllm")
    theirs = reference.DFlashDraftModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    target = load_target("smollm2", TargetOptions(dtype="float32", pack=False))
    ours = read_drafter(tmp_path / "out", target.info)
    engine = Engine(target, DraftProposer(target, ours), EngineOptions(drafts="max"))
    prompt = target.tokenizer("The three most common colours of")["input_ids"]
    with torch.no_grad():
        stats = reference.dflash_generate(
            theirs, target.model, torch.tensor([prompt]), TOKENS, None, return_stats=True
        )
    request = Request(prompt, SamplingOptions(max_tokens=TOKENS, ignore_eos=True))
    rounds = [len(piece.token_ids) for piece in engine.stream([request])][1:]
    assert list(engine.completions[0].token_ids) == stats.output_ids[0, len(prompt) :].tolist()
    whole = len(rounds) - 4  # they shorten the last blocks
    assert rounds[:whole] == stats.acceptance_lengths[:whole]
    assert sum(rounds) > len(rounds)


def make_target(family: str) -> Target:
    shape: dict[str, Any] = {
        "vocab_size": 4,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "bos_token_id": None,
        "pad_token_id": None,
    }
    return tiny_target((LlamaConfig if family == "llama" else Qwen3Config)(**shape), seed=3, spread=0.25)


def make_pair(target: Target, kind: str, block: int, folder: Path) -> tuple[Drafter, Any]:
    """One random checkpoint, read by us and by them."""
    from dflash.model import DFlashDraftModel

    causal, windows = KINDS[kind]
    base = DraftConfig.for_target(target.info, num_layers=3, block_size=block, num_taps=3)
    torch.manual_seed(block)
    drafter = Drafter(replace(base, causal=causal, windows=windows))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.25)
    write_zlab(drafter, folder, dtype=torch.float32)
    theirs = DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    return read_zlab(folder, target.info), theirs


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("kind", KINDS)
def test_hidden_states_agree(kind: str, block: int, tmp_path: Path) -> None:
    ours, theirs = make_pair(make_target("llama"), kind, block, tmp_path / "d")
    generator = torch.Generator().manual_seed(block)
    length = 21
    features = torch.randn(1, length, ours.config.feature_width, generator=generator)
    x = torch.randn(1, block, ours.config.width, generator=generator)
    with torch.no_grad():
        context = ours.context_kv(features, torch.arange(length)[None])
        masks = decode_masks(ours.config, torch.tensor([length]), length, block)
        mine = ours(x, torch.arange(length, length + block)[None], context, masks)
        reference = theirs(
            position_ids=torch.arange(length + block)[None], noise_embedding=x, target_hidden=features
        )
    assert (mine - reference).abs().max() < 1e-5


@pytest.mark.parametrize("block", [3, 6, 10])
@pytest.mark.parametrize(("family", "kind"), [*(("llama", kind) for kind in KINDS), ("qwen3", "mixed")])
def test_tokens_and_acceptance_agree(
    family: str, kind: str, block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dflash.model as reference

    # Their statistics read a CUDA clock; the counts that we compare do not depend on it.
    monkeypatch.setattr(reference, "_cuda_time", time.perf_counter)

    target = make_target(family)
    ours, theirs = make_pair(target, kind, block, tmp_path / "d")
    engine = Engine(target, DraftProposer(target, ours), EngineOptions(drafts="max"))
    accepted = 0
    for prompt in ([3, 1, 0, 1, 2], [2], [0, 2, 1, 3, 3, 1]):
        with torch.no_grad():
            stats = reference.dflash_generate(
                theirs, target.model, torch.tensor([prompt]), TOKENS, None, return_stats=True
            )
        request = Request(prompt, SamplingOptions(max_tokens=TOKENS, ignore_eos=True))
        rounds = [len(piece.token_ids) for piece in engine.stream([request])][1:]
        assert list(engine.completions[0].token_ids) == stats.output_ids[0, len(prompt) :].tolist()
        # Near the end they shorten the block, which changes what a bidirectional drafter says; we do not.
        whole = 0
        while 1 + sum(rounds[: whole + 1]) + block <= TOKENS:
            whole += 1
        assert rounds[:whole] == stats.acceptance_lengths[:whole]
        accepted += sum(rounds[:whole]) - whole
    assert accepted > 0, "no draft was accepted, so the test would show nothing"
