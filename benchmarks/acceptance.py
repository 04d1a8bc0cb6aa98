"""Acceptance on a file of prompts, decoded as batches, and speed on the first few of them, one at a time.

Not a benchmark suite: one pass, no intervals. Ratios hold within one run only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import slipstream
from slipstream.bench import total_rate
from slipstream.core.records import Completion, total_acceptance


def main() -> None:
    """Print one line per prompt and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, help="JSON lines with a `user` field")
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("-d", "--draft", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--block-size", type=int, default=0)
    parser.add_argument("--noise", default="coupled", choices=("coupled", "argmax"))
    parser.add_argument("--timed", type=int, default=8, help="prompts decoded alone, plainly and with drafts")
    options = parser.parse_args()
    engine = slipstream.EngineOptions(block_size=options.block_size, drafts="max", draft_noise=options.noise)
    session = slipstream.load(options.target, options.draft, engine_options=engine)
    lines = options.prompts.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(line)["user"] for line in lines]
    sampling = [
        slipstream.SamplingOptions(max_tokens=options.max_tokens, temperature=options.temperature, seed=seed)
        for seed in range(len(prompts))
    ]
    acceptance(session.generate_batch(prompts, sampling))
    if not options.timed:
        return
    for draft in (False, True):
        session.generate(prompts[0], slipstream.SamplingOptions(max_tokens=16), draft=draft)
    plain: list[Completion] = []
    drafted: list[Completion] = []
    for prompt, settings in list(zip(prompts, sampling, strict=True))[: options.timed]:
        plain.append(session.generate(prompt, settings, draft=False))
        drafted.append(session.generate(prompt, settings))
    speed(plain, drafted)


def acceptance(drafted: list[Completion]) -> None:
    """Acceptance length: micro is over all rounds, macro the mean of the prompts' own figures."""
    rounds = sum(c.rounds for c in drafted)
    macro = sum(c.acceptance_length for c in drafted) / len(drafted)
    counts = zip(*(c.accepted_per_position for c in drafted), strict=True)
    tokens = sum(c.completion_tokens for c in drafted)
    micro = total_acceptance(drafted)
    print(f"{len(drafted)} prompts, {tokens} tokens, acceptance length: micro {micro:.3f}, macro {macro:.3f}")
    print("kept per position:", " ".join(f"{sum(kept) / rounds:.3f}" for kept in counts), flush=True)


def speed(plain: list[Completion], drafted: list[Completion]) -> None:
    """Decode-only rates of the same prompts, and whether the texts are equal."""
    rates = total_rate(plain), total_rate(drafted)
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    print(f"timed {len(plain)}: same text {equal}, tokens/s plain {rates[0]:.1f}, drafted {rates[1]:.1f}")
    print(f"ratio of decode rates {rates[1] / rates[0]:.2f}")


if __name__ == "__main__":
    main()
