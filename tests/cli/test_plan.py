"""`slipstream plan` from a config alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slipstream.cli.app import run

CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
}


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def call(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = run(["plan", *words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_document(capsys: pytest.CaptureFixture[str], target: str) -> None:
    words = ("--gpu", "H200", "--acceptance-length", "6.5", "--concurrency", "1,8", "--json")
    status, out, _ = call(capsys, "-t", target, *words)
    found = json.loads(out)
    assert status == 0
    assert [row["concurrency"] for row in found["rows"]] == [1, 8]
    row = found["rows"][0]
    assert row["speedup"] == pytest.approx(row["drafted_tokens_per_s"] / row["plain_tokens_per_s"])
    assert row["round_ms"] == pytest.approx(
        row["draft_ms"] + row["verify_ms"] + found["setting"]["overhead_s"] * 1e3
    )
    # 16.4 GB of weights and 2.1 of a drafter, in bf16.
    assert 17 < row["memory_gib"] < 18
    assert found["acceptance_length"] == pytest.approx(6.5)
    assert found["verdict"].startswith(f"{row['speedup']:.1f}x faster on H200")


def test_the_table_and_its_verdict(capsys: pytest.CaptureFixture[str], target: str) -> None:
    status, out, _ = call(capsys, "-t", target, "--acceptance-length", "1.05", "--gpu", "l4")
    assert status == 0
    assert (
        out.startswith("Drafting does not pay on L4 with 1 at once") or "does not fit" in out.splitlines()[0]
    )
    assert "16" in out


def test_profiles_from_a_list_and_from_a_run(
    capsys: pytest.CaptureFixture[str], target: str, tmp_path: Path
) -> None:
    shares = call(capsys, "-t", target, "--acceptance-profile", "0.8,0.5", "--json")[1]
    file = tmp_path / "run.json"
    file.write_text(json.dumps({"rounds": 10, "accepted_per_position": [8, 4]}))
    counted = call(capsys, "-t", target, "--acceptance-profile", str(file), "--json")[1]
    assert json.loads(shares) == json.loads(counted)
    assert json.loads(shares)["acceptance_length"] == pytest.approx(1 + 0.8 + 0.4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say how far drafts are kept"),
        (("--acceptance-length", "3", "--acceptance-profile", "0.5"), "say how far drafts are kept"),
        (("--acceptance-length", "17"), "acceptance length from 1 to 16"),
        (("--acceptance-length", "3", "--gpu", "B20"), "did you mean B200"),
        (("--acceptance-length", "3", "--concurrency", "a"), "--concurrency takes numbers"),
        (("--acceptance-length", "3", "--concurrency", "0"), "concurrency must be at least 1"),
        (("--acceptance-length", "3", "--drafter-layers", "0"), "at least one layer"),
        (("--acceptance-profile", "1.5"), "shares from 0 to 1"),
        (("--acceptance-profile", "nothing.json"), "neither a file nor a list"),
        (("--acceptance-profile", ",".join(["0.5"] * 16)), "holds 15 drafts"),
        (("--acceptance-length", "3", "--tp", "2", "--gpu", "L4"), "not joined"),
    ],
)
def test_bad_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], target: str, words: tuple[str, ...], message: str
) -> None:
    status, out, err = call(capsys, "-t", target, *words)
    assert status == 1
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_a_config_that_is_none(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    for name, message in ((str(tmp_path), "no readable JSON"), ("./nowhere", "no config at")):
        status, _, err = call(capsys, "-t", name, "--acceptance-length", "3")
        assert status == 1
        assert message in err
