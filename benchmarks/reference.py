"""Slipstream beside the authors' reference package (dflash 0.1.0) and transformers' own, on one request.

All in one process, interleaved prompt by prompt in several passes, with the same weights of the target, the
same drafter and the same prompts; greedy. Rates are tokens of an answer per second of the whole call, prompt
included. Without the reference package its rows are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import slipstream
from slipstream.api import Session
from slipstream.core.options import SamplingOptions

PROMPTS = Path(__file__).with_name("held_out_smollm2.jsonl")
Ids = tuple[int, ...]
#: From a prompt's ids and the most tokens of an answer to its ids.
Contender = Callable[[Ids, int], Ids]
#: Tokens that the others need to be warm; ours also learn what rounds cost.
WARM_TOKENS = 8
#: Seconds from the start after which --quick begins no pass that would not end by then.
QUICK_S = 45


def main() -> None:
    """Print a table of rates and ratios, and with --json one line of JSON at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("-d", "--draft", default="auto")
    parser.add_argument("-n", type=int, default=8, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="2 prompts, 32 tokens, one pass or two")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    started = time.perf_counter()
    if options.quick:
        options.n, options.max_tokens, options.passes = 2, 32, 2
    session = slipstream.load(options.target, options.draft)
    contenders = _contenders(session)
    prompts = [
        _prompt(session, line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()[: options.n]
    ]
    for name, run in contenders.items():
        run(prompts[0], options.max_tokens if name in ("plain", "drafted") else WARM_TOKENS)
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    texts: dict[str, list[Ids]] = {}
    for count in range(options.passes):
        now = time.perf_counter()
        if options.quick and count and now + (now - started) / count > started + QUICK_S:
            break
        seconds, tokens = dict.fromkeys(contenders, 0.0), dict.fromkeys(contenders, 0)
        texts = {name: [] for name in contenders}
        for prompt in prompts:
            for name, run in contenders.items():
                begun = time.perf_counter()
                said = run(prompt, options.max_tokens)
                seconds[name] += time.perf_counter() - begun
                tokens[name] += len(said)
                texts[name].append(said)
        for name in contenders:
            rates[name].append(tokens[name] / seconds[name])
    report = _report(rates, texts)
    for name, values in rates.items():
        spread = f"{min(values):.1f} to {max(values):.1f}"
        same = sum(a == b for a, b in zip(texts[name], texts["plain"], strict=True))
        print(
            f"{name:28} {statistics.median(values):7.1f} tokens/s ({spread}), {same}/{len(prompts)} as plain"
        )
    for name, value in report.items():
        print(f"{name:28} {value}")
    if options.json:
        print(json.dumps(report | {"tokens_per_s": {n: statistics.median(v) for n, v in rates.items()}}))


def _report(rates: dict[str, list[float]], texts: dict[str, list[Ids]]) -> dict[str, Any]:
    """Medians over the passes of the ratios within each pass."""

    def ratio(mine: str, theirs: str) -> float | None:
        if theirs not in rates:
            return None
        pairs = zip(rates[mine], rates[theirs], strict=True)
        return round(statistics.median(a / b for a, b in pairs), 3)

    return {
        "drafted_vs_reference": ratio("drafted", "reference, drafted"),
        "plain_vs_reference": ratio("plain", "reference, plain"),
        "plain_vs_transformers": ratio("plain", "transformers"),
        "drafted_vs_transformers": ratio("drafted", "transformers"),
        "drafted_vs_prompt_lookup": ratio("drafted", "transformers, prompt lookup"),
        "speedup": ratio("drafted", "plain"),
        "identical": texts["drafted"] == texts["plain"],
    }


def _contenders(session: Session) -> dict[str, Contender]:
    target = session.target
    ends = list(target.info.eos_token_ids)

    def ours(draft: bool) -> Contender:
        return lambda prompt, most: (
            session.generate(prompt, SamplingOptions(max_tokens=most), draft=draft).token_ids
        )

    def theirs(**more: Any) -> Contender:
        def run(prompt: Ids, most: int) -> Ids:
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            settings = {"do_sample": False, "max_new_tokens": most, "eos_token_id": ends, "pad_token_id": 0}
            with torch.no_grad():
                out = target.model.generate(ids, attention_mask=mask, **settings, **more)
            return tuple(out[0, len(prompt) :].tolist())

        return run

    contenders = {
        "plain": ours(False),
        "drafted": ours(True),
        "transformers": theirs(),
        "transformers, prompt lookup": theirs(prompt_lookup_num_tokens=8),
    }
    return contenders | _reference(session, ends)


def _reference(session: Session, ends: list[int]) -> dict[str, Contender]:
    """The authors' package with the same drafter, drafting and not."""
    try:
        from dflash.model import DFlashDraftModel, dflash_generate
    except ImportError:
        return {}
    import tempfile

    from slipstream.formats import write_zlab

    assert session.drafter is not None
    with tempfile.TemporaryDirectory() as folder:
        write_zlab(session.drafter, Path(folder) / "drafter")
        model = DFlashDraftModel.from_pretrained(Path(folder) / "drafter", dtype=session.target.dtype).eval()

    def run(block: int) -> Contender:
        def generate(prompt: Ids, most: int) -> Ids:
            with torch.no_grad():
                out = dflash_generate(
                    model, session.target.model, torch.tensor([prompt]), most, ends, block_size=block
                )
            return tuple(out[0, len(prompt) :].tolist())

        return generate

    return {"reference, drafted": run(model.block_size), "reference, plain": run(1)}


def _prompt(session: Session, line: str) -> Ids:
    """Ids of a user turn in the target's template."""
    turn = [{"role": "user", "content": json.loads(line)["user"]}]
    ids = session.target.tokenizer.apply_chat_template(turn, add_generation_prompt=True)  # type: ignore[union-attr]
    return tuple(ids if isinstance(ids, list) else ids["input_ids"])


if __name__ == "__main__":
    main()
