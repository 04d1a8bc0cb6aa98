"""What fits and what does not, with the numbers that are refused."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.model import DraftConfig, Drafter
from slipstream.target import load_target, memory
from slipstream.testing import tiny_target

CPU = torch.device("cpu")
GIB = 1024**3


def test_the_hosts_memory_is_known() -> None:
    free = memory.free_memory(CPU)
    assert free is not None
    assert 2**20 < free < 2**50


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    assert memory._left_in_control_group(tmp_path) == memory._UNLIMITED
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 300\n")
    assert memory._left_in_control_group(tmp_path) == memory._UNLIMITED
    (tmp_path / "memory.max").write_text("5000\n")
    assert memory._left_in_control_group(tmp_path) == 5000 - 1000 + 300


def test_a_plan_is_refused_with_its_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 4 * GIB)
    memory.require({"weights": 3 * GIB}, CPU, "lower it")
    with pytest.raises(InputError) as error:
        memory.require({"weights": 3 * GIB, "nothing": 0, "keys": GIB}, CPU, "lower it")
    said = "4.00 GiB do not fit into the 4.00 GiB that are free on cpu"
    assert str(error.value) == f"{said} (3.00 GiB for weights, 1.00 GiB for keys); lower it"
    monkeypatch.setattr(memory, "free_memory", lambda device: None)
    memory.require({"weights": 10**6 * GIB}, CPU, "lower it")


def test_weights_are_counted_as_they_will_be(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(3, 5), "b": torch.zeros(7, dtype=torch.bfloat16), "c": torch.zeros(4).long()}
    save_file(tensors, tmp_path / "one.safetensors")
    save_file({"d": torch.zeros(2, dtype=torch.float16)}, tmp_path / "two.safetensors", {"format": "pt"})
    assert memory.weight_bytes(tmp_path, torch.bfloat16) == 2 * (15 + 7 + 2) + 8 * 4
    assert memory.weight_bytes(tmp_path, torch.float32) == 4 * (15 + 7 + 2) + 8 * 4


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\0" * 7, struct.pack("<Q", 2**40) + b"{}", struct.pack("<Q", 3) + b"abc"),
        struct.pack("<Q", 14) + b'{"a": {"b":1}}',
        struct.pack("<Q", 7) + json.dumps([1, "b"]).encode()[:7],
    ],
)
def test_damaged_files_are_left_to_the_loader(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert memory.weight_bytes(tmp_path, torch.bfloat16) == 0


def test_a_target_that_does_not_fit_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_target().model.save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "free_memory", lambda device: 1000)
    with pytest.raises(InputError, match="weights of"):
        load_target(str(tmp_path))


def test_rows_that_do_not_fit_are_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    drafter = Drafter(DraftConfig.for_target(target.info, num_layers=2, block_size=6, num_taps=2)).eval()
    engine = Engine(target, DraftProposer(target, drafter), EngineOptions(max_rows=4))
    info, config = target.info, drafter.config
    assert target.token_bytes == info.num_layers * 2 * info.num_kv_heads * info.head_dim * 4
    assert engine.proposer is not None
    assert engine.proposer.token_bytes == config.num_layers * 2 * config.num_kv_heads * config.head_dim * 4
    request = Request((1, 2, 3), SamplingOptions(max_tokens=4))
    engine.generate([request])
    slots = 64 * -(-(info.max_context + 6) // 64)
    room = 4 * slots * (target.token_bytes + engine.proposer.token_bytes)
    monkeypatch.setattr(memory, "free_memory", lambda device: room)
    with pytest.raises(InputError, match=r"4 rows of .* tokens.*lower max_rows or max_context"):
        engine.open()
    engine.generate([request])  # a refusal leaves the engine as it was
    monkeypatch.setattr(memory, "free_memory", lambda device: 2 * room + 2**22)
    engine.open()
