"""Features of finished chats: one teacher-forced target pass per chat, written as shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from slipstream.data.chats import Chat
from slipstream.data.features import Document, FeatureIndex, write_index, write_shard
from slipstream.target import Target


def extract_features(
    target: Target,
    chats: Sequence[Chat],
    target_layer_ids: tuple[int, ...],
    folder: Path,
    candidates: int = 16,
    shard_size: int = 128,
    report: Callable[[str], None] | None = None,
) -> None:
    """Write the features of all chats; shards that exist already are kept, so a stopped run continues.

    Args:
        target: the model that wrote the chats.
        chats: in a fixed order, as the shard number stands for their place in it.
        target_layer_ids: 0-based ids of the layers whose output is stored.
        folder: receives `index.json` and the shards.
        candidates: likeliest next tokens stored per position (J).
        shard_size: chats per shard.
        report: gets a line of progress per shard.

    Raises:
        InputError: the folder holds features of another target or other taps.
    """
    write_index(folder, FeatureIndex(target.info.name, target_layer_ids, target.info.width, candidates))
    target.set_taps(target_layer_ids)
    for start in range(0, len(chats), shard_size):
        path = folder / f"shard-{start // shard_size:05d}.safetensors"
        if not path.exists():
            write_shard(
                path, [document_of(target, chat, candidates) for chat in chats[start : start + shard_size]]
            )
        if report is not None:
            report(f"features of {min(start + shard_size, len(chats))} of {len(chats)} chats")


@torch.no_grad()
def document_of(target: Target, chat: Chat, candidates: int, chunk: int = 64) -> Document:
    """One chat's features and the target's likeliest next tokens at every position.

    Args:
        target: with its taps set.
        chat: prompt and answer.
        candidates: J.
        chunk: positions per pass, which bounds the memory that logits take.
    """
    tokens_L = torch.tensor([*chat.prompt_ids, *chat.answer_ids])
    cache = target.new_cache(1, len(tokens_L) + chunk)
    features: list[Tensor] = []
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    for start in range(0, len(tokens_L), chunk):
        part_BT = tokens_L[None, start : start + chunk].to(target.device)
        verified = target.verify(part_BT, torch.tensor([start], device=target.device), cache)
        top = verified.logits_BTV[0].float().log_softmax(-1).topk(candidates)
        features.append(verified.features_BTE[0].bfloat16().cpu())
        ids.append(top.indices.cpu())
        logprobs.append(top.values.cpu())
    return Document(tokens_L, len(chat.prompt_ids), torch.cat(features), torch.cat(ids), torch.cat(logprobs))
