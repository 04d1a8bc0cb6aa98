"""Losses and weights against slow loops."""

from __future__ import annotations

import math

import pytest
import torch

from slipstream.train.losses import (
    accepted_lengths,
    decay_weights,
    dpace_weights,
    expected_acceptance,
    reduced_vocabulary,
    slot_scores,
)


def test_decay_weights_follow_the_paper() -> None:
    weights = decay_weights(5, 4.0)
    for k in range(1, 6):
        assert weights[k - 1] == pytest.approx(math.exp(-(k - 1) / 4.0))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_dpace_weights_against_loops(alpha: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logprob = -torch.rand(6, 5, generator=generator) * 3
    labelled = torch.arange(5)[None] < torch.tensor([5, 4, 3, 2, 1, 0])[:, None]
    weights = dpace_weights(logprob, labelled, alpha)
    for block in range(6):
        prefix, products = 1.0, []
        for slot in range(5):
            if labelled[block, slot]:
                prefix *= (1 - alpha) * math.exp(logprob[block, slot]) + alpha
                products.append(prefix)
            else:
                products.append(0.0)
        for slot in range(5):
            assert weights[block, slot] == pytest.approx(sum(products[slot:]), abs=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_slot_scores_against_loops(share: float) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 4, 11, generator=generator)
    labels = torch.randint(0, 11, (3, 4), generator=generator)
    top = torch.stack([torch.randperm(11, generator=generator)[:3] for _ in range(12)]).view(3, 4, 3)
    top_logprobs = torch.randn(3, 4, 3, generator=generator)
    scores = slot_scores(logits, labels, top, top_logprobs, share)
    for a in range(3):
        for k in range(4):
            total = sum(math.exp(v) for v in logits[a, k].tolist())
            logq = [v - math.log(total) for v in logits[a, k].tolist()]
            mass = sum(math.exp(v) for v in top_logprobs[a, k].tolist())
            kl = 0.0
            for j in range(3):
                p = math.exp(top_logprobs[a, k, j]) / mass
                kl += p * (math.log(p) - logq[top[a, k, j]])
            label = int(labels[a, k])
            assert scores.loss_BAK[a, k] == pytest.approx(share * kl - (1 - share) * logq[label], abs=1e-5)
            assert bool(scores.hit_BAK[a, k]) == (max(range(11), key=lambda v: logq[v]) == label)


def test_soft_loss_is_zero_only_at_the_targets_own_distribution() -> None:
    logprobs = torch.tensor([[[0.5, 0.3, 0.2]]]).log()
    top = torch.tensor([[[2, 0, 1]]])
    logits = torch.full((1, 1, 5), -40.0)
    logits[0, 0, [2, 0, 1]] = logprobs[0, 0]
    assert slot_scores(logits, torch.tensor([[2]]), top, logprobs, 1.0).loss_BAK.item() == pytest.approx(
        0, abs=1e-6
    )
    logits[0, 0, 4] = 0.0
    assert slot_scores(logits, torch.tensor([[2]]), top, logprobs, 1.0).loss_BAK.item() > 0.5


def test_accepted_lengths_count_leading_hits_and_the_bonus() -> None:
    hits = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 1], [1, 1, 1]]).bool()
    labelled = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    assert accepted_lengths(hits, labelled).tolist() == [4, 2, 1, 2]


def test_reduced_vocabulary_holds_every_label() -> None:
    vocabulary = reduced_vocabulary(
        torch.tensor([7, 3]), torch.tensor([[9, 3]]), torch.tensor([[[1, 7], [2, 9]]])
    )
    assert vocabulary.tolist() == [1, 2, 3, 7, 9]


def test_total_variation_and_overlap_against_loops() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2, 3, 9, generator=generator)
    labels = torch.randint(0, 9, (2, 3), generator=generator)
    top = torch.stack([torch.randperm(9, generator=generator)[:4] for _ in range(6)]).view(2, 3, 4)
    top_logprobs = torch.randn(2, 3, 4, generator=generator)
    scores = slot_scores(logits, labels, top, top_logprobs, 1.0, "tv")
    for a in range(2):
        for k in range(3):
            q = [math.exp(v) for v in logits[a, k].tolist()]
            p = [0.0] * 9
            for j in range(4):
                p[int(top[a, k, j])] = math.exp(top_logprobs[a, k, j])
            overlap = sum(min(x / sum(p), y / sum(q)) for x, y in zip(p, q, strict=True))
            distance = 0.5 * sum(abs(x / sum(p) - y / sum(q)) for x, y in zip(p, q, strict=True))
            assert scores.overlap_BAK[a, k] == pytest.approx(overlap, abs=1e-6)
            assert scores.loss_BAK[a, k] == pytest.approx(distance, abs=1e-6)


def test_expected_acceptance_is_the_mean_of_simulated_rounds() -> None:
    overlap = torch.tensor([[0.9, 0.5, 0.8], [0.3, 1.0, 0.2]])
    labelled = torch.tensor([[True, True, True], [True, True, False]])
    expected = expected_acceptance(overlap, labelled)
    assert expected.tolist() == pytest.approx([0.9 + 0.45 + 0.36, 0.3 + 0.3])
    coins = torch.rand(200_000, 3, generator=torch.Generator().manual_seed(0)) < overlap[0]
    assert coins.long().cumprod(-1).sum(-1).float().mean() == pytest.approx(float(expected[0]), abs=0.01)
