"""One training step's mathematics: a batch of blocks through the drafter to a loss; no optimiser or files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.core.options import TrainOptions
from slipstream.data.blocks import BlockBatch
from slipstream.model import Drafter
from slipstream.train.flex import MaskMaker, mask_maker
from slipstream.train.losses import (
    SlotScores,
    accepted_lengths,
    decay_weights,
    dpace_weights,
    expected_acceptance,
    reduced_vocabulary,
    slot_scores,
)
from slipstream.train.masks import training_masks

#: Logits held at once. The loss of so many is differentiated before the next are made, so that neither a
#: large vocabulary nor a large batch needs more memory; about the size of a CPU's outer cache is also the
#: fastest.
_LOGITS = 1 << 23


@dataclass(frozen=True)
class FrozenEnds:
    """The target's ends, which the drafter borrows and never trains.

    Attributes:
        embed: token ids to input embeddings, the target's own module.
        output_VD: rows of the output embedding.
    """

    embed: Callable[[Tensor], Tensor]
    output_VD: Tensor


class StepResult(NamedTuple):
    """Loss to differentiate, and what it says about acceptance; a tuple, so that FSDP finds the tensors.

    Attributes:
        loss: scalar, summed over the blocks of the batch.
        acceptance_BA: teacher-forced acceptance length per block, bonus included.
        real_BA: which blocks are not padding.
    """

    loss: Tensor
    acceptance_BA: Tensor
    real_BA: Tensor


class BlockLoss(nn.Module):
    """Drafter and loss as one module, as data-parallel wrappers want it.

    Args:
        drafter: whose parameters are trained.
        ends: of the target.
        options: loss settings.
        frequent: tokens always scored; None scores the whole vocabulary.
    """

    def __init__(
        self, drafter: Drafter, ends: FrozenEnds, options: TrainOptions, frequent: Tensor | None
    ) -> None:
        super().__init__()
        self.drafter = drafter
        self._ends, self._options, self._frequent = ends, options, frequent
        self._masks = mask_maker(options.attention, ends.output_VD.device)

    def forward(self, batch: BlockBatch, generator: torch.Generator | None = None) -> StepResult:
        """Summed loss of one batch.

        Args:
            batch: from `build_batch`.
            generator: of the feature noise.
        """
        options, width = self._options, self.drafter.config.target_width
        features_BLE = _noisy(batch.features_BLE.float(), options.feature_noise, width, generator)
        hidden_BAKD = block_hidden(self.drafter, self._ends, batch, features_BLE, self._masks)
        head = _Head(self.drafter, self._ends.output_VD, batch, self._frequent)
        total, lengths_N = _ChunkedLoss.apply(hidden_BAKD.flatten(0, 1), head, options)
        rows, anchors = batch.anchor_BA.shape
        return StepResult(total, lengths_N.unflatten(0, (rows, anchors)), batch.labelled_BAK[..., 0])


def block_hidden(
    drafter: Drafter,
    ends: FrozenEnds,
    batch: BlockBatch,
    features_BLE: Tensor,
    make_masks: MaskMaker = training_masks,
) -> Tensor:
    """Run every block of a batch; hidden states of the draft slots, shape [B, A, K, D]."""
    config, device = drafter.config, features_BLE.device
    rows, anchors = batch.anchor_BA.shape
    ids_BAT = batch.anchor_ids_BA[..., None].repeat(1, 1, config.block_size)
    ids_BAT[..., 1:] = config.mask_token_id
    position_BAT = batch.anchor_BA[..., None] + torch.arange(config.block_size, device=device)
    position_BL = torch.arange(features_BLE.shape[1], device=device).expand(rows, -1)
    masks = make_masks(config, batch.anchor_BA, batch.start_BA, features_BLE.shape[1])
    context = drafter.context_kv(features_BLE, position_BL)
    with torch.no_grad():
        x_BTD = ends.embed(ids_BAT.flatten(1)).to(features_BLE.dtype)
    hidden_BTD = drafter(x_BTD, position_BAT.flatten(1), context, masks)
    return hidden_BTD.unflatten(1, (anchors, config.block_size))[:, :, 1:]


@torch.no_grad()
def score_blocks(drafter: Drafter, ends: FrozenEnds, hidden_BAKD: Tensor, batch: BlockBatch) -> SlotScores:
    """Scores of every slot over the whole vocabulary, in chunks, with axes [BA, K]."""
    head = _Head(drafter, ends.output_VD, batch, None)
    hidden_NKD = hidden_BAKD.flatten(0, 1)
    parts = [head.scores(hidden_NKD[part], part, 0.0, "kl") for part in head.chunks(hidden_NKD)]
    return SlotScores(*(torch.cat([getattr(part, name) for part in parts]) for name in vars(parts[0])))


class _Head:
    """The output embedding over a (reduced) vocabulary with one batch's labels; blocks are numbered
    through.
    """

    def __init__(
        self, drafter: Drafter, output_VD: Tensor, batch: BlockBatch, frequent: Tensor | None
    ) -> None:
        self._drafter = drafter
        self.labelled_NK = batch.labelled_BAK.flatten(0, 1)
        self._label_NK = batch.label_ids_BAK.flatten(0, 1)
        self._top_NKJ = batch.top_ids_BAKJ.flatten(0, 1)
        self._top_logprobs_NKJ = batch.top_logprobs_BAKJ.flatten(0, 1)
        self._output_VD = output_VD
        if frequent is not None:
            vocabulary = reduced_vocabulary(frequent, self._label_NK, self._top_NKJ)
            self._output_VD = output_VD[vocabulary]
            self._label_NK = torch.searchsorted(vocabulary, self._label_NK)
            self._top_NKJ = torch.searchsorted(vocabulary, self._top_NKJ)

    def chunks(self, hidden_NKD: Tensor) -> list[slice]:
        """Runs of blocks whose logits may be held at once."""
        blocks, slots, _ = hidden_NKD.shape
        size = max(1, _LOGITS // (slots * len(self._output_VD)))
        return [slice(start, min(start + size, blocks)) for start in range(0, blocks, size)]

    def scores(self, hidden_NKD: Tensor, part: slice, soft_share: float, soft: Any) -> SlotScores:
        """Logits and losses of the blocks `part`, whose hidden states are given."""
        # One plain matrix product: with leading axes it would run as many small ones.
        flat = F.linear(hidden_NKD.flatten(0, 1), self._output_VD.to(hidden_NKD.dtype))
        logits_NKV = self._drafter.adjust_logits(flat).unflatten(0, hidden_NKD.shape[:2])
        return slot_scores(
            logits_NKV,
            self._label_NK[part],
            self._top_NKJ[part],
            self._top_logprobs_NKJ[part],
            soft_share,
            soft,
        )


class _ChunkedLoss(torch.autograd.Function):
    """The summed loss of all blocks; its derivative by the hidden states is taken chunk by chunk on the
    way.
    """

    @staticmethod
    def forward(ctx: Any, hidden_NKD: Tensor, head: _Head, options: TrainOptions) -> tuple[Tensor, Tensor]:
        gradient = torch.zeros_like(hidden_NKD)
        total = hidden_NKD.new_zeros((), dtype=torch.float32)
        lengths = []
        for part in head.chunks(hidden_NKD):
            with torch.enable_grad():
                chunk_NKD = hidden_NKD[part].detach().requires_grad_(ctx.needs_input_grad[0])
                loss, scores = _chunk_loss(chunk_NKD, part, head, options)
            if ctx.needs_input_grad[0]:
                (gradient[part],) = torch.autograd.grad(loss, chunk_NKD)
            total += loss.detach()
            lengths.append(accepted_lengths(scores.hit_BAK, head.labelled_NK[part]))
        ctx.save_for_backward(gradient)
        lengths_N = torch.cat(lengths)
        ctx.mark_non_differentiable(lengths_N)
        return total, lengths_N

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0], None, None


def _chunk_loss(
    hidden_NKD: Tensor, part: slice, head: _Head, options: TrainOptions
) -> tuple[Tensor, SlotScores]:
    """Summed loss of some blocks."""
    soft = "tv" if options.loss == "tv" else "kl"
    scores = head.scores(hidden_NKD, part, options.soft_share, soft)
    labelled_NK = head.labelled_NK[part]
    if options.loss == "acceptance":
        hard = scores.label_logprob_BAK * labelled_NK * (1 - options.soft_share)
        expected_N = expected_acceptance(scores.overlap_BAK, labelled_NK)
        return -(options.soft_share * expected_N.sum() + hard.sum()), scores
    if options.weighting == "dpace":
        weight_NK = dpace_weights(scores.label_logprob_BAK, labelled_NK)
    else:
        weight_NK = decay_weights(labelled_NK.shape[-1], options.gamma).to(labelled_NK.device) * labelled_NK
    return (weight_NK * scores.loss_BAK).sum(), scores


def _noisy(features_BLE: Tensor, share: float, width: int, generator: torch.Generator | None) -> Tensor:
    """Add noise of `share` times each tap's own root mean square; none at share 0."""
    if share == 0:
        return features_BLE
    taps = features_BLE.unflatten(-1, (-1, width))
    size = taps.square().mean(-1, keepdim=True).sqrt()
    noise = torch.randn(taps.shape, generator=generator).to(taps.device)
    return (taps + share * size * noise).flatten(-2)
