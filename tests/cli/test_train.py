"""`slipstream synthesize`, `data` and `train` on a tiny model: files that load, runs that go on, and
refusals.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.cli.app import run
from slipstream.formats import read_zlab
from tests.tiny import save_target

WRITING = ["--prompt-tokens", "60", "--answer-tokens", "12", "--prompt-temperature", "3"]
SETTINGS = [
    *("--max-steps", "4", "--documents", "2", "--anchors", "4", "--vocabulary", "0"),
    *("--num-layers", "1", "--taps", "1", "--block-size", "4", "--evaluate-every", "2", "--save-every", "2"),
    *("--dtype", "float32"),
]
MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it is so."}]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(save_target(tmp_path_factory.mktemp("models") / "target"))


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    path.write_text("".join(json.dumps({"messages": MESSAGES}) + "\n" for _ in range(6)))
    return str(path)


def test_chats_are_written_shown_and_trained_on(target, tmp_path, capsys):
    path, out = tmp_path / "made.jsonl", tmp_path / "run"
    assert run(["synthesize", "-t", target, "-n", "6", "-o", str(path), *WRITING, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["chats"] == 6 == len(path.read_text().splitlines())
    assert run(["data", str(path), "-t", target, "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("trained on") == 3
    assert shown.count("⟦") >= 2
    assert run(["train", "-t", target, "--data", str(path), "-o", str(out), *SETTINGS, "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["steps"] == 4
    assert figures["acceptance_length"] >= 1
    assert figures["decoded"] >= 1
    assert figures["workloads"]["chat"] >= 1
    assert read_zlab(out / "drafter").config.block_size == 4
    for name in ("run.json", "metrics.jsonl", "last.pt", "best.pt", "curve.png", "drafter/README.md"):
        assert (out / name).stat().st_size > 0
    assert (out / "curve.png").read_bytes()[:4] == b"\x89PNG"
    card = (out / "drafter" / "README.md").read_text()
    assert "acceptance length" in card
    assert "thinking as the template has it" in card
    assert "| chat |" in card
    record = json.loads((out / "run.json").read_text())
    assert record["options"]["training"]["max_steps"] == 4
    assert record["options"]["training"]["learning_rate"] == 2e-3
    assert "torch" in record["versions"]


def test_without_data_the_target_writes_its_own(target, tmp_path, capsys):
    out = tmp_path / "run"
    writing = [f"--chat.{option[2:]}" if option.startswith("--") else option for option in WRITING]
    command = ["train", "-t", target, "-o", str(out), "--chats", "5", "--workload-prompts", "0"]
    assert run([*command, *SETTINGS, *writing]) == 0
    shown = capsys.readouterr().out
    assert "held-out chats" in shown
    assert "by workload" not in shown
    assert len((out / "chats.jsonl").read_text().splitlines()) == 5


def test_a_run_is_gone_on_with_and_held_to_its_options(target, chats, tmp_path, capsys):
    command = ["train", "-t", target, "--data", chats, "-o", str(tmp_path / "run"), *SETTINGS]
    assert run(command) == 0
    capsys.readouterr()
    assert run(command) == 1
    assert "--resume goes on with it" in capsys.readouterr().err
    longer = [*command, "--resume"]
    longer[longer.index("--max-steps") + 1] = "6"
    assert run(longer) == 0
    captured = capsys.readouterr()
    assert "continuing at step 4" in captured.err
    assert "6 steps" in captured.out
    # A run that is already complete only writes its drafter again.
    assert run(longer) == 0
    assert "continuing at step 6" in capsys.readouterr().err
    other = [*longer]
    other[other.index("--anchors") + 1] = "5"
    assert run(other) == 1
    assert "was begun with anchors 4, not 5" in capsys.readouterr().err
    assert run([*command, "--force"]) == 0
    assert "continuing" not in capsys.readouterr().err


def test_an_existing_drafter_is_trained_on(target, chats, tmp_path, capsys):
    first, second = tmp_path / "first", tmp_path / "second"
    assert run(["train", "-t", target, "--data", chats, "-o", str(first), *SETTINGS]) == 0
    options = [*SETTINGS, "--from", str(first / "drafter")]
    options[options.index("--block-size") + 1] = "6"
    assert run(["train", "-t", target, "--data", chats, "-o", str(second), *options]) == 0
    assert read_zlab(second / "drafter").config.block_size == 6
    assert "Started from" in (second / "drafter" / "README.md").read_text()
    record = json.loads((second / "run.json").read_text())
    assert record["options"]["training"]["learning_rate"] == 3e-4


def test_live_features_leave_no_file_and_a_tracker_may_follow(target, chats, tmp_path):
    out = tmp_path / "run"
    options = [*SETTINGS, "--features", "live", "--tracker", "tensorboard"]
    assert run(["train", "-t", target, "--data", chats, "-o", str(out), *options]) == 0
    assert not (out / "features").exists()
    assert list(out.rglob("events.out.tfevents*"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "holds no chat with an answer"),
        (json.dumps({"messages": MESSAGES[:1]}) + "\n", "holds no chat with an answer"),
        (json.dumps({"token_ids": [1, 2, 3], "answers": [[2, 3]]}) + "\n", "nothing to train on"),
        (json.dumps({"token_ids": [1, 999, 3], "answers": [[1, 3]]}) + "\n", "outside the vocabulary"),
        ("{\n", "line 1"),
    ],
)
def test_data_that_nothing_can_be_learnt_from_is_refused(target, tmp_path, capsys, lines, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(lines)
    assert run(["train", "-t", target, "--data", str(path), "-o", str(tmp_path / "run"), *SETTINGS]) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("slipstream: ")
    assert words in error


def test_wrong_usage_is_refused(target, tmp_path, capsys):
    out = str(tmp_path / "x.jsonl")
    for arguments, words in (
        (["synthesize", "-t", target, "-o", out], "how many chats"),
        (["synthesize", "-t", target, "-o", out, "-n", "2", "--keep-answers"], "needs --prompts"),
        (["synthesize", "-t", target, "-o", out, "-n", "2", "--endpoint", "http://127.0.0.1:9"], "no OpenAI"),
        (["train", "-t", target, "-o", out, "--minutes", "1", "--epochs", "1"], "give one of them"),
        (["train", "-t", target, "-o", out, "--learning-rate", "0"], "learning_rate must be above 0"),
        (["train", "-t", target, "-o", out, "--from", str(tmp_path / "none")], "none"),
    ):
        assert run(arguments) != 0
        assert words in capsys.readouterr().err


def test_accelerate_starts_a_run_with_split_weights(target, chats, tmp_path):
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--use_fsdp"]
    launch += ["--fsdp_version", "2", "--main_process_port", "0", "-m", "slipstream", "train", "-t", target]
    launch += ["--data", chats, "-o", str(tmp_path / "run"), *SETTINGS, "--json"]
    done = subprocess.run(launch, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    figures = json.loads(done.stdout)  # of one process only
    assert figures["steps"] == 4
    assert figures["decoded"] >= 1
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4
    assert read_zlab(Path(figures["drafter"])).config.block_size == 4
