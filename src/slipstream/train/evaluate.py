"""Held-out acceptance: teacher-forced over many anchors, by really decoding a few prompts, by workload."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass

import torch

from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Completion, Request, total_acceptance
from slipstream.data.blocks import build_batch, cut, draw_anchors, pack
from slipstream.data.bundled import BUNDLED, bundled_turns
from slipstream.data.chats import Chat
from slipstream.data.features import Features
from slipstream.data.render import Renderer
from slipstream.decode import Engine
from slipstream.decode.propose import DraftProposer
from slipstream.model import Drafter
from slipstream.target import Target
from slipstream.train.losses import accepted_lengths
from slipstream.train.step import FrozenEnds, block_hidden, score_blocks

_LONGEST = 2048
#: Most texts decoded side by side.
_ROWS = 8
#: Bundled prompts that a card speaks of. `long` would cost more than all others together, and the first turns
#: of `multiturn` are chat.
_WORKLOADS = tuple(name for name in BUNDLED if name not in ("long", "multiturn"))


@dataclass(frozen=True)
class Forecast:
    """Held-out figures over evenly spread anchors, micro-averaged over blocks with a full set of labels.

    Attributes:
        acceptance_length: leading hits plus one, teacher-forced.
        hit_rate: share of first choices that equal the label, per slot k = 1..K, whatever came before.
        blocks: how many blocks were scored.
        decoded: tokens per round of greedy decoding of some held-out prompts, over all their rounds; None
            where none was decoded.
    """

    acceptance_length: float
    hit_rate: tuple[float, ...]
    blocks: int
    decoded: float | None = None


@torch.no_grad()
def evaluate(
    drafter: Drafter, ends: FrozenEnds, store: Features, most: int = 100, anchors: int = 12
) -> Forecast:
    """Score up to `most` documents with the whole vocabulary.

    Blocks that run over the end of their answer are left out, as they cannot reach full length; where no
    block is whole, all are scored.
    """
    lengths, hits, whole = [], [], []
    for number in range(min(most, len(store))):
        document = cut(store[number], _LONGEST, None)
        anchor_A = draw_anchors(document, anchors, None)
        if not len(anchor_A):
            continue
        batch = build_batch(pack([document]), [anchor_A], drafter.config.block_size - 1)
        batch = batch.to(ends.output_VD.device)
        hidden_BAKD = block_hidden(drafter, ends, batch, batch.features_BLE.float())
        scores = score_blocks(drafter, ends, hidden_BAKD, batch)
        labelled_NK = batch.labelled_BAK.flatten(0, 1)
        lengths.append(accepted_lengths(scores.hit_BAK, labelled_NK))
        hits.append(scores.hit_BAK.float())
        whole.append(labelled_NK.all(-1))
    if not lengths:
        return Forecast(0.0, (0.0,) * (drafter.config.block_size - 1), 0)
    chosen = torch.cat(whole)
    chosen = chosen if chosen.any() else torch.ones_like(chosen)
    length = torch.cat(lengths)[chosen].float()
    rates = tuple(torch.cat(hits)[chosen].mean(0).tolist())  # host: a figure to report
    return Forecast(float(length.mean()), rates, len(length))


def decoded_acceptance(
    target: Target, drafter: Drafter, chats: Sequence[Chat], max_tokens: int = 64
) -> float:
    """Tokens per round of greedy decoding after each chat's first prompt, over all rounds.

    Args:
        target: any dtype; a copy of the drafter takes it.
        drafter: to be tried.
        chats: at least one, each with an answer.
        max_tokens: longest text.
    """
    prompts = [chat.token_ids[: chat.answers[0][0]] for chat in chats]
    return total_acceptance(_decoded(target, drafter, prompts, max_tokens))


def acceptance_by_workload(
    target: Target, drafter: Drafter, renderer: Renderer, prompts: int, max_tokens: int = 64
) -> dict[str, float]:
    """Tokens per round of greedy decoding after bundled prompts, over all rounds of each workload.

    Args:
        target: any dtype; a copy of the drafter takes it.
        drafter: to be tried.
        renderer: of the target's chat template.
        prompts: of each workload, its first ones; of a conversation the first turn. Prompts that leave no
            room for an answer in the target's context are left out, and so is a workload of such alone.
        max_tokens: longest text.
    """
    asked = {
        workload: [
            renderer.prompt_ids([{"role": "user", "content": turns[0]}])
            for _, turns in bundled_turns(workload)[:prompts]
        ]
        for workload in _WORKLOADS
    }
    room = target.info.max_context - max_tokens
    fitting = {workload: [ids for ids in all_ids if len(ids) <= room] for workload, all_ids in asked.items()}
    everything = [ids for all_ids in fitting.values() for ids in all_ids]
    if not everything:
        return {}
    done = iter(_decoded(target, drafter, everything, max_tokens))
    return {
        workload: total_acceptance([next(done) for _ in all_ids])
        for workload, all_ids in fitting.items()
        if all_ids
    }


def _decoded(
    target: Target, drafter: Drafter, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[Completion]:
    """Greedy texts with as many drafts as a block holds; the target's taps are put back."""
    taps = target.tap_ids
    copy = deepcopy(drafter).to(target.device, target.dtype).eval()
    options = EngineOptions(max_rows=min(len(prompts), _ROWS), drafts="max")
    engine = Engine(target, DraftProposer(target, copy), options)
    sampling = SamplingOptions(max_tokens=max_tokens)
    completions = engine.generate([Request(tuple(ids), sampling) for ids in prompts])
    target.set_taps(taps)
    return completions
