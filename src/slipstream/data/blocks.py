"""Rows, anchors and blocks: from documents to the padded tensors of one training step.

Short documents share a row and never see one another. A block is [anchor, MASK x (T-1)]; slot k predicts the
token AT its own position, anchor + k (DFlash, arXiv 2602.06036, section 4.2). Anchors are drawn anew at every
visit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from slipstream.data.features import Document


@dataclass(frozen=True)
class Row:
    """Documents one after another.

    Attributes:
        document: all of them joined; answers are numbered through.
        start_L: first position of the document that a token belongs to.
        parts: the documents and where each begins.
    """

    document: Document
    start_L: Tensor
    parts: tuple[tuple[Document, int], ...]


@dataclass(frozen=True)
class BlockBatch:
    """One step's tensors; padded entries are False in `labelled_BAK`.

    Attributes:
        features_BLE: context features, zero-padded.
        start_BA: first position of the document that an anchor belongs to.
        anchor_BA: positions of the anchors, ascending.
        anchor_ids_BA: the tokens there.
        label_ids_BAK: the token each draft slot should say.
        labelled_BAK: whether that slot has a label (inside the anchor's answer, real anchor).
        top_ids_BAKJ: the target's likeliest tokens for that slot.
        top_logprobs_BAKJ: their log-probabilities.
    """

    features_BLE: Tensor
    start_BA: Tensor
    anchor_BA: Tensor
    anchor_ids_BA: Tensor
    label_ids_BAK: Tensor
    labelled_BAK: Tensor
    top_ids_BAKJ: Tensor
    top_logprobs_BAKJ: Tensor

    @property
    def blocks(self) -> int:
        """Blocks with a label, padding left out."""
        return int(self.labelled_BAK[..., 0].sum())

    def to(self, device: torch.device) -> BlockBatch:
        """The same on a device; the copies may overlap with computation."""
        return BlockBatch(*(getattr(self, f.name).to(device, non_blocking=True) for f in fields(self)))


def cut(document: Document, longest: int, generator: torch.Generator | None) -> Document:
    """A part of a document of at most `longest` tokens, around a randomly drawn anchor.

    Three quarters of the part lie before the anchor, as it is context that a block needs. With no generator
    the part is the document's last.
    """
    if len(document) <= longest:
        return document
    candidate_A = anchor_candidates(document.answer_L)
    start = len(document) - longest
    if generator is not None and len(candidate_A):
        drawn = int(candidate_A[torch.randint(len(candidate_A), (), generator=generator)])
        start = max(0, min(drawn - longest * 3 // 4, start))
    return document.window(start, start + longest)


def pack(documents: Sequence[Document]) -> list[Row]:
    """Put documents into rows no longer than the longest of them: first fit, longest first."""
    capacity = max(map(len, documents))
    rows: list[list[Document]] = []
    for document in sorted(documents, key=len, reverse=True):
        fitting = (row for row in rows if sum(map(len, row)) + len(document) <= capacity)
        row = next(fitting, None)
        if row is None:
            rows.append([document])
        else:
            row.append(document)
    return [_joined(row) for row in rows]


def _joined(documents: Sequence[Document]) -> Row:
    """One row; a later document's answers get numbers of their own."""
    answers, starts = [], []
    used = place = 0
    for document in documents:
        answers.append(torch.where(document.answer_L > 0, document.answer_L.long() + used, 0))
        starts.append(torch.full((len(document),), place))
        used, place = max(used, int(answers[-1].max())), place + len(document)
    parts = [
        torch.cat([getattr(document, name) for document in documents])
        for name in ("tokens_L", "features_LE", "top_ids_LJ", "top_logprobs_LJ")
    ]
    first = [int(start_L[0]) for start_L in starts]
    return Row(
        Document(parts[0], torch.cat(answers), *parts[1:]),
        torch.cat(starts),
        tuple(zip(documents, first, strict=True)),
    )


def draw_anchors(document: Document, count: int, generator: torch.Generator | None) -> Tensor:
    """Draw distinct anchor positions from the answers, ascending.

    An anchor is a committed token of an answer with at least one more token of the same answer after it. With
    no generator the anchors are spread evenly (evaluation).

    Returns:
        anchor_A with min(count, candidates) entries.
    """
    candidate_A = anchor_candidates(document.answer_L)
    take = min(count, len(candidate_A))
    if generator is None:
        return candidate_A[(torch.arange(take) * len(candidate_A)) // max(take, 1)]
    return candidate_A[torch.randperm(len(candidate_A), generator=generator)[:take].sort().values]


def anchor_candidates(answer_L: Tensor) -> Tensor:
    """Positions of answer tokens that the same answer goes on after."""
    return ((answer_L[:-1] > 0) & (answer_L[:-1] == answer_L[1:])).nonzero()[:, 0]


def build_batch(rows: Sequence[Row], anchors: Sequence[Tensor], num_drafts: int) -> BlockBatch:
    """Gather labels and teacher rows for every slot and pad rows to one length.

    Args:
        rows: B rows.
        anchors: one anchor_A per row; they may differ in number.
        num_drafts: K, draft slots per block.
    """
    parts = [_row_blocks(row, anchor_A, num_drafts) for row, anchor_A in zip(rows, anchors, strict=True)]
    most = max(len(anchor_A) for anchor_A in anchors)
    longest = max(len(row.document) for row in rows)
    features_BLE = torch.stack([_pad(row.document.features_LE, longest) for row in rows])
    stacked = [torch.stack([_pad(part[place], most) for part in parts]) for place in range(7)]
    return BlockBatch(features_BLE, *stacked)


def _row_blocks(row: Row, anchor_A: Tensor, num_drafts: int) -> tuple[Tensor, ...]:
    """Per block: document start, anchor, its token, labels, validity, teacher ids and log-probabilities."""
    document = row.document
    position_AK = anchor_A[:, None] + torch.arange(1, num_drafts + 1)
    inside_AK = position_AK.clamp(max=len(document) - 1)
    # What follows an answer is the template's or the user's; the target would not be asked for it.
    same_AK = document.answer_L[inside_AK] == document.answer_L[anchor_A][:, None]
    return (
        row.start_L[anchor_A],
        anchor_A,
        document.tokens_L[anchor_A],
        document.tokens_L[inside_AK],
        (position_AK < len(document)) & same_AK,
        document.top_ids_LJ[inside_AK - 1],
        document.top_logprobs_LJ[inside_AK - 1],
    )


def _pad(tensor: Tensor, length: int) -> Tensor:
    """Zero-pad the first axis up to `length`."""
    if tensor.shape[0] == length:
        return tensor
    padding = tensor.new_zeros(length - tensor.shape[0], *tensor.shape[1:])
    return torch.cat([tensor, padding])
