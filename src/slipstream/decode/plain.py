"""The oracle: one token at a time, the whole text recomputed each time, no cache, no batch, no shortcuts.

Slow on purpose and written independently of the engine's filters, so that their agreement means something.
Only the noise function is shared, as it is part of the definition of a choice.
"""

from __future__ import annotations

import math

import torch

from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.decode.noise import gumbel
from slipstream.target import Target


def plain_decode(target: Target, request: Request) -> list[int]:
    """Decode one request; stop strings are not looked at.

    Returns:
        The emitted tokens, a final stop token included.
    """
    options, prompt = request.sampling, list(request.prompt_ids)
    ends = set(options.stop_token_ids) | (set() if options.ignore_eos else set(target.info.eos_token_ids))
    said: list[int] = []
    while len(said) < options.max_tokens and len(prompt) + len(said) < target.info.max_context:
        logits = target.recompute(torch.tensor([prompt + said], device=target.device))[0, -1]
        said.append(next_token(logits.tolist(), prompt, said, ends, options))  # host: the oracle
        if said[-1] in ends:
            break
    return said


def next_token(
    logits: list[float], prompt: list[int], said: list[int], ends: set[int], options: SamplingOptions
) -> int:
    """The target's choice after `prompt + said`, by the definition."""
    scores = scores_with_history(logits, prompt, said, ends, options)
    if options.temperature == 0:
        return max(range(len(scores)), key=lambda v: (scores[v], -v))
    kept = survivors([score / options.temperature for score in scores], options)
    position = torch.tensor([[len(prompt) + len(said)]])
    noise = gumbel(torch.tensor([options.seed]), position, len(scores))[0, 0].tolist()  # host: the oracle
    return max(kept, key=lambda v: (kept[v] + noise[v], -v))


def scores_with_history(
    logits: list[float], prompt: list[int], said: list[int], ends: set[int], options: SamplingOptions
) -> list[float]:
    """Scores after bias, repetition, frequency and presence penalties, and with no early end."""
    scores = []
    for token, logit in enumerate(logits):
        score = logit + options.logit_bias.get(token, 0.0)
        if token in said or token in prompt:
            score = score / options.repetition_penalty if score > 0 else score * options.repetition_penalty
        score -= options.frequency_penalty * said.count(token)
        score -= options.presence_penalty * (token in said)
        scores.append(-math.inf if token in ends and len(said) < options.min_tokens else score)
    return scores


def survivors(scores: list[float], options: SamplingOptions) -> dict[int, float]:
    """Tokens that survive top-k, top-p and min-p, with their scores."""
    order = sorted(range(len(scores)), key=lambda v: -scores[v])
    if options.top_k:
        least = scores[order[min(options.top_k, len(order)) - 1]]
        order = [v for v in order if scores[v] >= least]
    highest = scores[order[0]]
    mass = sum(math.exp(scores[v] - highest) for v in order)
    if options.top_p < 1:
        reached, least = 0.0, highest
        for v in order:
            if reached >= options.top_p * mass:
                break
            least = scores[v]
            reached += math.exp(scores[v] - highest)
        order = [v for v in order if scores[v] >= least]
    if options.min_p:
        order = [v for v in order if scores[v] >= highest + math.log(options.min_p)]
    return {v: scores[v] for v in order}
