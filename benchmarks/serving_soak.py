"""Does the server's memory stay flat? Thousands of mixed requests against a real process.

Some are left half-way. All are new: other words, seeds, schemas, users. The resident memory of the process is
read after every so many, once nothing decodes. It grows at first, while buffers reach their size and what is
kept of earlier texts fills its bound; what counts is whether it goes on growing.
"""

from __future__ import annotations

import argparse
import json
import random
import threading
import time
from typing import Any

import httpx
import psutil
from serving import server

_WORDS = (
    "river",
    "stone",
    "seven",
    "music",
    "garden",
    "winter",
    "paper",
    "engine",
    "market",
    "letter",
    "window",
    "orange",
    "teacher",
    "signal",
)
_TOOL = {
    "type": "object",
    "properties": {"place": {"type": "string", "maxLength": 12}},
    "required": ["place"],
}


def main() -> None:
    """Print a line per part, and a verdict about the second half."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("--drafter", help="default: the one that fits the target")
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--minutes", type=float, default=0, help="end earlier; 0 sets no limit")
    parser.add_argument("--parts", type=int, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--prefix-tokens", type=int, default=4096)
    options = parser.parse_args()
    words = ["--prefix-tokens", str(options.prefix_tokens), "--queue", "64"]
    words += ["-d", options.drafter] if options.drafter else []
    end = time.monotonic() + options.minutes * 60 if options.minutes else float("inf")
    with server(options.target, options.rows, *words) as (url, pid):
        process, sizes, sent = psutil.Process(pid), [], 0
        print(f"      0 requests: {_megabytes(process):.1f} MB", flush=True)
        counts: dict[str, int] = {}
        while sent < options.requests and time.monotonic() < end:
            part = min(options.requests // options.parts, options.requests - sent)
            _load(url, range(sent, sent + part), options.clients, options.max_tokens, counts)
            sent += part
            _idle(url)
            sizes.append(_megabytes(process))
            metrics = len(httpx.get(f"{url}/metrics").text.splitlines())
            told = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
            more = f"{process.num_threads()} threads, {process.num_fds()} files, {metrics} lines of metrics"
            print(f"{sent:>7} requests: {sizes[-1]:.1f} MB, {more}; {told}", flush=True)
    half = sizes[len(sizes) // 2 :]
    print(json.dumps({"requests": sent, "second_half_growth_mb": round(half[-1] - half[0], 1), "mb": sizes}))


def _load(url: str, numbers: range, clients: int, tokens: int, counts: dict[str, int]) -> None:
    """Send some requests from several clients."""
    waiting, lock = iter(numbers), threading.Lock()

    def client() -> None:
        with httpx.Client(base_url=url, timeout=300) as http:
            while True:
                with lock:
                    number = next(waiting, None)
                if number is None:
                    return
                outcome = _one(http, random.Random(number), tokens)
                with lock:
                    counts[outcome] = counts.get(outcome, 0) + 1

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _one(http: httpx.Client, draw: random.Random, tokens: int) -> str:
    """One request; what became of it."""
    if draw.random() < 0.05:
        broken = draw.choice(['{"messages": [', '{"messages": 7}', "[]", f'{{"field{draw.random()}": 1}}'])
        reply = http.post(
            "/v1/chat/completions", content=broken, headers={"Content-Type": "application/json"}
        )
        return str(reply.status_code)
    path, body = _body(draw, tokens)
    leaves = draw.random() < 0.3
    if not body.get("stream") and not leaves:
        return str(http.post(path, json=body).status_code)
    left = draw.randrange(12) if leaves else None
    with http.stream("POST", path, json=body | {"stream": True}) as reply:
        for number, _ in enumerate(reply.iter_lines()):
            if number == left:
                return "left"
        return str(reply.status_code)


def _body(draw: random.Random, tokens: int) -> tuple[str, dict[str, Any]]:
    """A path and fields, of some kind."""
    text = " ".join(draw.choices(_WORDS, k=draw.randrange(2, 40)))
    body: dict[str, Any] = {
        "max_tokens": draw.randrange(1, tokens + 1),
        "temperature": draw.choice([0, 0.8, 1.2]),
        "seed": draw.randrange(2**40),
        "user": f"user-{draw.random()}",
        "stream": draw.random() < 0.5,
    }
    if draw.random() < 0.2:
        return "/v1/completions", body | {"prompt": text, "logprobs": 2}
    body["messages"] = [{"role": "user", "content": text}]
    name = f"{draw.choice(_WORDS)}_{draw.randrange(10**6)}"
    schema = {
        "type": "object",
        "properties": {name: {"type": "integer", "maximum": draw.randrange(1, 10**5)}},
    }
    extras: tuple[dict[str, Any], ...] = (
        *({}, {}, {"top_k": 20, "top_p": 0.9}, {"n": 2}, {"logprobs": True, "top_logprobs": 3}),
        *({"stop": [draw.choice(_WORDS), "\n"]}, {"frequency_penalty": 0.5}, {"draft": False}),
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
        {"tools": [{"type": "function", "function": {"name": name, "parameters": _TOOL}}]},
    )
    return "/v1/chat/completions", body | draw.choice(extras)


def _idle(url: str) -> None:
    """Wait until nothing decodes."""
    while True:
        health = httpx.get(f"{url}/health").json()
        if not health["running"] and not health["waiting"]:
            return
        time.sleep(0.05)


def _megabytes(process: psutil.Process) -> float:
    return round(process.memory_info().rss / 1e6, 1)


if __name__ == "__main__":
    main()
