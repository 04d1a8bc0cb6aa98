"""Wrong readings: each is what its name says, and teacher-forced drafts are those of the real decoder."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.bench import mistakes
from slipstream.bench.mistakes import answer, diagnose, draft_after, wrong_readings
from slipstream.core.command_options import InspectOptions
from slipstream.decode import DraftProposer, Proposal
from slipstream.model import DraftConfig, Drafter
from slipstream.target import Target
from slipstream.testing import tiny_config, tiny_target

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
    found = draft_after(target, drafter, ids, anchors)
    filled = target.prefill(ids[None], torch.tensor([20]), target.new_cache(1, 20))
    names = drafter.draft_vocabulary

    def chooser(logits: Tensor, position: Tensor, ids_of: Tensor | None) -> Proposal:
        best = logits.argmax(-1)
        return Proposal(best if names is None else names[best])

    for row, anchor in enumerate(anchors.tolist()):
        proposer = DraftProposer(target, drafter)
        proposer.begin(1, 32)
        proposer.extend(filled.features_BLE[:, :anchor], torch.arange(anchor)[None], anchor)
        proposal = proposer.propose(ids[anchor][None], torch.tensor([anchor]), 4, anchor + 5, chooser)
        assert proposal.drafts_BK[0].tolist() == found[row].tolist()


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


def test_only_mistakes_that_can_be_made(target: Target) -> None:
    full = wrong_readings(make(target, target_layer_ids=(0, 3)))
    assert list(full) == [
        "taps one layer too high",
        "causal blocks",
        "mask token 0",
        "rope over neighbouring channels",
        "first draft at the anchor's slot",
    ]
    sliding = wrong_readings(make(target, causal=(True, False), windows=(4, None), mask_token_id=0))
    assert {"bidirectional blocks", "causal blocks", "window ignored", "mask token 63"} <= set(sliding)
    assert sliding["window ignored"].config.windows == (None, None)
    assert full["taps one layer too high"].config.target_layer_ids == (1, 4)


def test_a_diagnosis_counts_what_is_right(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scripted drafter that is right for two tokens unless it is read causally, then for four."""
    drafter = make(target)
    options = InspectOptions(answer_tokens=12, anchors=5)
    texts = [[1, 2, 3], [9, 8]]
    answers = {tuple(one.ids_L.tolist()): one for one in answer(target, texts, options)}

    def script(_: Target, read: Drafter, ids: Tensor, anchors: Tensor) -> Tensor:
        assert tuple(ids.tolist()) in answers
        right = ids[anchors[:, None] + torch.arange(1, 5)].clone()
        good = 4 if all(read.config.causal) else 2
        right[:, good:] = (right[:, good:] + 1) % target.info.vocab_size
        return right

    monkeypatch.setattr(mistakes, "draft_after", script)
    taps = target.tap_ids
    found = diagnose(target, drafter, texts, options)
    assert target.tap_ids == taps
    assert found.stated.acceptance_length == 3.0
    assert found.stated.by_position == (1.0, 1.0, 0.0, 0.0)
    assert len(found.stated.lengths) == 10
    assert found.better is not None
    assert (found.better.name, found.better.acceptance_length) == ("causal blocks", 5.0)
    same = diagnose(target, make(target, causal=(True, True)), texts, options)
    assert same.better is None
