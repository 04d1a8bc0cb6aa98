"""How long rounds would be with trees of drafts instead of chains: simulated, not decoded.

A block drafter gives a distribution for every slot of its block, whatever was chosen before. A chain drafts
the likeliest token of every slot; a tree of N nodes has the N likeliest beginnings (products of the slots'
shares), so that one pass over N + 1 tokens verifies second thoughts as well. Greedy; the texts are the
target's own, so these are the rounds that decoding would have.
"""

from __future__ import annotations

import argparse
import heapq
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

import slipstream
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine
from slipstream.decode.accept import Proposal
from slipstream.decode.propose import DraftChooser

PROMPTS = Path(__file__).with_name("held_out_smollm2.jsonl")
#: Candidates per slot; a tree of 63 nodes hardly has more beside one another.
WIDEST = 16
CHAINS, TREES = (3, 5, 7), (3, 5, 7, 11, 15, 23, 31, 63)
#: The candidates of every slot and their shares, likeliest first, each [K, WIDEST].
Candidates = tuple[list[list[int]], list[list[float]]]


class Recorder(DraftProposer):
    """Drafts after every single token: of each round the target's first token alone is said."""

    def __init__(self, session: slipstream.Session) -> None:
        assert session.drafter is not None
        super().__init__(session.target, session.drafter)
        self.seen: dict[int, Candidates] = {}

    def propose(
        self,
        anchor_B: Tensor,
        length_B: Tensor,
        num_drafts: int,
        visible: int,
        chooser: DraftChooser,
        row_B: Tensor | None = None,
    ) -> Proposal:
        """As drafts are, kept for the simulation by the position of the first."""

        def recording(logits_BKV: Tensor, position_BK: Tensor, ids_V: Tensor | None) -> Proposal:
            top = logits_BKV[0].float().softmax(-1).topk(WIDEST, -1)
            ids = top.indices if ids_V is None else ids_V[top.indices]
            self.seen[int(position_BK[0, 0])] = ids.tolist(), top.values.tolist()
            return replace(chooser(logits_BKV, position_BK, ids_V), most_B=torch.ones_like(length_B))

        return super().propose(anchor_B, length_B, num_drafts, visible, recording, row_B)


def main() -> None:
    """Print tokens per round of chains and trees."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--target", default="smollm2")
    parser.add_argument("-d", "--draft", default="auto")
    parser.add_argument("-n", type=int, default=12, help="prompts")
    parser.add_argument("--max-tokens", type=int, default=96)
    options = parser.parse_args()
    session = slipstream.load(options.target, options.draft)
    recorder = Recorder(session)
    engine = Engine(session.target, recorder, EngineOptions(drafts="max"))
    texts: list[tuple[list[int], dict[int, Candidates]]] = []
    for line in PROMPTS.read_text(encoding="utf-8").splitlines()[: options.n]:
        recorder.seen.clear()
        prompt = session.encode(json.loads(line)["user"])
        done = engine.generate([Request(tuple(prompt), SamplingOptions(max_tokens=options.max_tokens))])[0]
        # The first token is the prompt's; the second is the first that is drafted.
        after = {position - len(prompt) - 1: found for position, found in recorder.seen.items()}
        texts.append((list(done.token_ids), after))
    for kind, sizes in (("chain", CHAINS), ("tree", TREES)):
        for size in sizes:
            print(f"{kind} of {size:2}: {_per_round(texts, kind, size):.3f} tokens per round")


def _per_round(texts: Sequence[tuple[list[int], dict[int, Candidates]]], kind: str, size: int) -> float:
    """Tokens per round over all texts."""
    tokens = rounds = 0
    for text, after in texts:
        anchor = 0
        while anchor < len(text) - 1 and anchor in after:
            kept = _kept(after[anchor], text[anchor + 1 :], kind, size)
            said = min(kept + 1, len(text) - 1 - anchor)
            tokens, rounds, anchor = tokens + said, rounds + 1, anchor + said
    return tokens / rounds


def _kept(found: Candidates, text: Sequence[int], kind: str, size: int) -> int:
    """How many drafts a round keeps: how far the text goes along what was drafted."""
    ids, shares = found
    drafted = {(0,) * depth for depth in range(1, size + 1)} if kind == "chain" else _likeliest(shares, size)
    path: tuple[int, ...] = ()
    for slot, token in zip(ids, text, strict=False):
        if token not in slot:
            break
        path = (*path, slot.index(token))
        if path not in drafted:
            return len(path) - 1
    return len(path)


def _likeliest(shares: list[list[float]], size: int) -> set[tuple[int, ...]]:
    """The `size` beginnings with the largest products of shares, as ranks slot by slot."""
    drafted: set[tuple[int, ...]] = set()
    heap = [(-shares[0][0], (0,))]
    while heap and len(drafted) < size:
        product, path = heapq.heappop(heap)
        drafted.add(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < WIDEST:
            beside = product * shares[depth - 1][rank + 1] / max(shares[depth - 1][rank], 1e-30)
            heapq.heappush(heap, (beside, (*path[:-1], rank + 1)))
        if depth < len(shares):
            heapq.heappush(heap, (product * shares[depth][0], (*path, 0)))
    return drafted


if __name__ == "__main__":
    main()
