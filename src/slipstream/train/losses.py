"""The training losses: soft and hard labels over a (reduced) vocabulary, weighted by slot; pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class SlotScores:
    """Per draft slot: loss, and whether the drafter's first choice is the label.

    Attributes:
        loss_BAK: unweighted loss; in nats, or in probability for total variation.
        overlap_BAK: sum over the candidates of min(target, drafter): the chance that a sampled draft is
            accepted.
        label_logprob_BAK: log-probability that the drafter gives the label.
        hit_BAK: first choice equals the label.
    """

    loss_BAK: Tensor
    overlap_BAK: Tensor
    label_logprob_BAK: Tensor
    hit_BAK: Tensor


def decay_weights(num_drafts: int, gamma: float) -> Tensor:
    """Weights exp(-(k-1)/gamma) of slots k = 1..K, shape [K] (DFlash, arXiv 2602.06036, section 4.2)."""
    return torch.exp(-torch.arange(num_drafts, dtype=torch.float32) / gamma)


def dpace_weights(label_logprob_BAK: Tensor, labelled_BAK: Tensor, alpha: float = 0.5) -> Tensor:
    """How much later acceptance hangs on slot k (D-PACE, arXiv 2605.18810).

    q~ = (1-alpha) q + alpha, prefix P_i = prod_{m<=i} q~_m, w_j = sum_{i>=j} P_i, without gradient; slots
    with no label count as q~ = 1 in the product and add nothing to the sum.

    Args:
        label_logprob_BAK: the drafter's log-probability of each label.
        labelled_BAK: which slots have a label.
        alpha: 0 takes the drafter at its word, 1 ignores it.
    """
    with torch.no_grad():
        q_BAK = (1 - alpha) * label_logprob_BAK.exp() + alpha
        prefix_BAK = torch.where(labelled_BAK, q_BAK, 1.0).cumprod(-1) * labelled_BAK
        return prefix_BAK.flip(-1).cumsum(-1).flip(-1)


def reduced_vocabulary(frequent: Tensor, label_ids: Tensor, top_ids: Tensor) -> Tensor:
    """The sorted union of frequent tokens and everything that this step's labels name.

    Training over it instead of the whole vocabulary saves most of the head; decoding keeps the full head.
    """
    return torch.cat([frequent, label_ids.flatten(), top_ids.flatten()]).unique()


def slot_scores(
    logits_BAKV: Tensor,
    label_BAK: Tensor,
    top_BAKJ: Tensor,
    top_logprobs_BAKJ: Tensor,
    soft_share: float,
    soft: Literal["kl", "tv"] = "kl",
) -> SlotScores:
    """Loss per slot: soft_share * distance(target, drafter) + (1 - soft_share) * cross-entropy.

    The target is its stored top-J candidates, renormalised to sum to one. The distance is KL(target ||
    drafter), or the total variation 1 - sum min(target, drafter), which is the chance that a sampled draft is
    rejected (Leviathan et al., arXiv 2211.17192, section 3.2).

    Args:
        logits_BAKV: drafter logits over the (reduced) vocabulary.
        label_BAK: label as index into V.
        top_BAKJ: candidates as indices into V.
        top_logprobs_BAKJ: the target's log-probabilities of the candidates.
        soft_share: 0 hard labels only, 1 soft labels only.
        soft: which distance.
    """
    logprob_BAKV = F.log_softmax(logits_BAKV.float(), dim=-1)
    label_logprob_BAK = logprob_BAKV.gather(-1, label_BAK[..., None])[..., 0]
    teacher_BAKJ = F.log_softmax(top_logprobs_BAKJ, dim=-1)
    drafter_BAKJ = logprob_BAKV.gather(-1, top_BAKJ)
    overlap_BAK = torch.minimum(teacher_BAKJ.exp(), drafter_BAKJ.exp()).sum(-1)
    if soft == "tv":
        distance_BAK = 1 - overlap_BAK
    else:
        distance_BAK = (teacher_BAKJ.exp() * (teacher_BAKJ - drafter_BAKJ)).sum(-1)
    loss_BAK = soft_share * distance_BAK - (1 - soft_share) * label_logprob_BAK
    hit_BAK = logits_BAKV.argmax(-1) == label_BAK
    return SlotScores(loss_BAK, overlap_BAK, label_logprob_BAK, hit_BAK)


def expected_acceptance(overlap_BAK: Tensor, labelled_BAK: Tensor) -> Tensor:
    """Expected number of accepted drafts of every block, sum over k of prod over j <= k of the overlap, shape
    [BA].

    Each overlap is the chance that a draft sampled at its slot is accepted, taken as independent of the
    others (Leviathan et al., arXiv 2211.17192, section 3.3, with a rate per slot). Slots with no label end
    the block.
    """
    return (overlap_BAK * labelled_BAK).cumprod(-1).sum(-1)


def accepted_lengths(hit_BAK: Tensor, labelled_BAK: Tensor) -> Tensor:
    """Leading hits plus the bonus token per block, shape [A]: teacher-forced acceptance length."""
    return (hit_BAK & labelled_BAK).long().cumprod(-1).sum(-1) + 1
