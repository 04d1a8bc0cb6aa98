"""Teacher-forced acceptance on held-out chats: a quick forecast of what decoding will reach."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.data.blocks import build_batch, draw_anchors
from slipstream.data.features import FeatureStore
from slipstream.model import Drafter
from slipstream.train.losses import accepted_lengths
from slipstream.train.step import FrozenEnds, block_hidden, score_slots


@dataclass(frozen=True)
class Forecast:
    """Held-out figures over evenly spread anchors, micro-averaged over blocks with a full set of labels.

    Attributes:
        acceptance_length: leading hits plus one.
        hit_rate: share of first choices that equal the label, per slot k = 1..K, whatever came before.
        blocks: how many blocks were scored.
    """

    acceptance_length: float
    hit_rate: tuple[float, ...]
    blocks: int


@torch.no_grad()
def evaluate(
    drafter: Drafter, ends: FrozenEnds, store: FeatureStore, most: int = 40, anchors: int = 12
) -> Forecast:
    """Score up to `most` documents with the whole vocabulary.

    Blocks that run over the end of their document are left out, as they cannot reach full length.
    """
    lengths, hits = [], []
    for number in range(min(most, len(store))):
        document = store[number]
        anchor_A = draw_anchors(document, anchors, None)
        if not len(anchor_A):
            continue
        batch = build_batch([document], [anchor_A], drafter.config.block_size - 1)
        hidden_BAKD = block_hidden(drafter, ends, batch, batch.features_BLE.float())
        scores = score_slots(drafter, ends, hidden_BAKD, batch, 0.0, None)
        whole_BA = batch.labelled_BAK.all(-1)
        lengths.append(accepted_lengths(scores.hit_BAK, batch.labelled_BAK)[whole_BA])
        hits.append(scores.hit_BAK[whole_BA].float())
    length = torch.cat(lengths).float()
    rates = tuple(torch.cat(hits).mean(0).tolist())
    return Forecast(float(length.mean()), rates, len(length))
