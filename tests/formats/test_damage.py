"""Two hundred damaged checkpoints: each is refused with one sentence, none is read, none crashes."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.core.errors import SlipstreamError
from slipstream.formats import read_drafter, write_gguf_drafter, write_speculators, write_zlab
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from tests.formats.conftest import random_drafter

Damage = Callable[[Path, random.Random], None]
ODD: tuple[Any, ...] = (
    "4",
    -1,
    0,
    None,
    True,
    2.5,
    [],
    [1, "x"],
    {},
    10**9,
    10**400,
    float("nan"),
    float("inf"),
    [[1], [2]],
)
#: Keys that every configuration needs.
NEEDED = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
)


def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def cut_short(folder: Path, rng: random.Random) -> None:
    data = weights(folder).read_bytes()
    weights(folder).write_bytes(data[: rng.randrange(len(data))])


def flip_header(folder: Path, rng: random.Random) -> None:
    """One bit of the safetensors header, where it says something about a tensor."""
    data = bytearray(weights(folder).read_bytes())
    size = struct.unpack("<Q", data[:8])[0]
    header = data[8 : 8 + size]
    start = header.index(b'"fc.weight"')
    place = 8 + rng.randrange(start, len(header.rstrip()))
    data[place] ^= 1 << rng.randrange(7)
    weights(folder).write_bytes(data)


def flip_length(folder: Path, rng: random.Random) -> None:
    data = bytearray(weights(folder).read_bytes())
    data[rng.randrange(8)] ^= 1 << rng.randrange(8)
    weights(folder).write_bytes(data)


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(weights(folder))
    change(tensors)
    save_file(tensors, weights(folder))


def drop_tensor(folder: Path, rng: random.Random) -> None:
    change_tensors(folder, lambda tensors: tensors.pop(rng.choice(sorted(tensors))))


def rename_tensor(folder: Path, rng: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = rng.choice(sorted(tensors))
        tensors["model." + name] = tensors.pop(name)

    change_tensors(folder, change)


def reshape_tensor(folder: Path, rng: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        name = rng.choice(sorted(tensors))
        tensors[name] = tensors[name].reshape(-1)[:-1].clone()

    change_tensors(folder, change)


def spoil_tensor(folder: Path, rng: random.Random) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[rng.choice(sorted(tensors))].view(-1)[0] = rng.choice((float("nan"), float("inf")))

    change_tensors(folder, change)


def change_config(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def shape_of(raw: dict[str, Any]) -> dict[str, Any]:
    return raw.get("transformer_layer_config", raw)


def wrong_type(folder: Path, rng: random.Random) -> None:
    key, value = rng.choice(NEEDED), rng.choice(ODD)
    change_config(folder, lambda raw: shape_of(raw).update({key: value}))


def drop_key(folder: Path, rng: random.Random) -> None:
    key = rng.choice([key for key in NEEDED if key != "head_dim"])
    change_config(folder, lambda raw: shape_of(raw).pop(key))


def unknown_key(folder: Path, rng: random.Random) -> None:
    change_config(folder, lambda raw: shape_of(raw).update({f"scale_{rng.randrange(99)}": 2}))


def odd_flags(folder: Path, rng: random.Random) -> None:
    key, value = rng.choice(
        (
            ("layer_types", "full_attention"),
            ("layer_types", [["full_attention"], {}]),
            ("is_causal", [True]),
            ("is_causal", "false"),
            ("rope_parameters", [1]),
            ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
            ("rope_parameters", {"rope_theta": "ten"}),
            ("rms_norm_eps", {}),
            ("max_position_embeddings", "8k"),
        )
    )
    change_config(folder, lambda raw: shape_of(raw).update({key: value}))


def broken_json(folder: Path, rng: random.Random) -> None:
    path = folder / "config.json"
    data = path.read_bytes()
    choice = rng.choice((data[: rng.randrange(1, len(data) - 2)], b"\xff\xfe" + data, b"[" * 100_000, b"7"))
    path.write_bytes(choice)


def drop_file(folder: Path, rng: random.Random) -> None:
    (folder / rng.choice(("config.json", "model.safetensors"))).unlink()


FOLDER = (
    cut_short,
    flip_header,
    flip_length,
    drop_tensor,
    rename_tensor,
    reshape_tensor,
    spoil_tensor,
    wrong_type,
    drop_key,
    unknown_key,
    odd_flags,
    broken_json,
    drop_file,
)


def gguf_cut(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: rng.randrange(len(data) - 64)])


def gguf_flip(path: Path, rng: random.Random) -> None:
    """One bit of magic, version and counts, of a name of ours, or of what is said about the tensors."""
    data = bytearray(path.read_bytes())
    names = [
        data.index(name) for name in (b"dflash.block_count", b"dflash.target_layers", b"slipstream.vocab")
    ]
    first = data.index(b"fc.weight")
    places = [*range(24), *(start + i for start in names for i in range(12)), *range(first, first + 400)]
    data[rng.choice(places)] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def gguf_other(path: Path, rng: random.Random) -> None:
    data = path.read_bytes()
    path.write_bytes(data.replace(b"dflash", rng.choice((b"eagle3", b"llama4", b"qwen35")), 1))


GGUF = (gguf_cut, gguf_flip, gguf_flip, gguf_other)
EACH = 7


@pytest.fixture(scope="module")
def good(target: Target, config: DraftConfig, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("good")
    drafter = random_drafter(config)
    write_zlab(drafter, folder / "zlab")
    write_speculators(drafter, folder / "speculators")
    write_gguf_drafter(drafter, folder / "d.gguf")
    return folder


def cases() -> list[tuple[str, Damage, int]]:
    folders = [
        (kind, damage, seed) for kind in ("zlab", "speculators") for damage in FOLDER for seed in range(EACH)
    ]
    return folders + [("d.gguf", damage, seed) for damage in GGUF for seed in range(EACH)]


def test_two_hundred_damaged_checkpoints_are_refused(
    good: Path, target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shutil

    def run(*_: Any) -> None:
        raise AssertionError("a damaged checkpoint was run")

    assert len(cases()) >= 200
    monkeypatch.setattr(Drafter, "forward", run)
    wrong = []
    for number, (kind, damage, seed) in enumerate(cases()):
        place = tmp_path / f"{number}-{kind}"
        (shutil.copytree if (good / kind).is_dir() else shutil.copy)(good / kind, place)
        damage(place, random.Random(f"{damage.__name__} {seed} {number}"))
        name = f"{kind}, {damage.__name__}, {seed}"
        try:
            read_drafter(place, target.info)
            wrong.append(f"{name}: was read")
        except SlipstreamError as error:
            if not 10 < len(str(error)) < 600 or "\n" in str(error):
                wrong.append(f"{name}: says {error}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
    assert not wrong, "\n".join(wrong)


def test_the_undamaged_ones_are_read(good: Path, target: Target) -> None:
    for kind in ("zlab", "speculators", "d.gguf"):
        read_drafter(good / kind, target.info)
