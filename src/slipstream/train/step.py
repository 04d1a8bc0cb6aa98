"""One training step's mathematics: a batch of blocks through the drafter to a loss; no optimiser or files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from slipstream.core.options import TrainOptions
from slipstream.data.blocks import BlockBatch
from slipstream.model import Drafter
from slipstream.train.losses import (
    SlotScores,
    accepted_lengths,
    decay_weights,
    dpace_weights,
    reduced_vocabulary,
    slot_scores,
)
from slipstream.train.masks import training_masks


@dataclass(frozen=True)
class FrozenEnds:
    """The target's ends, which the drafter borrows and never trains.

    Attributes:
        embed: token ids to input embeddings, the target's own module.
        output_VD: rows of the output embedding.
    """

    embed: Callable[[Tensor], Tensor]
    output_VD: Tensor


@dataclass(frozen=True)
class StepResult:
    """Loss to differentiate, and what it says about acceptance.

    Attributes:
        loss: scalar.
        acceptance_BA: teacher-forced acceptance length per block, bonus included.
        real_BA: which blocks are not padding.
    """

    loss: Tensor
    acceptance_BA: Tensor
    real_BA: Tensor


def block_hidden(drafter: Drafter, ends: FrozenEnds, batch: BlockBatch, features_BLE: Tensor) -> Tensor:
    """Run every block of a batch; hidden states of the draft slots, shape [B, A, K, D]."""
    config = drafter.config
    rows, anchors = batch.anchor_BA.shape
    ids_BAT = torch.full((rows, anchors, config.block_size), config.mask_token_id, dtype=torch.int64)
    ids_BAT[..., 0] = batch.anchor_ids_BA
    position_BAT = batch.anchor_BA[..., None] + torch.arange(config.block_size)
    position_BL = torch.arange(features_BLE.shape[1]).expand(rows, -1)
    masks = training_masks(config, batch.anchor_BA, batch.length_B, features_BLE.shape[1])
    context = drafter.context_kv(features_BLE, position_BL)
    with torch.no_grad():
        x_BTD = ends.embed(ids_BAT.flatten(1)).to(features_BLE.dtype)
    hidden_BTD = drafter(x_BTD, position_BAT.flatten(1), context, masks)
    return hidden_BTD.unflatten(1, (anchors, config.block_size))[:, :, 1:]


def run_step(
    drafter: Drafter, ends: FrozenEnds, batch: BlockBatch, options: TrainOptions, frequent: Tensor | None
) -> StepResult:
    """Loss of one batch.

    Args:
        drafter: in its training dtype.
        ends: of the target.
        batch: from `build_batch`.
        options: loss settings.
        frequent: tokens always scored; None scores the whole vocabulary.
    """
    features_BLE = _noisy(batch.features_BLE.float(), options.feature_noise, drafter.config.target_width)
    hidden_BAKD = block_hidden(drafter, ends, batch, features_BLE)
    scores = score_slots(drafter, ends, hidden_BAKD, batch, options.soft_share, frequent)
    labelled_BAK = batch.labelled_BAK
    if options.weighting == "dpace":
        weight_BAK = dpace_weights(scores.label_logprob_BAK, labelled_BAK)
    else:
        weight_BAK = decay_weights(labelled_BAK.shape[-1], options.gamma) * labelled_BAK
    # Divided by the number of blocks, not by the weights: a well-predicted block keeps its larger say.
    loss = (weight_BAK * scores.loss_BAK).sum() / labelled_BAK[..., 0].sum().clamp(min=1)
    return StepResult(loss, accepted_lengths(scores.hit_BAK, labelled_BAK), labelled_BAK[..., 0])


def score_slots(
    drafter: Drafter,
    ends: FrozenEnds,
    hidden_BAKD: Tensor,
    batch: BlockBatch,
    soft_share: float,
    frequent: Tensor | None,
) -> SlotScores:
    """Logits over the (reduced) vocabulary and the loss of every slot, padding included (weight 0 later)."""
    if frequent is None:
        head_VD, label_BAK, top_BAKJ = ends.output_VD, batch.label_ids_BAK, batch.top_ids_BAKJ
    else:
        vocabulary = reduced_vocabulary(frequent, batch.label_ids_BAK, batch.top_ids_BAKJ)
        head_VD = ends.output_VD[vocabulary]
        label_BAK = torch.searchsorted(vocabulary, batch.label_ids_BAK)
        top_BAKJ = torch.searchsorted(vocabulary, batch.top_ids_BAKJ)
    # One plain matrix product: with leading axes it would run as many small ones.
    flat = F.linear(hidden_BAKD.flatten(0, 2), head_VD.to(hidden_BAKD.dtype))
    logits_BAKV = drafter.adjust_logits(flat).unflatten(0, hidden_BAKD.shape[:3])
    return slot_scores(logits_BAKV, label_BAK, top_BAKJ, batch.top_logprobs_BAKJ, soft_share)


def _noisy(features_BLE: Tensor, share: float, width: int) -> Tensor:
    """Add noise of `share` times each tap's own root mean square; none at share 0."""
    if share == 0:
        return features_BLE
    taps = features_BLE.unflatten(-1, (-1, width))
    size = taps.square().mean(-1, keepdim=True).sqrt()
    return (taps + share * size * torch.randn_like(taps)).flatten(-2)
