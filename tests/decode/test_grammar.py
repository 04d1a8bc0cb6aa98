"""Grammars under drafting: the text is that of plain decoding under the same grammar."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.grammar import permitted
from slipstream.decode.plain import next_token
from slipstream.model import Drafter
from slipstream.target import Target
from slipstream.testing import ScriptedProposer, random_draft

VOCAB = 64


def allowed_after(said: tuple[int, ...], salt: int) -> set[int]:
    """A rule that looks at the whole history, so that a wrong history is noticed."""
    draw = random.Random(hash((said, salt)))
    return set(draw.sample(range(1, VOCAB), 9)) | ({0} if len(said) > 20 else set())


class RuleGuide:
    def __init__(self, salt: int) -> None:
        self.salt, self.said = salt, ()

    def mask(self) -> bytes:
        allowed = allowed_after(self.said, self.salt)
        bits = [sum(1 << bit for bit in range(8) if at + bit in allowed) for at in range(0, VOCAB, 8)]
        return bytes(bits)

    def accept(self, token: int) -> bool:
        if token not in allowed_after(self.said, self.salt):
            return False
        self.said = (*self.said, token)
        return True

    def back(self, count: int) -> None:
        self.said = self.said[: len(self.said) - count]


def plain_under_rule(target: Target, request: Request, salt: int) -> list[int]:
    """Slow: the whole text again for each token, forbidden tokens at -inf."""
    said: list[int] = []
    prompt = list(request.prompt_ids)
    while len(said) < request.sampling.max_tokens:
        logits = target.recompute(torch.tensor([prompt + said]))[0, -1].tolist()
        allowed = allowed_after(tuple(said), salt)
        logits = [logit if token in allowed else -torch.inf for token, logit in enumerate(logits)]
        said.append(next_token(logits, prompt, said, {0}, request.sampling))
        if said[-1] == 0:
            break
    return said


def sampling(temperature: float, number: int) -> SamplingOptions:
    return SamplingOptions(
        max_tokens=24, temperature=temperature, seed=number, top_k=5 * (number % 2), top_p=0.9
    )


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafts", ["drafter", "half right", "none"])
def test_the_text_is_that_of_plain_decoding_under_the_grammar(
    target: Target, drafter: Drafter, temperature: float, drafts: str
) -> None:
    requests = [
        Request((5 + number, 9), sampling(temperature, number), grammar=lambda n=number: RuleGuide(n))
        for number in range(3)
    ]
    right = [plain_under_rule(target, request, number) for number, request in enumerate(requests)]
    texts = [[*request.prompt_ids, *text] for request, text in zip(requests, right, strict=True)]
    texts.append([3, 4, *([1] * 30)])
    proposer = {
        "drafter": DraftProposer(target, drafter),
        "half right": ScriptedProposer(texts, random_draft(3, 0.7), 6),
        "none": None,
    }[drafts]
    free = Request((3, 4), SamplingOptions(max_tokens=24, ignore_eos=True))
    engine = Engine(target, proposer, EngineOptions(drafts="max"))
    done = engine.generate([*requests, free])
    assert [list(completion.token_ids) for completion in done[:3]] == right
    assert done[3].token_ids == Engine(target).generate([free])[0].token_ids
    if drafts == "half right":
        assert sum(done[0].accepted_per_position) > 0


def test_slots_are_asked_after_their_own_drafts_and_guides_stay_where_they_stood() -> None:
    guide = RuleGuide(1)
    first = min(allowed_after((), 1))
    second = min(set(range(1, VOCAB)) - allowed_after((first,), 1))
    mask_BTV = permitted({1: guide}, [[7, 7], [first, second]], 3, VOCAB, torch.device("cpu"))
    assert guide.said == ()
    assert bool(mask_BTV[0].all())
    assert set(mask_BTV[1, 0].nonzero()[:, 0].tolist()) == allowed_after((), 1)
    assert set(mask_BTV[1, 1].nonzero()[:, 0].tolist()) == allowed_after((first,), 1)
    assert bool(mask_BTV[1, 2].all())  # behind a forbidden draft: of no importance


def test_tokens_that_a_guide_does_not_know_are_forbidden() -> None:
    mask_BTV = permitted({0: RuleGuide(1)}, [[]], 1, VOCAB + 9, torch.device("cpu"))
    assert not bool(mask_BTV[0, 0, VOCAB:].any())
