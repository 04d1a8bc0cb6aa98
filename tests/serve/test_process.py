"""The command itself, in a process of its own: it starts, serves, and stops when it is told to."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading

import httpx
import pytest

from tests.serve.conftest import running  # noqa: F401  (skips this file where the extra is missing)

BODY = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 400,
    "ignore_eos": True,
    "stream": True,
}


@pytest.fixture
def process(folders):
    target, drafter = folders
    words = ["serve", "-t", str(target), "-d", str(drafter), "--port", "0", "--max-rows", "2"]
    command = [sys.executable, "-m", "slipstream", *words, "--dtype", "float32", "--grace", "20"]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ
    )
    lines: list[str] = []
    for line in process.stderr:
        lines.append(line)
        if found := re.search(r"(http://\S+)/v1", line):
            break
    else:
        pytest.fail("".join(lines))
    yield process, found[1]
    process.kill()
    process.communicate()


@pytest.mark.parametrize("sig", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_under_load_once_its_streams_have_ended(process, sig):
    process, url = process
    ends: list[str] = []
    begun = threading.Semaphore(0)

    def one():
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=BODY, timeout=60) as response:
            lines = response.iter_lines()
            said = [next(lines) for _ in range(4)]
            begun.release()
            said += [line for line in lines if line]
        assert said[-1] == "data: [DONE]"
        ends.append(json.loads(said[-2].removeprefix("data: "))["choices"][0]["finish_reason"])

    threads = [threading.Thread(target=one) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in threads:
        assert begun.acquire(timeout=60)
    process.send_signal(sig)
    for thread in threads:
        thread.join(timeout=60)
    assert ends == ["length", "length"]
    rest = process.communicate(timeout=60)[1]
    assert process.returncode == 0, rest
    entries = [json.loads(line) for line in rest.splitlines()]
    assert [entry["status"] for entry in entries if entry["event"] == "request"] == [200, 200]


def test_a_taken_port_is_one_sentence(process, folders):
    _, url = process
    words = [
        "-m",
        "slipstream",
        "serve",
        "-t",
        str(folders[0]),
        "--no-draft",
        "--port",
        url.rsplit(":", 1)[1],
    ]
    run = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "slipstream: cannot listen on 127.0.0.1" in run.stderr
