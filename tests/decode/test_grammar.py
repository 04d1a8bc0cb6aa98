"""Grammars under drafting: the text is that of plain decoding under the same grammar."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.accept import Proposal
from slipstream.decode.grammar import Followed, follow
from slipstream.decode.lookup import LookupProposer
from slipstream.decode.noise import CHOICE, gumbel
from slipstream.decode.plain import next_token
from slipstream.decode.propose import make_chooser
from slipstream.decode.sampling import RowSettings
from slipstream.model import Drafter
from slipstream.target import Target
from slipstream.testing import ScriptedProposer, random_draft, right, wrong

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


def followed(guides: dict[int, RuleGuide]) -> dict[int, Followed]:
    return {row: Followed(guide) for row, guide in guides.items()}


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
@pytest.mark.parametrize("drafts", ["drafter", "lookup", "half right", "none"])
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
        "lookup": LookupProposer(5),
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


class ForcedGuide(RuleGuide):
    """Leaves one token in two of three places."""

    def mask(self) -> bytes:
        if len(self.said) % 3:
            return (1 << self.forced()).to_bytes(VOCAB // 8, "little")
        return super().mask()

    def accept(self, token: int) -> bool:
        if len(self.said) % 3 == 0:
            return super().accept(token)
        if token != self.forced():
            return False
        self.said = (*self.said, token)
        return True

    def forced(self) -> int:
        return 1 + random.Random(hash((self.said, self.salt))).randrange(VOCAB - 1)


def bits_of(mask: bytes) -> set[int]:
    return {token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1}


def test_where_one_token_is_left_it_is_drafted_whoever_drafts(target: Target) -> None:
    request = Request((5, 9), SamplingOptions(max_tokens=31, ignore_eos=True), grammar=lambda: ForcedGuide(4))
    plain = Engine(target).generate([request])[0]
    scripted = ScriptedProposer([[5, 9, *plain.token_ids]], wrong, 6)
    drafted = Engine(target, scripted, EngineOptions(drafts="max")).generate([request])[0]
    assert drafted.token_ids == plain.token_ids
    # The first token is the prompt's; each round has two forced ones, at least, and the target's own.
    assert drafted.rounds <= 10


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("few", [False, True])
def test_drafts_are_the_best_of_those_permitted_one_after_another(temperature: float, few: bool) -> None:
    rows, num_drafts = 3, 5
    ids = [token for token in range(VOCAB) if token % 2 or not few]
    generator = torch.Generator().manual_seed(3)
    logits_BKV = torch.randn(rows, num_drafts, len(ids), generator=generator)
    position_BK = torch.arange(num_drafts) + torch.tensor([[3], [40], [9]])
    options = [SamplingOptions(temperature=temperature, seed=seed) for seed in range(rows)]
    settings = RowSettings.of(options, VOCAB, torch.device("cpu"))
    chooser = make_chooser(settings, "match", "coupled", VOCAB)
    free = chooser(logits_BKV, position_BK, torch.tensor(ids) if few else None)
    guides = {0: RuleGuide(5), 2: RuleGuide(6)}
    drafts = follow(followed(guides), free, VOCAB)[0].drafts_BK.tolist()
    noise_BKV = gumbel(torch.arange(rows), position_BK, VOCAB, CHOICE)
    for row, salt in ((0, 5), (2, 6)):
        slow = RuleGuide(salt)
        for slot in range(num_drafts):
            allowed = [token for token in bits_of(slow.mask()) if token in ids]

            def score(token: int, row: int = row, slot: int = slot) -> float:
                logit = float(logits_BKV[row, slot, ids.index(token)])
                if not temperature:
                    return logit
                return logit / temperature + float(noise_BKV[row, slot, token])

            assert drafts[row][slot] == max(allowed, key=score)
            assert slow.accept(drafts[row][slot])
    assert drafts[1] == free.drafts_BK[1].tolist()
    assert all(guide.said == () for guide in guides.values())


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_drafter_that_knows_none_of_the_permitted_tokens_does_no_harm(temperature: float) -> None:
    options = [SamplingOptions(temperature=temperature, top_p=0.9, min_p=0.1)]
    settings = RowSettings.of(options, VOCAB, torch.device("cpu"))
    known = torch.tensor(sorted(set(range(VOCAB)) - allowed_after((), 1)))
    chooser = make_chooser(settings, "match", "coupled", VOCAB)
    free = chooser(torch.randn(1, 2, len(known)), torch.tensor([[4, 5]]), known)
    guide = RuleGuide(1)
    drafted, permitted = follow(followed({0: guide}), free, VOCAB)
    assert guide.said == ()
    assert set(drafted.drafts_BK[0].tolist()) <= set(known.tolist())
    assert bits_of(permitted.bits[0, 0].tobytes()) == allowed_after((), 1)
    assert bool((permitted.bits[0, 1:] == 255).all())


def test_slots_are_asked_after_their_own_drafts_and_guides_stay_where_they_stood() -> None:
    guide = RuleGuide(1)
    first = min(allowed_after((), 1))
    second = min(set(range(1, VOCAB)) - allowed_after((first,), 1))
    drafts_BK = torch.tensor([[7, 7], [first, second]])
    drawn = Proposal(drafts_BK, q_BKV=torch.full((2, 2, VOCAB), 1 / VOCAB))
    kept, permitted = follow(followed({1: guide}), drawn, VOCAB)
    assert guide.said == ()
    assert kept.drafts_BK.equal(drafts_BK)  # q is of these drafts
    mask_BTV = permitted.constrain(torch.zeros(2, 3, VOCAB)) == 0
    assert bool(mask_BTV[0].all())
    assert set(mask_BTV[1, 0].nonzero()[:, 0].tolist()) == allowed_after((), 1)
    assert set(mask_BTV[1, 1].nonzero()[:, 0].tolist()) == allowed_after((first,), 1)
    assert bool(mask_BTV[1, 2].all())  # behind a forbidden draft: of no importance


def test_tokens_that_a_guide_does_not_know_are_forbidden() -> None:
    nothing = Proposal(torch.zeros(1, 0, dtype=torch.int64))
    _, permitted = follow(followed({0: RuleGuide(1)}), nothing, VOCAB + 9)
    logits_BTV = permitted.constrain(torch.zeros(1, 1, VOCAB + 9))
    assert bool(torch.isinf(logits_BTV[0, 0, VOCAB:]).all())
    assert set((logits_BTV[0, 0] == 0).nonzero()[:, 0].tolist()) == allowed_after((), 1)


class TiringGuide(RuleGuide):
    """Its parser gives up on the second draft of a block: in the mask before it or in the token itself."""

    def __init__(self, salt: int, where: str) -> None:
        super().__init__(salt)
        self.where, self.asked, self.raised = where, 0, 0

    def mask(self) -> bytes:
        self.asked += 1
        self.tire("mask")
        return super().mask()

    def accept(self, token: int) -> bool:
        self.tire("accept")
        return super().accept(token)

    def back(self, count: int) -> None:
        self.asked = 0
        super().back(count)

    def tire(self, where: str) -> None:
        # Tokens of the text itself come without masks in between.
        if where == self.where and self.asked > 1:
            self.raised += 1
            raise RuntimeError("too many states")


@pytest.mark.parametrize("acceptor", ["match", "reject"])
@pytest.mark.parametrize("where", ["mask", "accept"])
def test_a_parser_that_gives_up_on_drafts_ends_the_drafts_and_nothing_else(
    target: Target, where: str, acceptor: str
) -> None:
    request = Request((5, 9), sampling(0.0, 1), grammar=lambda: RuleGuide(1))
    free = Request((3, 4), SamplingOptions(max_tokens=24, ignore_eos=True))
    plain = [Engine(target).generate([one])[0] for one in (request, free)]
    texts = [[*one.prompt_ids, *done.token_ids] for one, done in zip((request, free), plain, strict=True)]
    guide = TiringGuide(1, where)
    tired = Request((5, 9), sampling(0.0, 1), grammar=lambda: guide)
    options = EngineOptions(drafts="max", acceptor=acceptor)
    done = Engine(target, ScriptedProposer(texts, right, 6), options).generate([tired, free])
    assert guide.raised > 3
    assert [item.token_ids for item in done] == [item.token_ids for item in plain]
    assert [item.failure for item in done] == ["", ""]
    # What was chosen before the parser gave up counts.
    most = 1 if where == "mask" else 2
    assert done[0].acceptance_length > most - 0.5
    assert done[0].acceptance_length <= most
    assert done[1].acceptance_length > 4


class BrokenGuide(RuleGuide):
    """Its parser gives up for good after some tokens: before the next one, on it, or by refusing it."""

    def __init__(self, salt: int, where: str, after: int) -> None:
        super().__init__(salt)
        self.where, self.after = where, after

    def mask(self) -> bytes:
        if self.where == "mask" and len(self.said) >= self.after:
            raise RuntimeError("too many states")
        return super().mask()

    def accept(self, token: int) -> bool:
        if len(self.said) >= self.after and self.where == "accept":
            raise RuntimeError("too many states")
        return super().accept(token) if len(self.said) < self.after else False


@pytest.mark.parametrize("drafts", ["right", "half right", "none"])
@pytest.mark.parametrize("after", [0, 1, 8])
@pytest.mark.parametrize("where", ["mask", "accept", "refuse"])
def test_a_parser_that_gives_up_on_a_text_ends_that_text_and_no_other(
    target: Target, where: str, after: int, drafts: str
) -> None:
    request = Request((5, 9), sampling(0.9, 1), grammar=lambda: RuleGuide(1))
    mate = Request((6, 9), sampling(0.9, 2), grammar=lambda: RuleGuide(2))
    plain = [list(Engine(target).generate([one])[0].token_ids) for one in (request, mate)]
    texts = [[5, 9, *plain[0]], [6, 9, *plain[1]]]
    script = right if drafts == "right" else random_draft(3, 0.6)
    broken = Request((5, 9), sampling(0.9, 1), grammar=lambda: BrokenGuide(1, where, after))
    engine = Engine(
        target,
        None if drafts == "none" else ScriptedProposer(texts, script, 6),
        EngineOptions(drafts="max"),
    )
    pieces = list(engine.stream([broken, mate]))
    done = engine.completions
    assert list(done[0].token_ids) == plain[0][:after]
    assert [token for piece in pieces if piece.index == 0 for token in piece.token_ids] == plain[0][:after]
    assert ("refused" if where == "refuse" else "too many states") in done[0].failure
    assert (list(done[1].token_ids), done[1].failure) == (plain[1], "")
