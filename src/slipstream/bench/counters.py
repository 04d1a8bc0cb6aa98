"""What servers say of acceptance, as counts of one request: from replies, from counters, or only as a mean.

Pure functions. Counts are exact where an engine counts rounds or kept drafts; what is only a running mean of
all that a server has answered stays a mean, and is called so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

_LINE: Final = re.compile(
    r"^(vllm:spec_decode|sglang:spec|trtllm_spec_decode)_(\w+)(\{[^}]*\})? (\S+)$", re.M
)
_POSITION: Final = re.compile(r'(?:token_)?position="(\d+)"')
#: Counters by engine: what we call them.
_NAMES: Final[Mapping[tuple[str, str], str]] = {
    ("vllm:spec_decode", "num_drafts"): "rounds",
    ("vllm:spec_decode", "num_draft_tokens"): "drafted",
    ("vllm:spec_decode", "num_accepted_tokens"): "accepted",
    ("vllm:spec_decode", "num_accepted_tokens_per_pos"): "accepted at",
    ("sglang:spec", "verify_calls"): "rounds",
    ("trtllm_spec_decode", "num_draft_tokens"): "drafted",
    ("trtllm_spec_decode", "num_accepted_tokens"): "accepted",
    ("trtllm_spec_decode", "drafted_tokens"): "drafted at",
    ("trtllm_spec_decode", "accepted_tokens"): "accepted at",
}
#: Gauges that are a mean.
_MEANS: Final = {("sglang:spec", "accept_length"), ("trtllm_spec_decode", "acceptance_length")}
#: A mean of whole numbers over whole numbers lies so near to a whole number of rounds.
_WHOLE: Final = 0.02

Counters = dict[str, int]
Counts = dict[str, Any]
"""Fields of `Measured`."""


def read_counters(text: str) -> Counters:
    """The speculative counters in a page of Prometheus metrics, added up over workers; empty without any.

    Keys are `rounds`, `drafted`, `accepted`, and `drafted at 0`, `accepted at 0` and so on.
    """
    found: Counters = {}
    for engine, name, labels, value in _LINE.findall(text):
        called = _NAMES.get((engine, name.removesuffix("_total")))
        if called is None:
            continue
        if called.endswith(" at"):
            position = _POSITION.search(labels)
            if position is None:
                continue
            called = f"{called} {position[1]}"
        found[called] = found.get(called, 0) + int(float(value))
    return found


def read_mean(text: str) -> float | None:
    """A gauge of tokens per round in such a page, the mean over workers; None before any round."""
    found = [float(value) for engine, name, _, value in _LINE.findall(text) if (engine, name) in _MEANS]
    told = [value for value in found if value >= 1]
    return sum(told) / len(told) if told else None


def of_counters(before: Mapping[str, int], after: Mapping[str, int], tokens: int) -> Counts:
    """What one request added to counters; empty where it had no rounds.

    Args:
        before: counters as it began.
        after: as it had ended.
        tokens: it emitted, the first one, which comes from the prompt's pass, included.
    """
    added = {name: value - before.get(name, 0) for name, value in after.items()}
    accepted, drafted = _positions(added, "accepted at"), _positions(added, "drafted at")
    if not any(added.values()):
        return {}
    kept = added.get("accepted", sum(accepted))
    knows = "accepted" in added or bool(accepted)
    # Every round emits what it kept and one token more.
    rounds = added.get("rounds") or (drafted[0] if drafted else max(tokens - 1 - kept, 0))
    places = max(len(accepted), len(drafted))
    accepted += (0,) * (places - len(accepted))
    return {
        "rounds": rounds,
        "emitted_in_rounds": _emitted(rounds + kept if knows else tokens - 1, tokens),
        "drafted_per_position": drafted or (rounds,) * places,
        "tried_per_position": (rounds, *accepted[:-1]) if places else (),
        "accepted_per_position": accepted,
    }


def of_details(details: Mapping[str, Any], tokens: int) -> Counts:
    """SGLang's `spec_tokens_details`: rounds, kept drafts, and in how many rounds how many were kept."""
    rounds = int(details.get("spec_verify_ct") or 0)
    if not rounds:
        return {}
    kept, made = (int(details.get(f"spec_num_{name}_drafts") or 0) for name in ("correct", "proposed"))
    counts: Counts = {"rounds": rounds, "emitted_in_rounds": _emitted(rounds + kept, tokens)}
    runs = [int(count) for count in details.get("spec_correct_drafts_histogram") or ()]
    places = made // rounds
    if sum(runs) == rounds and made == places * rounds and len(runs) <= places + 1:
        runs += [0] * (places + 1 - len(runs))
        accepted = tuple(sum(runs[place:]) for place in range(1, places + 1))
        counts["drafted_per_position"] = (rounds,) * places
        counts["tried_per_position"] = (rounds, *accepted[:-1])[:places]
        counts["accepted_per_position"] = accepted
    return counts


def of_timings(timings: Mapping[str, Any], tokens: int) -> Counts:
    """llama.cpp's `timings`: each pass emits its kept drafts and one token more."""
    if not timings.get("draft_n"):
        return {}
    said = int(timings.get("predicted_n") or tokens)
    rounds = max(said - int(timings.get("draft_n_accepted") or 0) - 1, 0)
    return {"rounds": rounds, "emitted_in_rounds": max(said - 1, 0)}


def of_mean(mean: float | None, tokens: int) -> Counts:
    """TensorRT-LLM's `avg_decoded_tokens_per_iter` of a reply: tokens over passes, the prompt's included.

    So it gives the number of rounds, where that is a whole one; otherwise it stays a mean.
    """
    if not mean or tokens < 2:
        return {}
    passes = tokens / mean
    if abs(passes - round(passes)) > _WHOLE or round(passes) < 2:
        return {"stated_acceptance": float(mean)}
    return {"rounds": round(passes) - 1, "emitted_in_rounds": tokens - 1}


def _positions(added: Mapping[str, int], called: str) -> tuple[int, ...]:
    """Counts of positions from 0 on; those never reached may be missing."""
    places = [int(name.removeprefix(called)) for name in added if name.startswith(called)]
    return tuple(added.get(f"{called} {place}", 0) for place in range(max(places, default=-1) + 1))


def _emitted(said: int, tokens: int) -> int:
    """Tokens of rounds, those past the end of the text left out, as engines count them too."""
    return max(min(said, tokens - 1), 0)
