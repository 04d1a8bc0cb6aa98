"""How many leading drafts would be right at every position of held-out chats, for the draft-length tests.

One line of digits per chat: the drafter's block after each answer token, teacher-forced and greedy.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from slipstream.data.blocks import anchor_candidates, build_batch, pack
from slipstream.data.features import FeatureStore
from slipstream.formats import read_zlab
from slipstream.target import load_target
from slipstream.train.losses import accepted_lengths
from slipstream.train.prepare import frozen_ends
from slipstream.train.step import block_hidden, score_blocks


@torch.no_grad()
def main() -> None:
    """Write the traces."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("features", type=Path, help="feature folder of held-out chats")
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("-d", "--draft", type=Path, required=True)
    parser.add_argument("-n", type=int, default=12, help="chats")
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    drafter, ends = read_zlab(options.draft).float(), frozen_ends(load_target(options.target))
    store, lines = FeatureStore(options.features), []
    for number in range(options.n):
        document = store[number]
        anchor_A = anchor_candidates(document.answer_L)
        batch = build_batch(pack([document]), [anchor_A], drafter.config.block_size - 1)
        hidden_BAKD = block_hidden(drafter, ends, batch, batch.features_BLE.float())
        scores = score_blocks(drafter, ends, hidden_BAKD, batch)
        right = accepted_lengths(scores.hit_BAK, batch.labelled_BAK.flatten(0, 1)) - 1
        lines.append("".join(map(str, right.tolist())))
    options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
