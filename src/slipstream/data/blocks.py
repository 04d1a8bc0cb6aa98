"""Anchors and blocks: from documents to the padded tensors of one training step.

A block is [anchor, MASK x (T-1)]; slot k predicts the token AT its own position, anchor + k (DFlash, arXiv
2602.06036, section 4.2). Anchors are drawn anew each time a document is visited.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.data.features import Document


@dataclass(frozen=True)
class BlockBatch:
    """One step's tensors; padded entries are False in `labelled_BAK`.

    Attributes:
        features_BLE: context features, zero-padded.
        length_B: tokens of each document.
        anchor_BA: positions of the anchors, ascending.
        anchor_ids_BA: the tokens there.
        label_ids_BAK: the token each draft slot should say.
        labelled_BAK: whether that slot has a label (inside the document, real anchor).
        top_ids_BAKJ: the target's likeliest tokens for that slot.
        top_logprobs_BAKJ: their log-probabilities.
    """

    features_BLE: Tensor
    length_B: Tensor
    anchor_BA: Tensor
    anchor_ids_BA: Tensor
    label_ids_BAK: Tensor
    labelled_BAK: Tensor
    top_ids_BAKJ: Tensor
    top_logprobs_BAKJ: Tensor


def draw_anchors(document: Document, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw distinct anchor positions from the answer, ascending.

    An anchor is a committed answer token with at least one token after it: positions prompt_length to
    length - 2. With no generator the anchors are spread evenly (evaluation).

    Returns:
        anchor_A with min(count, candidates) entries.
    """
    first, last = document.prompt_length, len(document) - 2
    candidates = max(0, last - first + 1)
    take = min(count, candidates)
    if generator is None:
        return first + (torch.arange(take) * candidates) // max(take, 1)
    return first + torch.randperm(candidates, generator=generator)[:take].sort().values


def build_batch(documents: Sequence[Document], anchors: Sequence[Tensor], num_drafts: int) -> BlockBatch:
    """Gather labels and teacher rows for every slot and pad documents to one length.

    Args:
        documents: B documents.
        anchors: one anchor_A per document; they may differ in number.
        num_drafts: K, draft slots per block.
    """
    rows = [
        _document_blocks(doc, anchor_A, num_drafts) for doc, anchor_A in zip(documents, anchors, strict=True)
    ]
    most = max(len(anchor_A) for anchor_A in anchors)
    longest = max(len(doc) for doc in documents)
    features_BLE = torch.stack([_pad(doc.features_LE, longest) for doc in documents])
    stacked = [torch.stack([_pad(row[part], most) for row in rows]) for part in range(6)]
    length_B = torch.tensor([len(doc) for doc in documents])
    return BlockBatch(features_BLE, length_B, *stacked)


def _document_blocks(document: Document, anchor_A: Tensor, num_drafts: int) -> tuple[Tensor, ...]:
    """Per block: anchor, its token, labels, validity, teacher ids and log-probabilities."""
    position_AK = anchor_A[:, None] + torch.arange(1, num_drafts + 1)
    labelled_AK = position_AK < len(document)
    inside_AK = position_AK.clamp(max=len(document) - 1)
    return (
        anchor_A,
        document.tokens_L[anchor_A],
        document.tokens_L[inside_AK],
        labelled_AK,
        document.top_ids_LJ[inside_AK - 1],
        document.top_logprobs_LJ[inside_AK - 1],
    )


def _pad(tensor: Tensor, length: int) -> Tensor:
    """Zero-pad the first axis up to `length`."""
    if tensor.shape[0] == length:
        return tensor
    padding = tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, padding])
