"""The compiled kernels against float64 loops, transformers' modules and the drafter's own, and bit by bit."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions, TargetOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.drafting import NativeDrafter, TorchDrafter, at_work
from slipstream.model import DraftConfig, Drafter
from slipstream.native import Kernels, build, native_product
from slipstream.target import Target, load_target, target_from_model

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
#: How far a pass may be from PyTorch's, as a share: rounding, and what layers make of it.
NEAR = {torch.bfloat16: 0.03, torch.float32: 1e-5}
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, layer_types=MIXED),
    "qwen3": Qwen3Config(**SIZES),
    "mistral": MistralConfig(**SIZES, sliding_window=6),
    "wide heads": LlamaConfig(**SIZES | {"head_dim": 96, "num_attention_heads": 2}),
}


@pytest.fixture
def threads() -> Iterator[None]:
    """Puts the number of threads back."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(family: str, dtype: torch.dtype, kernels: Kernels | None, spread: float = 0.15) -> Target:
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(FAMILIES[family])
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=spread)
    return target_from_model(model.to(dtype).eval(), None, family, kernels)


def test_a_product_is_that_of_float64_and_does_not_depend_on_its_company(
    kernels: Kernels, threads: None
) -> None:
    torch.manual_seed(0)
    for outs, width in ((37, 32), (160, 96), (16, 576), (3, 1536)):
        weight_VD = torch.randn(outs, width).to(kernels.dtype)
        x_ND = torch.randn(23, width).to(kernels.dtype)
        whole = native_product(kernels, weight_VD, x_ND)
        exact = x_ND.double() @ weight_VD.double().T
        assert (whole - exact).abs().max() < 1e-5 * width
        for tokens in range(1, 20):
            torch.set_num_threads(1 + tokens % 3)
            start = 23 - tokens
            assert torch.equal(native_product(kernels, weight_VD, x_ND[start:]), whole[start:])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("tokens", [1, 6])
def test_a_pass_is_that_of_the_modules(kernels: Kernels, family: str, rows: int, tokens: int) -> None:
    torch.manual_seed(rows)
    length_B, ids_BL = torch.randint(3, 12, (rows,)), torch.randint(3, 97, (rows, 12))
    ids_BT = torch.randint(3, 97, (rows, tokens))
    found = []
    for target in (make(family, kernels.dtype, kernels), make(family, kernels.dtype, None)):
        target.set_taps((0, 2))
        cache = target.new_cache(rows, 30)
        filled = target.prefill(ids_BL, length_B, cache, chunk=5)
        done = target.verify(ids_BT, length_B, cache, 26)
        real = [filled.features_BLE[row, :length] for row, length in enumerate(length_B.tolist())]
        found.append((filled.logits_BV, done.logits_BTV, done.features_BTE, *real))
        assert (target.kernels is not None) == (len(found) == 1)
    for mine, theirs in zip(*found, strict=True):
        assert (mine.float() - theirs.float()).norm() < NEAR[kernels.dtype] * theirs.float().norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_long_context_is_seen_as_the_modules_see_it(kernels: Kernels, family: str) -> None:
    """Longer than what is mixed in one piece; with windows that begin behind the first pieces."""
    ids_BL, block_BT = torch.randint(3, 97, (2, 300)), torch.randint(3, 97, (2, 7))
    length_B = torch.tensor([300, 141])
    found = []
    for target in (make(family, kernels.dtype, kernels), make(family, kernels.dtype, None)):
        cache = target.new_cache(2, 320)
        target.prefill(ids_BL, length_B, cache, chunk=60)
        whole = target.verify(block_BT, length_B, cache, 320).logits_BTV
        found.append(whole)
        if target.kernels is not None:
            steps = [
                target.verify(block_BT[:, t : t + 1], length_B + t, cache, 320).logits_BTV for t in range(7)
            ]
            assert torch.equal(torch.cat(steps, 1), whole)
    assert (found[0] - found[1]).norm() < NEAR[kernels.dtype] * found[1].norm()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_block_gives_the_bits_of_single_steps(kernels: Kernels, family: str, threads: None) -> None:
    target = make(family, kernels.dtype, kernels)
    target.set_taps((1, 2))
    ids_BL = torch.randint(3, 97, (1, 21))
    whole: list[Tensor] = []
    for size, count in ((21, 1), (1, 2), (4, 1), (7, 2)):
        torch.set_num_threads(count)
        cache = target.new_cache(1, 40)
        parts = [
            target.verify(part_BT, torch.tensor([start]), cache, max(start + part_BT.shape[1], size))
            for start, part_BT in zip(range(0, 21, size), ids_BL.split(size, 1), strict=True)
        ]
        logits, features = (
            torch.cat([getattr(part, name) for part in parts], 1) for name in ("logits_BTV", "features_BTE")
        )
        whole = whole or [logits, features]
        assert torch.equal(logits, whole[0])
        assert torch.equal(features, whole[1])
    three = target.new_cache(3, 48)
    others = torch.randint(3, 97, (3, 21))
    others[1] = ids_BL[0]
    in_company = target.verify(others, torch.zeros(3, dtype=torch.int64), three, 48)
    assert torch.equal(in_company.logits_BTV[1:2], whole[0])


def drafter_of(target: Target, **changes: Any) -> Drafter:
    torch.manual_seed(3)
    config = DraftConfig.for_target(target.info, num_layers=2, block_size=6, num_taps=2, **changes)
    drafter = Drafter(config).eval()
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.15)
    return drafter.to(target.dtype)


@pytest.mark.parametrize("kind", [(None, False), (4, False), (None, True), (9, True)])
def test_a_draft_is_that_of_the_module(kernels: Kernels, kind: tuple[int | None, bool]) -> None:
    drafter = drafter_of(make("llama", kernels.dtype, kernels))
    window, causal = kind
    drafter.config = replace(drafter.config, windows=(window, None), causal=(causal, False))
    native, module = at_work(drafter, kernels), at_work(drafter, None)
    assert isinstance(native, NativeDrafter)
    assert isinstance(module, TorchDrafter)
    torch.manual_seed(0)
    length_B, width = torch.tensor([11, 3, 7]), drafter.config.feature_width
    features_BLE = torch.randn(3, 12, width).to(kernels.dtype)
    x_BTD = torch.randn(3, 6, drafter.config.width).to(kernels.dtype)
    later_BTE = torch.randn(3, 2, width).to(kernels.dtype)
    found = []
    for work in (native, module):
        work.begin(3, 64)
        position_BL = torch.arange(12).expand(3, -1)
        for row_B in (torch.tensor([2, 0]), torch.tensor([1])):
            work.context.aim(position_BL[row_B], 12, row_B)
            work.write(features_BLE[row_B], position_BL[row_B])
        steps = []
        for start_B in (length_B, length_B + 2):
            position_BT = start_B[:, None] + torch.arange(6)
            steps.append(work.hidden(x_BTD, position_BT, start_B, 24))
            some_B = torch.tensor([2, 0])
            few = work.hidden(x_BTD[some_B], position_BT[some_B], start_B[some_B], 24, some_B)
            if work is native:
                assert torch.equal(few, steps[-1][some_B])
            assert (few - steps[-1][some_B]).float().norm() < 0.01 * few.float().norm()
            work.context.aim(position_BT[:, :2], 24)
            work.write(later_BTE, position_BT[:, :2])
        found.append(torch.stack(steps))
    assert (found[0].float() - found[1].float()).norm() < NEAR[kernels.dtype] * found[1].float().norm()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafted_texts_are_plain_ones_to_the_last_token(kernels: Kernels, temperature: float) -> None:
    """In bf16, where passes of other shapes would part at ties."""
    target = make("llama", kernels.dtype, kernels, spread=0.05)
    drafter = drafter_of(target)
    torch.manual_seed(5)
    requests = [
        Request(
            tuple(torch.randint(3, 131, (length,)).tolist()),
            SamplingOptions(max_tokens=60, temperature=temperature, seed=length, ignore_eos=True),
        )
        for length in (1, 5, 9, 14)
    ]
    alone = [Engine(target).generate([request])[0].token_ids for request in requests]
    drafted = Engine(target, DraftProposer(target, drafter), EngineOptions(max_rows=3, prefill_chunk=16))
    assert [done.token_ids for done in drafted.generate(requests)] == alone
    drafter.draft_vocabulary = torch.arange(0, 131, 3)
    few = Engine(target, DraftProposer(target, drafter), EngineOptions(drafts="max"))
    assert [done.token_ids for done in few.generate(requests)] == alone


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("drafted", [False, True])
def test_no_text_depends_on_its_company(kernels: Kernels, seed: int, drafted: bool) -> None:
    """In bf16 and to the last token, prompts too long for one pass of the kernels included."""
    draw = random.Random(seed)
    target = make("llama", kernels.dtype, kernels, spread=0.05)
    proposer = DraftProposer(target, drafter_of(target)) if drafted else None
    rows = Engine(target, proposer, EngineOptions(max_rows=4, prefill_chunk=90)).open()
    asked: dict[int, Request] = {}
    while rows.busy or len(asked) < 12:
        while len(asked) < 12 and (draw.random() < 0.3 or not rows.busy):
            prompt = tuple(draw.randrange(3, 131) for _ in range(draw.choice([3, 20, 20, 70, 130])))
            sampling = SamplingOptions(
                max_tokens=draw.choice([2, 25]), temperature=draw.choice([0.0, 0.9]), ignore_eos=True
            )
            request = Request(prompt, sampling)
            asked[rows.submit(request)] = request
        rows.step()
    alone = Engine(target, None, EngineOptions(prefill_chunk=90))
    for number, request in asked.items():
        assert rows.completions[number].token_ids == alone.generate([request])[0].token_ids


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_cannot_be_compiled_is_said_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    def needs(*features: str) -> None:
        processor = replace(build._PROCESSORS[dtype], needs=frozenset(features))
        monkeypatch.setitem(build._PROCESSORS, dtype, processor)

    needs("fma", "avx9")
    with pytest.raises(InputError, match="the CPU kernels need avx9"):
        build.load_kernels.__wrapped__(dtype)
    needs()
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(InputError, match=r"no C\+\+ compiler"):
        build.load_kernels.__wrapped__(dtype)


def test_kernels_that_are_asked_for_and_cannot_serve_are_refused() -> None:
    with pytest.raises(InputError, match="for bfloat16 and float32"):
        load_target("smollm2", TargetOptions(dtype="float16", kernels="native"))
