"""The commands end to end, on a tiny model: what goes to stdout, what to stderr, and the exit status."""

import json
import subprocess
import sys

import pytest

from slipstream.cli.app import run
from tests.tiny import save_drafter, save_target

FIELDS = [
    "text",
    "token_ids",
    "prompt_tokens",
    "completion_tokens",
    "finish_reason",
    "rounds",
    "acceptance_length",
    "accepted_per_position",
    "drafts_mean",
    "parked",
    "cached_tokens",
    "ttft_s",
    "decode_s",
    "tokens_per_s",
    "exact",
]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target = save_target(tmp_path_factory.mktemp("target"))
    drafter = save_drafter(tmp_path_factory.mktemp("drafter") / "d", target)
    return ["-t", str(target), "-d", str(drafter), "--dtype", "float32", "--max-tokens", "10", "--ignore-eos"]


def call(capsys, *words):
    status = run([str(word) for word in words])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_generate_prints_the_text_alone(capsys, models):
    status, out, err = call(capsys, "generate", "hi", *models)
    assert status == 0
    _, document, _ = call(capsys, "generate", "hi", *models, "--json")
    assert out == json.loads(document)["text"] + "\n"
    assert "10 tokens" in err


def test_flags_are_read_alike_where_pydantic_is_loaded(capsys, models):
    """The parser of the command line then checks types with it, as it does within a server."""
    pytest.importorskip("pydantic")
    status, out, _ = call(capsys, "generate", "hi", *models, "--json", "--logit-bias", "42:100")
    assert status == 0
    assert 42 in json.loads(out)["token_ids"]


def test_generate_json_has_every_field(capsys, models):
    status, out, _ = call(capsys, "generate", "hi", *models, "--json")
    document = json.loads(out)
    assert status == 0
    assert list(document) == FIELDS
    assert document["completion_tokens"] == 10
    assert document["exact"] is True
    assert document["finish_reason"] == "length"
    assert len(document["accepted_per_position"]) == 3
    _, out, _ = call(capsys, "generate", "hi", *models, "--json", "--block-size", "3")
    assert len(json.loads(out)["accepted_per_position"]) == 2


def test_no_draft_gives_the_same_ids(capsys, models):
    _, drafted, _ = call(capsys, "generate", "hi", *models, "--json", "--temperature", "0.9")
    _, plain, _ = call(capsys, "generate", "hi", *models, "--json", "--temperature", "0.9", "--no-draft")
    assert json.loads(drafted)["token_ids"] == json.loads(plain)["token_ids"]
    assert json.loads(plain)["acceptance_length"] == 1.0


def test_raw_and_logit_bias(capsys, models):
    _, out, _ = call(capsys, "generate", "hi", *models, "--raw", "--json", "--logit-bias", "65:1000")
    document = json.loads(out)
    assert document["prompt_tokens"] == 2
    assert document["token_ids"] == [65] * 10


def test_demo_json(capsys, models):
    status, out, _ = call(capsys, "demo", "one", "two", *models, "--json")
    document = json.loads(out)
    assert status == 0
    assert list(document) == ["plain", "drafted", "speedup", "identical", "ties"]
    assert document["identical"] is True
    assert document["speedup"] > 0
    assert len(document["plain"]["completions"]) == 2


def test_demo_shows_both_ways_and_a_table(capsys, models):
    status, out, _ = call(capsys, "demo", "one", *models)
    assert status == 0
    for words in ("--- plain ---", "--- drafted ---", "tokens/s", "speed-up:", "same text: yes"):
        assert words in out
    assert "\x1b" not in out, "no escape codes where stdout is no terminal"


def test_demo_needs_a_drafter(capsys, models):
    status, out, err = call(capsys, "demo", *models[:2])
    assert (status, out) == (1, "")
    assert "no drafter is bundled" in err


def test_check_reports(capsys, models):
    status, out, _ = call(capsys, "check", "one", *models, "--temperature", "0.8")
    assert status == 0
    assert out
    status, out, _ = call(capsys, "check", "one", *models, "--json")
    assert status == 0
    assert json.loads(out)


def test_chat_keeps_the_conversation(capsys, models, monkeypatch):
    lines = iter(["hi", "again", "/reset", "", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt="": next(lines))
    status, out, err = call(capsys, "chat", *models)
    assert status == 0
    assert err.count("10 tokens") == 2
    assert "a new conversation" in err
    assert out.endswith("\n")


def test_chat_ends_with_its_input(capsys, models, monkeypatch):
    def no_more(prompt=""):
        raise EOFError

    monkeypatch.setattr("builtins.input", no_more)
    assert call(capsys, "chat", *models)[0] == 0


def test_config_file_and_its_unknown_keys(capsys, models, tmp_path):
    good = tmp_path / "good.toml"
    good.write_text("[generate]\nmax_tokens = 4\nignore_eos = true\n")
    words = ["generate", "hi", *models[:6], "--json", "--config", good]
    assert json.loads(call(capsys, *words)[1])["completion_tokens"] == 4
    assert json.loads(call(capsys, *words, "--max-tokens", "3")[1])["completion_tokens"] == 3
    bad = tmp_path / "bad.toml"
    bad.write_text("[generate]\ntemprature = 1.0\n")
    status, _, err = call(capsys, "generate", "hi", "--config", bad)
    assert status == 2
    assert "temprature" in err
    assert "--temperature" in err


@pytest.mark.parametrize(
    ("words", "status", "hint"),
    [
        (["generate", "hi", "--temprature", "1"], 2, "Did you mean --temperature?"),
        (["generate"], 2, "PROMPT"),
        (["generat", "hi"], 2, '"generate"'),
        (["generate", "hi", "--acceptor", "maybe"], 2, "match"),
        (["generate", "hi", "--temperature", "-1"], 1, "temperature must be at least 0"),
        (["generate", "hi", "--logit-bias", "x"], 1, "ID:VALUE"),
        (["generate", "hi", "-t", "./nowhere"], 1, "nowhere"),
        (["generate", "hi", "--config", "nowhere.toml"], 1, "does not exist"),
    ],
)
def test_errors_are_one_line(capsys, words, status, hint):
    got, out, err = call(capsys, *words)
    assert (got, out) == (status, "")
    assert hint in err
    assert err.count("\n") == 1
    assert "Traceback" not in err


def test_debug_shows_the_trace(capsys):
    _, _, err = call(capsys, "generate", "hi", "-t", "./nowhere", "--debug")
    assert "Traceback" in err


def test_ctrl_c_is_one_line(capsys, monkeypatch):
    def interrupt(*_args, **_kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("slipstream.cli.generate.open_session", interrupt)
    assert call(capsys, "generate", "hi") == (130, "", "slipstream: interrupted\n")


def test_a_reader_that_leaves_is_no_error(models):
    words = [sys.executable, "-m", "slipstream", "generate", "hi", *models, "--json"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait() == 141
    assert "Traceback" not in err
    assert "Exception ignored" not in err
