"""`slipstream train` on a tiny model: a drafter that loads, a run that continues, and refusals."""

from slipstream.cli.app import run
from slipstream.formats import read_zlab
from tests.tiny import save_target

SETTINGS = [
    *("--chats", "6", "--steps", "4", "--documents", "2", "--anchors", "4", "--vocabulary", "0"),
    *("--layers", "1", "--taps", "1", "--block-size", "4", "--evaluate-every", "2", "--save-every", "2"),
    *("--chat.prompt-tokens", "60", "--chat.answer-tokens", "12", "--chat.prompt-temperature", "3"),
    *("--dtype", "float32"),
]


def test_train_makes_a_drafter_and_continues(tmp_path, capsys):
    target = save_target(tmp_path / "target")
    out = tmp_path / "drafter"
    assert run(["train", "-t", str(target), "-o", str(out), *SETTINGS]) == 0
    captured = capsys.readouterr()
    assert "held-out chats" in captured.out
    assert read_zlab(out).config.block_size == 4
    assert (tmp_path / "drafter.work" / "chats.jsonl").exists()
    assert run(["train", "-t", str(target), "-o", str(out), *SETTINGS]) == 1
    assert "--force" in capsys.readouterr().err
    longer = [*SETTINGS, "--force"]
    longer[longer.index("--steps") + 1] = "6"
    assert run(["train", "-t", str(target), "-o", str(out), *longer]) == 0
    assert "continuing at step 4" in capsys.readouterr().err
    # A run that is already complete only writes its drafter again.
    assert run(["train", "-t", str(target), "-o", str(out), *longer]) == 0
    assert "continuing at step 6" in capsys.readouterr().err


def test_train_refuses_too_few_chats(tmp_path, capsys):
    target = save_target(tmp_path / "target")
    assert run(["train", "-t", str(target), "-o", str(tmp_path / "d"), "--chats", "1"]) == 1
    assert "at least 2 chats" in capsys.readouterr().err
