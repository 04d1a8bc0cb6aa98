"""Penalties, bias and the ban on stopping early: each slot of a block against a loop over its own history."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.decode.history import History

VOCAB = 12
OPTIONS = st.builds(
    SamplingOptions,
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -0.5]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 2.5]), max_size=2),
    min_tokens=st.sampled_from([0, 2, 5]),
    stop_token_ids=st.sampled_from([(), (4,), (4, 7)]),
    ignore_eos=st.booleans(),
)


def slow(logits: list[float], prompt: list[int], said: list[int], options: SamplingOptions) -> list[float]:
    out = []
    ends = set(options.stop_token_ids) | (set() if options.ignore_eos else {0})
    for v, logit in enumerate(logits):
        value = logit + options.logit_bias.get(v, 0.0)
        if v in prompt + said:
            value = value / options.repetition_penalty if value > 0 else value * options.repetition_penalty
        value -= options.frequency_penalty * said.count(v) + options.presence_penalty * (v in said)
        if v in ends and len(said) < options.min_tokens:
            value = -math.inf
        out.append(value)
    return out


@given(st.lists(OPTIONS, min_size=1, max_size=3), st.integers(0, 10_000))
def test_against_loops(rows: list[SamplingOptions], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (3 + b,), generator=generator).tolist() for b in range(len(rows))]
    requests = [Request(p, o) for p, o in zip(prompts, rows, strict=True)]
    history = History(requests, VOCAB, (0,), torch.device("cpu"))
    said: list[list[int]] = [[] for _ in rows]
    for _ in range(3):
        drafts = torch.randint(0, VOCAB, (len(rows), 3), generator=generator)
        logits = torch.randn(len(rows), 4, VOCAB, generator=generator)
        start = torch.tensor([len(p) + len(s) for p, s in zip(prompts, said, strict=True)])
        adjusted = history.adjust(logits, drafts, start[:, None] + torch.arange(4))
        for b, options in enumerate(rows):
            for t in range(4):
                own = said[b] + drafts[b, :t].tolist()
                expected = torch.tensor(slow(logits[b, t].tolist(), prompts[b], own, options))
                torch.testing.assert_close(adjusted[b, t], expected, atol=1e-5, rtol=1e-5)
        tokens = torch.randint(0, VOCAB, (len(rows), 4), generator=generator)
        emitted = torch.randint(0, 5, (len(rows),), generator=generator)
        history.add(tokens, emitted)
        for b in range(len(rows)):
            said[b] += tokens[b, : int(emitted[b])].tolist()


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    history = History([Request([1, 2])], VOCAB, (0,), torch.device("cpu"))
    logits = torch.randn(1, 2, VOCAB)
    assert history.adjust(logits, torch.tensor([[3]]), torch.tensor([[2, 3]])) is logits
