"""One run of Slipstream's trainer, or of the plain one; a process of its own, started by `training.py`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from training_meter import Meter

from slipstream.core.options import TargetOptions, TrainOptions
from slipstream.data.blocks import BlockBatch, Row, build_batch, draw_anchors
from slipstream.data.features import Document, FeatureStore
from slipstream.model import DraftConfig, Drafter
from slipstream.target import load_target
from slipstream.target.packing import is_packed
from slipstream.train.batches import Batches
from slipstream.train.checkpoint import new_run
from slipstream.train.loop import train
from slipstream.train.prepare import fresh_drafter, frozen_ends
from slipstream.train.step import FrozenEnds, block_hidden


def main(task: dict[str, Any]) -> None:
    """Load, train some steps, print what was measured."""
    torch.set_num_threads(task["threads"])
    meter = Meter(task["skipped"], task["steps"])
    options = TrainOptions(**task["options"])
    # As `slipstream train` holds it: what decodes held-out prompts, and where that is packed, a plain one.
    decoding = target = load_target(task["target"])
    if is_packed(decoding.model):
        target = load_target(task["target"], TargetOptions(pack=False))
    store = FeatureStore(Path(task["folder"]) / "features")
    config = DraftConfig.for_target(
        target.info,
        num_layers=task["layers"],
        block_size=task["block_size"],
        num_taps=len(store.index.target_layer_ids),
    )
    assert config.target_layer_ids == store.index.target_layer_ids
    drafter, _ = fresh_drafter(config, target, store, options)
    run = ours if task["contender"] == "slipstream" else plain
    blocks = run(drafter, frozen_ends(target), store, options, Path(task["folder"]) / "run", meter)
    batches = Batches(store, options, config.block_size - 1)
    tokens = [sum(batches.lengths(step)) for step in range(options.max_steps)]
    parameters = sum(p.numel() for p in drafter.parameters())
    meter.print(tokens, blocks, parameters=parameters, torch=torch.__version__, target=decoding.info.name)


def ours(
    drafter: Drafter, ends: FrozenEnds, store: FeatureStore, options: TrainOptions, out: Path, meter: Meter
) -> list[int]:
    """The training loop that `slipstream train` runs; returns the blocks of every step."""
    run = new_run(drafter, options)
    meter.mark()
    train(run, ends, store, None, options, out, lambda _progress: meter.mark())
    batches = Batches(store, options, drafter.config.block_size - 1)
    drawn = (batches.batch(step) for step in range(options.max_steps))
    return [batch.blocks for batch in drawn if batch is not None]


def plain(
    drafter: Drafter, ends: FrozenEnds, store: FeatureStore, options: TrainOptions, out: Path, meter: Meter
) -> list[int]:
    """What one would write first: all chats in one row under one mask, all logits at once, AdamW."""
    del out
    batches = Batches(store, options, drafter.config.block_size - 1)
    optimizer = torch.optim.AdamW(
        drafter.parameters(), lr=options.peak_rate, weight_decay=options.weight_decay
    )
    half = options.precision != "float32"
    blocks = []
    meter.mark()
    for step in range(options.max_steps):
        batch = one_row(store.documents(batches.numbers(step)), options, drafter.config.block_size - 1, step)
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss = _plain_loss(drafter, ends, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), options.clip)
        optimizer.step()
        blocks.append(batch.blocks)
        meter.mark()
    return blocks


def _plain_loss(drafter: Drafter, ends: FrozenEnds, batch: BlockBatch) -> Tensor:
    """Cross-entropy over the whole vocabulary, weighted as in the paper."""
    hidden_BAKD = block_hidden(drafter, ends, batch, batch.features_BLE.float())
    logits_BAKV = F.linear(hidden_BAKD, ends.output_VD)
    loss_N = F.cross_entropy(
        logits_BAKV.flatten(0, 2).float(), batch.label_ids_BAK.flatten(), reduction="none"
    )
    weight_K = torch.exp(-torch.arange(hidden_BAKD.shape[2]) / 4.0)
    weight_N = (weight_K * batch.labelled_BAK).flatten()
    return (weight_N * loss_N).sum() / weight_N.sum()


def one_row(documents: list[Document], options: TrainOptions, num_drafts: int, seed: int) -> BlockBatch:
    """Chats one after another, with as many anchors as the real batches have."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(int((d.answer_L > 0).sum()) for d in documents)
    share = options.anchors * len(documents) / total
    answers, starts, anchors, parts, place = [], [], [], [], 0
    for number, document in enumerate(documents):
        said = int((document.answer_L > 0).sum())
        anchors.append(draw_anchors(document, max(1, round(said * share)), generator) + place)
        # Numbers that no other chat of the row uses.
        answers.append(torch.where(document.answer_L > 0, document.answer_L.long() + 1000 * number, 0))
        starts.append(torch.full((len(document),), place))
        parts.append((document, place))
        place += len(document)
    names = ("features_LE", "top_ids_LJ", "top_logprobs_LJ")
    joined = Document(
        torch.cat([d.tokens_L for d in documents]),
        torch.cat(answers),
        *(torch.cat([getattr(d, name) for d in documents]) for name in names),
    )
    return build_batch([Row(joined, torch.cat(starts), tuple(parts))], [torch.cat(anchors)], num_drafts)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
