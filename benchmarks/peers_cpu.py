"""What the same drafter brings in each engine that runs on this CPU: drafted over plain, each within itself.

Slipstream, llama.cpp (our GGUF pair) and vLLM (our z-lab export), greedy, one request at a time, bf16, the
same prompts and the same number of threads; whole calls, prompt included, after a warm-up of each. Engines
that `make peers` did not build are left out, and it is said.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import slipstream
from slipstream.api import Session
from slipstream.core.options import SamplingOptions
from slipstream.formats.export import export_drafter
from slipstream.target import model_folder
from tests.peer.engines import PEERS, complete, llama_server

PROMPTS = Path(__file__).with_name("held_out_smollm2.jsonl")
Rate = Callable[[bool], float]
"""Tokens per second of all prompts, drafted or plain."""


def main() -> None:
    """Print rates and ratios, and with --json one line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=6, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--engines", default="slipstream,llama.cpp,vllm")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    session = slipstream.load("smollm2")
    assert session.drafter is not None
    turns = [
        json.loads(line)["user"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()[: options.n]
    ]
    prompts = [session.encode(turn) for turn in turns]
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            "slipstream": lambda: _ours(session, prompts, options.max_tokens),
            "llama.cpp": lambda: _llama(session, Path(folder), prompts, options.max_tokens),
            "vllm": lambda: _vllm(session, Path(folder), prompts, options.max_tokens),
        }
        rates: dict[str, Rate] = {}
        for name in options.engines.split(","):
            if name != "slipstream" and not (PEERS / name / "built").exists():
                print(f"{name} is not built; make peers builds it")
                continue
            rates[name] = engines[name]()
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in rates}
        for _ in range(options.passes):
            for name, rate in rates.items():
                found[name].append((rate(False), rate(True)))
    report = {name: _row(pairs) for name, pairs in found.items()}
    for name, row in report.items():
        low, high = row["spread"]
        print(
            f"{name:12} plain {row['plain']:.1f} tokens/s, drafted {row['drafted']:.1f}, "
            f"ratio {row['ratio']:.2f} ({low:.2f} to {high:.2f})"
        )
    if options.json:
        print(json.dumps(report))


def _row(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    ratios = [drafted / plain for plain, drafted in pairs]
    return {
        "plain": statistics.median(plain for plain, _ in pairs),
        "drafted": statistics.median(drafted for _, drafted in pairs),
        "ratio": statistics.median(ratios),
        "spread": (min(ratios), max(ratios)),
    }


def _ours(session: Session, prompts: Sequence[Sequence[int]], tokens: int) -> Rate:
    sampling = SamplingOptions(max_tokens=tokens)

    def rate(draft: bool) -> float:
        session.generate(prompts[0], sampling, draft=draft)
        begun = time.perf_counter()
        said = sum(session.generate(ids, sampling, draft=draft).completion_tokens for ids in prompts)
        return said / (time.perf_counter() - begun)

    return rate


def _llama(session: Session, folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> Rate:
    pair = folder / "gguf"
    assert session.drafter is not None
    export_drafter(session.drafter, pair, "llama.cpp", target_folder=model_folder("smollm2"), name="smollm2")
    target, drafter = pair / "target-smollm2.gguf", pair / "dflash-smollm2.gguf"
    drafts = session.drafter.config.block_size - 1

    def rate(draft: bool) -> float:
        with llama_server(target, drafter if draft else None, drafts, torch.get_num_threads()) as address:
            complete(address, prompts[0], tokens)
            begun = time.perf_counter()
            said = sum(complete(address, ids, tokens)["timings"]["predicted_n"] for ids in prompts)
            return float(said / (time.perf_counter() - begun))

    return rate


def _vllm(session: Session, folder: Path, prompts: Sequence[Sequence[int]], tokens: int) -> Rate:
    pair = folder / "zlab"
    assert session.drafter is not None
    export_drafter(session.drafter, pair, "vllm", target=str(model_folder("smollm2")))
    script = Path(__file__).with_name("peers") / "rate_vllm.py"
    words = [PEERS / "vllm" / "bin" / "python", script, model_folder("smollm2")]
    drafts = session.drafter.config.block_size - 1

    def rate(draft: bool) -> float:
        asked = json.dumps([list(ids) for ids in (prompts[0], *prompts)])
        command = [str(word) for word in (*words, pair if draft else "none", drafts, tokens)]
        done = subprocess.run(command, input=asked, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"vLLM failed: {done.stderr.strip().splitlines()[-1:]}")
        said = json.loads(done.stdout.splitlines()[-1])
        return float(said["tokens"] / said["seconds"])

    return rate


if __name__ == "__main__":
    main()
