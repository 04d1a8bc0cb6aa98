"""The one legend of axis letters: a tensor name such as `logits_BTV` ends in its axes, in order."""

from __future__ import annotations

from typing import Final

LEGEND: Final[dict[str, str]] = {
    "B": "rows of a batch",
    "T": "block slots: the anchor and its masks",
    "K": "drafts of a block, T - 1",
    "N": "nodes of a draft tree",
    "L": "context length",
    "Q": "queries that share a key head: tokens of a pass times heads of a group",
    "S": "keys an attention sees (buffer slots)",
    "D": "model width",
    "E": "feature width: taps x target width",
    "H": "heads",
    "G": "key/value heads",
    "C": "head width",
    "V": "vocabulary",
    "A": "anchors of a training sequence",
    "F": "feed-forward width",
    "J": "likeliest tokens of a position: those stored of a teacher, or those that a filter looks at",
}
