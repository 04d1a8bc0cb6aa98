"""Wrong readings: each is what its name says, and teacher-forced drafts are those of the real decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.bench import mistakes
from slipstream.bench.mistakes import (
    Score,
    as_read,
    diagnose,
    draft_after,
    mask_candidates,
    wrong_readings,
)
from slipstream.core.command_options import InspectOptions
from slipstream.decode import DraftProposer, Proposal
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.testing import tiny_config, tiny_target
from tests.tiny import tiny_tokenizer

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "sliding": {"causal": (True, False), "windows": (4, None)},
    "anchor": {"from_anchor": True},
}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(tiny_config(num_hidden_layers=6), seed=3, spread=0.3)


def make(target: Target, **changes: Any) -> Drafter:
    config = DraftConfig.for_target(target.info, num_layers=2, block_size=5, num_taps=2)
    torch.manual_seed(4)
    drafter = Drafter(replace(config, **changes))
    for parameter in drafter.parameters():
        torch.nn.init.normal_(parameter, mean=float(parameter.ndim == 1), std=0.25)
    return drafter.eval().requires_grad_(False)


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_teacher_forced_drafts_are_those_of_decoding(target: Target, kind: str, reduced: bool) -> None:
    drafter = make(target, **KINDS[kind])
    if reduced:
        drafter.draft_vocabulary = torch.arange(0, target.info.vocab_size, 3)
    target.set_taps(drafter.config.target_layer_ids)
    ids = torch.randint(0, target.info.vocab_size, (20,), generator=torch.Generator().manual_seed(1))
    anchors = torch.tensor([1, 7, 12])
    filled = target.prefill(ids[None], torch.tensor([20]), target.new_cache(1, 20))
    found, log_p = draft_after(target, drafter, ids, anchors, filled.features_BLE)
    names = drafter.draft_vocabulary
    seen: list[Tensor] = []

    def chooser(logits: Tensor, position: Tensor, ids_of: Tensor | None) -> Proposal:
        seen.append(logits[0])
        best = logits.argmax(-1)
        return Proposal(best if names is None else names[best])

    for row, anchor in enumerate(anchors.tolist()):
        proposer = DraftProposer(target, drafter)
        proposer.begin(1, 32)
        proposer.extend(filled.features_BLE[:, :anchor], torch.arange(anchor)[None], anchor)
        proposal = proposer.propose(ids[anchor][None], torch.tensor([anchor]), 4, anchor + 5, chooser)
        assert proposal.drafts_BK[0].tolist() == found[row].tolist()
        known = list(range(target.info.vocab_size)) if names is None else names.tolist()
        for slot, token in enumerate(ids[anchor + 1 : anchor + 5].tolist()):
            expected = seen[-1][slot].log_softmax(-1)[known.index(token)] if token in known else 0.0
            assert float(log_p[row, slot]) == pytest.approx(float(expected), abs=1e-4)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Neighbouring channels, one pair after the other."""
    out = torch.empty_like(x)
    half = x.shape[-1] // 2
    for pair in range(half):
        a, b = x[..., 2 * pair], x[..., 2 * pair + 1]
        c, s = cos[..., pair], sin[..., pair]
        out[..., 2 * pair], out[..., 2 * pair + 1] = a * c - b * s, b * c + a * s
    return out


def test_turned_weights_are_the_other_rotation(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = make(target)
    turned = wrong_readings(drafter)["rope over neighbouring channels"]
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, 6, drafter.config.feature_width, generator=generator)
    x = torch.randn(1, 5, drafter.config.width, generator=generator)

    def run(one: Drafter) -> Tensor:
        context = one.context_kv(features, torch.arange(6)[None])
        mask = torch.ones(1, 1, 5, 11, dtype=torch.bool)
        return one(x, torch.arange(6, 11)[None], context, (mask, mask))

    by_weights, plain = run(turned), run(drafter)
    monkeypatch.setattr("slipstream.model.drafter.rotate", interleaved)
    assert (by_weights - run(drafter)).abs().max() < 1e-4
    assert (by_weights - plain).abs().max() > 1e-2
    restored = wrong_readings(turned)["rope channels put apart once too often"]
    assert all(torch.equal(a, b) for a, b in zip(restored.parameters(), drafter.parameters(), strict=True))


def test_only_mistakes_that_can_be_made(target: Target) -> None:
    full = wrong_readings(make(target, target_layer_ids=(0, 3)))
    assert list(full) == [
        "taps one layer too high",
        "causal blocks",
        "mask token 0",
        "rope over neighbouring channels",
        "rope channels put apart once too often",
        "first draft at the anchor's slot",
    ]
    sliding = wrong_readings(make(target, causal=(True, False), windows=(4, None), mask_token_id=0))
    assert {"bidirectional blocks", "causal blocks", "window ignored", "mask token 63"} <= set(sliding)
    assert "causal sliding and bidirectional full layers" not in sliding, "it is stated so"
    causal = wrong_readings(make(target, causal=(True, True), windows=(4, None)))
    assert causal["causal sliding and bidirectional full layers"].config.causal == (True, False)
    assert not [name for name in full if "sliding" in name], "without windows it is the bidirectional reading"
    assert sliding["window ignored"].config.windows == (None, None)
    assert full["taps one layer too high"].config.target_layer_ids == (1, 4)


def test_the_targets_rope_is_a_reading_where_it_differs(target: Target) -> None:
    theta = target.info.rope_theta
    assert not [name for name in wrong_readings(make(target), rope_theta=theta) if "theta" in name]
    made = wrong_readings(make(target, rope_theta=theta / 4), rope_theta=theta)
    assert made[f"the target's rope theta {theta:g}"].config.rope_theta == theta


def script(target: Target, good: Callable[[DraftConfig], int], log_p: Callable[[DraftConfig], float]) -> Any:
    """A drafter whose right tokens and whose certainty depend on how it is read."""

    def run(
        _: Target, read: Drafter, ids: Tensor, anchors: Tensor, features: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert features.shape[:2] == (1, len(ids))
        right = ids[anchors[:, None] + torch.arange(1, 5)].clone()
        right[:, good(read.config) :] = (right[:, good(read.config) :] + 1) % target.info.vocab_size
        noise = (anchors % 3).float()[:, None] * 0.01
        return right, log_p(read.config) + noise.expand(-1, 4)

    return run


OPTIONS = InspectOptions(answer_tokens=16, anchors=10)
TEXTS = [[1, 2, 3], [9, 8]]


def test_a_diagnosis_counts_what_is_right(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Right for two tokens unless it is read causally, then for four."""
    scripted = script(target, lambda read: 4 if all(read.causal) else 2, lambda read: -1.0)
    monkeypatch.setattr(mistakes, "draft_after", scripted)
    taps = target.tap_ids
    found = diagnose(target, make(target), TEXTS, OPTIONS)
    assert target.tap_ids == taps
    assert found.stated.acceptance_length == 3.0
    assert found.stated.by_position == (1.0, 1.0, 0.0, 0.0)
    assert found.stated.mean_log_p == pytest.approx(-0.99, abs=0.005)
    assert len(found.stated.lengths) == 20
    assert found.better is not None
    assert (found.better.name, found.better.acceptance_length) == ("causal blocks", 5.0)
    same = diagnose(target, make(target, causal=(True, True)), TEXTS, OPTIONS)
    assert same.better is None


def test_likelihood_tells_readings_apart_that_accept_the_same(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted = script(target, lambda read: 2, lambda read: -1.0 if read.target_layer_ids == (1, 4) else -1.2)
    monkeypatch.setattr(mistakes, "draft_after", scripted)
    found = diagnose(target, make(target, target_layer_ids=(0, 3)), TEXTS, OPTIONS)
    assert found.better is not None
    assert found.better.name == "taps one layer too high"
    assert found.better.drafter is not None
    assert found.better.drafter.config.target_layer_ids == (1, 4)
    likelier_but_worse = script(
        target,
        lambda read: 1 if read.target_layer_ids == (1, 4) else 2,
        lambda read: -1.0 if read.target_layer_ids == (1, 4) else -1.2,
    )
    monkeypatch.setattr(mistakes, "draft_after", likelier_but_worse)
    assert diagnose(target, make(target, target_layer_ids=(0, 3)), TEXTS, OPTIONS).better is None


def test_the_likeliest_mask_token_is_tried(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted = script(
        target,
        lambda read: 3 if read.mask_token_id == 17 else 0,
        lambda read: -float(abs(read.mask_token_id - 17)),
    )
    monkeypatch.setattr(mistakes, "draft_after", scripted)
    drafter = make(target, mask_token_id=5)
    found = diagnose(target, drafter, TEXTS, OPTIONS, mask_ids=(5, 40, 17, 16))
    assert found.better is not None
    assert found.better.name == "mask token 17"
    mended = as_read(drafter, found.better)
    assert mended.config == replace(drafter.config, mask_token_id=17)
    assert diagnose(target, mended, TEXTS, OPTIONS, mask_ids=(5, 40, 17, 16)).better is None


def test_every_reading_can_be_written(target: Target) -> None:
    drafter = make(target, windows=(4, None), rope_theta=17.0)
    for name, read in wrong_readings(drafter, 9, 23.0).items():
        again = as_read(drafter, Score(name, (1,), (0.0,), (0.0,), read))
        assert again.config == read.config
        pairs = zip(again.parameters(), read.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    with pytest.raises(ValueError, match="no reading"):
        as_read(drafter, Score("no chat template", (1,), (0.0,), (0.0,), None))


def test_candidates_for_the_mask() -> None:
    tokenizer = tiny_tokenizer()
    found = mask_candidates(tokenizer, len(tokenizer) + 4)
    names = {number: str(token) for number, token in tokenizer.added_tokens_decoder.items()}
    assert found[:3] == (len(tokenizer), len(tokenizer) + 3, 0)
    assert names[found[3]] == "<|mask|>"
    assert set(names) <= set(found)
    assert max(mask_candidates(tokenizer, len(tokenizer))) == len(tokenizer) - 1
