"""`slipstream bench` on a tiny model, from flags to the summary."""

import json

from slipstream.cli.app import run
from slipstream.cli.bench import _command
from tests.tiny import save_drafter, save_target


def test_bench_then_report(tmp_path, capsys):
    target = save_target(tmp_path / "target")
    drafters = [save_drafter(tmp_path / name, target) for name in ("one", "two")]
    prompts, out = tmp_path / "mine.jsonl", tmp_path / "out.jsonl"
    prompts.write_text('{"prompt": "hello there"}\n{"prompt": "and again"}\n')
    words = ["bench", "-t", target, "-d", drafters[0], "-d", drafters[1], "--workload", prompts, "-o", out]
    words += ["--dtype", "float32", "--max-tokens", "9", "--systems", "plain,drafted", "--concurrency", "1,2"]
    words = [str(word) for word in words]
    assert run([*words, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [side["name"] for side in document["sides"]] == ["plain", "drafted:one", "drafted:two"]
    assert {row["workload"] for row in document["rows"]} == {"mine"}
    assert [curve["system"] for curve in document["curves"]] == ["plain", "drafted:one", "drafted:two"]
    assert run(words) == 0
    captured = capsys.readouterr()
    assert "holds 18 requests already" in captured.err
    assert "drafted:two" in captured.out
    assert run(["report", str(out)]) == 0
    assert run([*words, "--url", "http://127.0.0.1:9"]) == 1
    assert "no OpenAI-compatible server" in capsys.readouterr().err


def test_a_key_is_not_written_down():
    line = _command(["bench", "--api-key", "hush", "-t", "a b"], "hush")
    assert line == "slipstream bench --api-key ... -t 'a b'"
    assert _command(["--api-key=hush"], "hush") == "slipstream --api-key=..."
