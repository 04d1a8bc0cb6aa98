"""Log-probabilities: those of plain decoding, with drafts or without, alone or in company."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.logprobs import read_logprobs
from slipstream.model import Drafter
from slipstream.target import Target

SAMPLING = SamplingOptions(max_tokens=20, temperature=0.9, top_k=9, repetition_penalty=1.3, ignore_eos=True)


def test_packed_numbers_are_those_of_log_softmax() -> None:
    logits_BTV = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0)) * 4
    tokens_BT = torch.tensor([[1, 2, 49], [0, 7, 7]])
    likely = read_logprobs(logits_BTV, tokens_BT, 4)
    for row in range(2):
        for slot in range(3):
            right = logits_BTV[row, slot].log_softmax(-1)
            item = likely[row][slot]
            assert item.token == int(tokens_BT[row, slot])
            assert item.logprob == pytest.approx(float(right[item.token]), abs=1e-5)
            order = right.argsort(descending=True)[:4].tolist()
            assert [token for token, _ in item.top] == order
            assert [value for _, value in item.top] == pytest.approx(right[order].tolist(), abs=1e-5)


@pytest.mark.parametrize("drafted", [False, True])
def test_they_are_the_models_own_of_each_emitted_token(
    target: Target, drafter: Drafter, drafted: bool
) -> None:
    proposer = DraftProposer(target, drafter) if drafted else None
    engine = Engine(target, proposer, EngineOptions(drafts="max"))
    asks, more = Request((3, 4, 5), SAMPLING, logprobs=2), Request((9,), SAMPLING, logprobs=0)
    silent = Request((7, 7), SAMPLING)
    pieces: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for piece in engine.stream([asks, more, silent]):
        pieces[piece.index] += [item.token for item in piece.logprobs]
    done = engine.completions
    assert pieces == {0: list(done[0].token_ids), 1: list(done[1].token_ids), 2: []}
    assert not done[2].logprobs
    for request, completion in ((asks, done[0]), (more, done[1])):
        whole = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        right = target.recompute(whole)[0].log_softmax(-1)
        for number, item in enumerate(completion.logprobs):
            at = right[len(request.prompt_ids) - 1 + number]
            assert item.logprob == pytest.approx(float(at[item.token]), abs=1e-4)
            assert len(item.top) == request.logprobs
            best = at.topk(2).values.tolist()
            assert [value for _, value in item.top] == pytest.approx(best[: len(item.top)], abs=1e-4)


def test_a_request_without_drafts_gets_rounds_without_drafts_while_alone(
    target: Target, drafter: Drafter
) -> None:
    engine = Engine(target, DraftProposer(target, drafter), EngineOptions(drafts="max"))
    plain = Request((3, 4, 5), SAMPLING, draft=False)
    drafted = Request((3, 4, 5), SAMPLING)
    alone = engine.generate([plain])[0]
    assert alone.drafts == 0
    assert alone.parked == alone.rounds > 0
    both = engine.generate([plain, drafted])
    assert both[1].drafts > 0
    assert alone.token_ids == both[0].token_ids == both[1].token_ids
