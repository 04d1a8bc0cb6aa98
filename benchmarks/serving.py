"""The server under 1, 4 and 16 clients: tokens per second and time to the first token, drafted beside plain.

One server; every request says whether it wants drafts, and passes of both kinds take turns, the other one
first each time. Closed load: a client asks again as soon as it has its answer. Times are the clients' own,
over HTTP, with streaming. Ratios are of neighbouring passes.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

PROMPTS = Path(__file__).with_name("held_out_smollm2.jsonl")


@dataclass(frozen=True)
class Answered:
    """One request as its client saw it.

    Attributes:
        first: seconds to the first text.
        whole: seconds to the end.
        tokens: said.
        text: of the answer.
    """

    first: float
    whole: float
    tokens: int
    text: str


def main() -> None:
    """Print a table, and with --json one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--requests", type=int, default=2, help="of each client and pass")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="one request of 48 tokens, two passes")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.requests, options.max_tokens, options.passes = 1, 48, 2
    prompts = [json.loads(line)["user"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    counts = [int(word) for word in options.clients.split(",")]
    rows = []
    with server(options.target, max(counts), "--max-context", "2048") as (url, _):
        for clients in counts:
            asked = [prompts[n % len(prompts)] for n in range(clients * options.requests)]
            for draft in (False, True):
                load(url, asked, clients, options.max_tokens, draft)
            found: dict[bool, list[tuple[float, list[Answered]]]] = {False: [], True: []}
            for number in range(options.passes):
                for draft in (False, True) if number % 2 == 0 else (True, False):
                    found[draft].append(load(url, asked, clients, options.max_tokens, draft))
            rows.append(_row(clients, found))
            print(_line(rows[-1]), flush=True)
    if options.json:
        print(json.dumps(rows))


@contextmanager
def server(target: str, rows: int, *more: str) -> Iterator[tuple[str, int]]:
    """A server on a free port; its address and its process.

    Args:
        target: to serve.
        rows: texts decoded side by side.
        more: further words of the command.
    """
    words = ["serve", "-t", target, "--port", "0", "--max-rows", str(rows), *more]
    command = [sys.executable, "-m", "slipstream", *words]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said: list[str] = []
    try:
        for line in process.stderr:
            said.append(line)
            found = re.search(r"at (http://\S+)/v1", line)
            if found:
                break
        else:
            sys.exit("the server did not start: " + "".join(said))
        # Its log must not fill the pipe.
        threading.Thread(target=_drain, args=(process.stderr,), daemon=True).start()
        yield found[1], process.pid
    finally:
        process.terminate()
        process.wait()


def _drain(lines: Iterable[str]) -> None:
    """Read to the end, keep nothing."""
    for _ in lines:
        pass


def load(
    url: str, prompts: Sequence[str], clients: int, tokens: int, draft: bool
) -> tuple[float, list[Answered]]:
    """Seconds that all of it takes, and the answers in the order of the prompts."""
    answers: dict[int, Answered] = {}
    waiting = iter(enumerate(prompts))
    lock = threading.Lock()

    def client() -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            while True:
                with lock:
                    number, prompt = next(waiting, (None, ""))
                if number is None:
                    return
                answers[number] = ask(http, prompt, tokens, draft)

    begun = time.perf_counter()
    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begun
    return seconds, [answers[number] for number in sorted(answers)]


def ask(http: httpx.Client, prompt: str, tokens: int, draft: bool) -> Answered:
    """One streamed answer."""
    body = {
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "draft": draft,
    }
    begun, first, said, text = time.perf_counter(), 0.0, 0, ""
    with http.stream("POST", "/v1/chat/completions", json=body) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            piece = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            if piece and not first:
                first = time.perf_counter() - begun
            text += piece
            if chunk.get("usage"):
                said = chunk["usage"]["completion_tokens"]
    return Answered(first, time.perf_counter() - begun, said, text)


def _row(clients: int, found: dict[bool, list[tuple[float, list[Answered]]]]) -> dict[str, object]:
    """What is known of so many clients; ratios are drafted by plain, of neighbouring passes."""
    row: dict[str, object] = {"clients": clients}
    rates: dict[bool, list[float]] = {}
    firsts: dict[bool, list[float]] = {}
    for draft, name in ((False, "plain"), (True, "drafted")):
        rates[draft] = [sum(item.tokens for item in answers) / seconds for seconds, answers in found[draft]]
        firsts[draft] = [statistics.median(item.first for item in answers) for _, answers in found[draft]]
        every = sorted(item.first * 1e3 for _, answers in found[draft] for item in answers)
        row |= {
            f"{name}_tokens_per_s": round(statistics.median(rates[draft]), 1),
            f"{name}_first_ms_p50": round(statistics.median(every), 1),
            f"{name}_first_ms_p90": round(every[min(len(every) - 1, int(0.9 * len(every)))], 1),
        }
    for name, values in (("ratio", rates), ("first_ratio", firsts)):
        ratios = [drafted / plain for plain, drafted in zip(values[False], values[True], strict=True)]
        row |= {
            name: round(statistics.median(ratios), 3),
            f"{name}_range": [round(min(ratios), 3), round(max(ratios), 3)],
        }
    texts = [[item.text for item in answers] for passes in found.values() for _, answers in passes]
    return row | {"identical": all(one == texts[0] for one in texts)}


def _line(row: dict[str, object]) -> str:
    parts = [
        f"{name} {row[f'{name}_tokens_per_s']} tokens/s, first text after {row[f'{name}_first_ms_p50']} ms "
        f"(90 %: {row[f'{name}_first_ms_p90']})"
        for name in ("plain", "drafted")
    ]
    same = "same texts" if row["identical"] else "TEXTS DIFFER"
    return (
        f"{row['clients']:>3} clients: {'; '.join(parts)}; drafted by plain: rate {row['ratio']} "
        f"{row['ratio_range']}, first text {row['first_ratio']} {row['first_ratio_range']}; {same}"
    )


if __name__ == "__main__":
    main()
