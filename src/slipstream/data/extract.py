"""Features of finished chats: teacher-forced target passes over many chats at once, written as shards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slipstream.data.chats import Chat, to_line
from slipstream.data.features import (
    Document,
    FeatureIndex,
    answer_numbers,
    fingerprint,
    is_whole,
    open_index,
    write_index,
    write_shard,
)
from slipstream.target import Target

#: Tokens per target pass: enough to keep a CPU's products busy, few enough that their logits fit its memory.
_PASS_TOKENS = 1024
#: Bytes per position besides the features: token, answer number, and an id and a log-probability per
#: candidate.
_OTHER_BYTES, _CANDIDATE_BYTES = 6, 6


def feature_bytes(tokens: int, taps: int, width: int, candidates: int) -> int:
    """Size on disk of the features of so many tokens, in bytes, headers left out."""
    return tokens * (2 * taps * width + _OTHER_BYTES + _CANDIDATE_BYTES * candidates)


def index_of(
    target: Target, chats: Sequence[Chat], target_layer_ids: tuple[int, ...], candidates: int
) -> FeatureIndex:
    """What features of these chats are made from."""
    template = getattr(target.tokenizer, "chat_template", None) or ""
    return FeatureIndex(
        target.info.name,
        target_layer_ids,
        target.info.width,
        candidates,
        fingerprint(str(template)) if template else "",
        fingerprint(*(to_line(chat) for chat in chats)),
    )


def extract_features(
    target: Target,
    chats: Sequence[Chat],
    target_layer_ids: tuple[int, ...],
    folder: Path,
    candidates: int = 16,
    shard_size: int = 256,
    report: Callable[[str], None] | None = None,
) -> None:
    """Write the features of all chats; whole shards that are there already are kept, so a stopped run
    continues.

    Args:
        target: the model that wrote the chats.
        chats: in a fixed order, as the shard number stands for their place in it.
        target_layer_ids: 0-based ids of the layers whose output is stored.
        folder: receives `index.json` and the shards.
        candidates: likeliest next tokens stored per position (J).
        shard_size: chats per shard.
        report: gets the size beforehand and a line of progress per shard.

    Raises:
        InputError: the folder holds features of another target, template, other taps or chats, or is full.
    """
    index = open_index(folder, index_of(target, chats, target_layer_ids, candidates))
    tell = report or (lambda line: None)
    tokens = sum(len(chat.token_ids) for chat in chats)
    size = feature_bytes(tokens, len(target_layer_ids), target.info.width, candidates)
    tell(f"features of {len(chats)} chats, {tokens} tokens, take {size / 2**20:.0f} MiB in {folder}")
    target.set_taps(target_layer_ids)
    for start in range(0, len(chats), shard_size):
        name = f"shard-{start // shard_size:05d}.safetensors"
        if name not in index.shards or not is_whole(folder / name, index.shards[name]):
            documents = documents_of(target, chats[start : start + shard_size], candidates)
            index = replace(index, shards={**index.shards, name: write_shard(folder / name, documents)})
            write_index(folder, index)
        tell(f"features of {min(start + shard_size, len(chats))} of {len(chats)} chats")


def documents_of(target: Target, chats: Sequence[Chat], candidates: int) -> list[Document]:
    """Features of some chats, in their order; neighbours in length share their passes.

    Args:
        target: with its taps set.
        chats: at least one.
        candidates: J.
    """
    documents: dict[int, Document] = {}
    order = sorted(range(len(chats)), key=lambda number: -len(chats[number].token_ids))
    while order:
        # Long chats alone, short ones together: about the same number of tokens a pass.
        rows = max(1, _PASS_TOKENS // min(128, len(chats[order[0]].token_ids)))
        group, order = order[:rows], order[rows:]
        made = _group([chats[number] for number in group], target, candidates)
        documents |= dict(zip(group, made, strict=True))
    return [documents[number] for number in range(len(chats))]


@torch.no_grad()
def _group(chats: Sequence[Chat], target: Target, candidates: int) -> list[Document]:
    """Chats side by side, padded on the right, in chunks of positions."""
    longest = max(len(chat.token_ids) for chat in chats)
    chunk = max(1, _PASS_TOKENS // len(chats))
    tokens_BL = torch.zeros(len(chats), longest, dtype=torch.int64)
    for row, chat in enumerate(chats):
        tokens_BL[row, : len(chat.token_ids)] = torch.tensor(chat.token_ids)
    cache = target.new_cache(len(chats), longest)
    features: list[Tensor] = []
    ids: list[Tensor] = []
    logprobs: list[Tensor] = []
    for start in range(0, longest, chunk):
        part_BT = tokens_BL[:, start : start + chunk].to(target.device)
        start_B = torch.full((len(chats),), start, device=target.device)
        verified = target.verify(part_BT, start_B, cache, start + part_BT.shape[1])
        top = verified.logits_BTV.topk(candidates)
        features.append(verified.features_BTE.bfloat16().cpu())
        ids.append(top.indices.int().cpu())
        logprobs.append((top.values - verified.logits_BTV.logsumexp(-1, keepdim=True)).cpu())
    whole = torch.cat(features, 1), torch.cat(ids, 1), torch.cat(logprobs, 1)
    return [
        Document(
            tokens_BL[row, : len(chat.token_ids)],
            answer_numbers(len(chat.token_ids), chat.answers),
            *(tensor[row, : len(chat.token_ids)] for tensor in whole),
        )
        for row, chat in enumerate(chats)
    ]
