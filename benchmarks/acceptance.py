"""Acceptance and speed on a file of prompts: plain and drafted decoding of each, one after the other.

Not a benchmark suite: one pass, no intervals. Ratios hold within one run only.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import slipstream
from slipstream.core.records import Completion


def main() -> None:
    """Print one line per prompt and the totals."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", type=Path, help="JSON lines with a `user` field")
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("-d", "--draft", default="auto")
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--block-size", type=int, default=0)
    parser.add_argument("--drafts", default="coupled", choices=("coupled", "argmax"))
    parser.add_argument("--most", type=int, default=1000, help="use only so many prompts")
    options = parser.parse_args()
    engine = slipstream.EngineOptions(block_size=options.block_size, drafts=options.drafts)
    session = slipstream.load(options.target, options.draft, engine_options=engine)
    lines = options.prompts.read_text(encoding="utf-8").splitlines()[: options.most]
    prompts = [json.loads(line)["user"] for line in lines]
    for draft in (False, True):
        session.generate(prompts[0], slipstream.SamplingOptions(max_tokens=16), draft=draft)
    plain: list[Completion] = []
    drafted: list[Completion] = []
    for number, prompt in enumerate(prompts):
        sampling = slipstream.SamplingOptions(
            max_tokens=options.max_tokens, temperature=options.temperature, seed=number
        )
        plain.append(session.generate(prompt, sampling, draft=False))
        drafted.append(session.generate(prompt, sampling))
        a, b = plain[-1], drafted[-1]
        same = "same" if a.token_ids == b.token_ids else "DIFFERENT"
        print(
            f"{number + 1:3} {b.completion_tokens:4} tokens, length {b.acceptance_length:.2f}, {same}",
            flush=True,
        )
    report(plain, drafted)


def report(plain: list[Completion], drafted: list[Completion]) -> None:
    """Totals: micro is over all rounds, macro the mean of the prompts' own figures."""
    rounds = sum(c.rounds for c in drafted)
    micro = sum(c.emitted_in_rounds for c in drafted) / rounds
    macro = sum(c.acceptance_length for c in drafted) / len(drafted)
    positions = [
        sum(counts) / rounds for counts in zip(*(c.accepted_per_position for c in drafted), strict=True)
    ]
    rates = [
        sum(c.completion_tokens - 1 for c in done) / sum(c.decode_s for c in done)
        for done in (plain, drafted)
    ]
    equal = sum(a.token_ids == b.token_ids for a, b in zip(plain, drafted, strict=True))
    print(f"prompts {len(plain)}, same text {equal}")
    print(f"acceptance length: micro {micro:.3f}, macro {macro:.3f}")
    print("kept per position:", " ".join(f"{share:.3f}" for share in positions))
    print(f"tokens/s: plain {rates[0]:.1f}, drafted {rates[1]:.1f}, ratio {rates[1] / rates[0]:.2f}")


if __name__ == "__main__":
    main()
