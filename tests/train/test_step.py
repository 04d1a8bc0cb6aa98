"""The step's chunked loss against one written down plainly, value and gradient."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from slipstream.core.options import TrainOptions
from slipstream.data.blocks import build_batch, draw_anchors, pack
from slipstream.model import Drafter
from slipstream.train import step
from slipstream.train.losses import dpace_weights, expected_acceptance, slot_scores
from slipstream.train.step import BlockLoss, block_hidden
from tests.train.killing import ends
from tests.train.tiny import random_document, tiny_config


def batch_of(lengths: tuple[int, ...] = (30, 14, 12)):
    rows = pack([random_document(length, 3, seed=length) for length in lengths])
    return build_batch(rows, [draw_anchors(row.document, 6, None) for row in rows], 3)


def drafter_of() -> Drafter:
    torch.manual_seed(2)
    return Drafter(tiny_config())


@pytest.mark.parametrize("chunk", [1, 700, 1 << 23])
@pytest.mark.parametrize("loss", ["kl", "tv", "acceptance"])
def test_chunks_give_the_plain_loss_and_its_gradient(chunk, loss, monkeypatch) -> None:
    monkeypatch.setattr(step, "_LOGITS", chunk)
    options = TrainOptions(loss=loss, soft_share=0.6)
    batch, drafter = batch_of(), drafter_of()
    result = BlockLoss(drafter, ends(), options, None)(batch)
    (2 * result.loss).backward()
    mine = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    hidden = block_hidden(drafter, ends(), batch, batch.features_BLE)
    logits = F.linear(hidden, ends().output_VD)
    scores = slot_scores(
        logits,
        batch.label_ids_BAK,
        batch.top_ids_BAKJ,
        batch.top_logprobs_BAKJ,
        0.6,
        "tv" if loss == "tv" else "kl",
    )
    if loss == "acceptance":
        hard = (scores.label_logprob_BAK * batch.labelled_BAK).sum()
        plain = -(0.6 * expected_acceptance(scores.overlap_BAK, batch.labelled_BAK).sum() + 0.4 * hard)
    else:
        plain = (dpace_weights(scores.label_logprob_BAK, batch.labelled_BAK) * scores.loss_BAK).sum()
    torch.testing.assert_close(result.loss, plain)
    (2 * plain).backward()
    for name, parameter in drafter.named_parameters():
        torch.testing.assert_close(mine[name], parameter.grad, atol=1e-5, rtol=1e-4)


def test_packed_documents_do_not_leak_into_one_another() -> None:
    """The same blocks, packed with a neighbour or alone, have the same hidden states."""
    drafter = drafter_of()
    documents = [random_document(length, 3, seed=length) for length in (30, 14, 12)]
    rows = pack(documents)
    assert len(rows) == 2
    anchors = [draw_anchors(row.document, 99, None) for row in rows]
    packed = build_batch(rows, anchors, 3)
    together = block_hidden(drafter, ends(), packed, packed.features_BLE)
    for b, row in enumerate(rows):
        for document, start in row.parts:
            own_A = draw_anchors(document, 99, None)
            single = build_batch(pack([document]), [own_A], 3)
            alone = block_hidden(drafter, ends(), single, single.features_BLE)
            places = [anchors[b].tolist().index(anchor + start) for anchor in own_A.tolist()]
            torch.testing.assert_close(together[b, places], alone[0], atol=2e-5, rtol=1e-4)


def test_a_reduced_vocabulary_that_holds_all_tokens_changes_nothing() -> None:
    options, batch, drafter = TrainOptions(), batch_of(), drafter_of()
    whole = BlockLoss(drafter, ends(), options, None)(batch)
    reduced = BlockLoss(drafter, ends(), options, torch.arange(64))(batch)
    torch.testing.assert_close(whole.loss, reduced.loss)
    assert torch.equal(whole.acceptance_BA, reduced.acceptance_BA)


def test_feature_noise_is_the_generators() -> None:
    options, batch, drafter = replace(TrainOptions(), feature_noise=0.2), batch_of(), drafter_of()
    module = BlockLoss(drafter, ends(), options, None)
    losses = [module(batch, torch.Generator().manual_seed(seed)).loss.item() for seed in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]
