"""Features of finished chats: teacher-forced target passes over many chats at once, written as shards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import Tensor

from slipstream.core.options import TargetOptions
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
from slipstream.target import Target, load_target

#: Tokens per target pass: enough to keep a CPU's products busy, few enough that their logits fit its memory.
_PASS_TOKENS = 1024
#: Bytes per position besides the features: token, answer number, and an id and a log-probability per
#: candidate.
_OTHER_BYTES, _CANDIDATE_BYTES = 6, 6


@dataclass(frozen=True)
class Workers:
    """Processes that compute features side by side, each with a target of its own.

    Attributes:
        count: how many; they share the threads of this process.
        target: what they load.
        loading: how.
    """

    count: int
    target: str
    loading: TargetOptions = TargetOptions()


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
    workers: Workers | None = None,
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
        workers: processes that share the work; None computes here.

    Raises:
        InputError: the folder holds features of another target, template, other taps or chats, or is full.
    """
    index = open_index(folder, index_of(target, chats, target_layer_ids, candidates))
    tell = report or (lambda line: None)
    tokens = sum(len(chat.token_ids) for chat in chats)
    size = feature_bytes(tokens, len(target_layer_ids), target.info.width, candidates)
    tell(f"features of {len(chats)} chats, {tokens} tokens, take {size / 2**20:.0f} MiB in {folder}")
    parts = {
        f"shard-{start // shard_size:05d}.safetensors": list(chats[start : start + shard_size])
        for start in range(0, len(chats), shard_size)
    }
    there = {name for name, mark in index.shards.items() if name in parts and is_whole(folder / name, mark)}
    done = sum(len(parts[name]) for name in there)
    missing = {folder / name: part for name, part in parts.items() if name not in there}
    for path, mark in _written(target, target_layer_ids, missing, candidates, workers):
        index = replace(index, shards={**index.shards, path.name: mark})
        write_index(folder, index)
        done += len(parts[path.name])
        tell(f"features of {done} of {len(chats)} chats")


def _written(
    target: Target,
    target_layer_ids: tuple[int, ...],
    missing: Mapping[Path, list[Chat]],
    candidates: int,
    workers: Workers | None,
) -> Iterator[tuple[Path, str]]:
    """Write shards here or in worker processes; each with its fingerprint once it is there."""
    if workers is None or workers.count < 2 or len(missing) < 2:
        target.set_taps(target_layer_ids)
        for path, chats in missing.items():
            yield path, write_shard(path, documents_of(target, chats, candidates))
        return
    threads = max(1, torch.get_num_threads() // workers.count)
    start = workers.target, workers.loading, target_layer_ids, threads
    # Spawned, as a forked process cannot use a GPU, nor torch's threads on every system.
    with ProcessPoolExecutor(workers.count, get_context("spawn"), _begin_worker, start) as pool:
        waiting = {
            pool.submit(_write_in_worker, path, chats, candidates): path for path, chats in missing.items()
        }
        for future in as_completed(waiting):
            yield waiting[future], future.result()


_worker_target: Target | None = None


def _begin_worker(name: str, loading: TargetOptions, taps: tuple[int, ...], threads: int) -> None:
    """Load the target once per process."""
    global _worker_target
    torch.set_num_threads(threads)
    _worker_target = load_target(name, loading)
    _worker_target.set_taps(taps)


def _write_in_worker(path: Path, chats: list[Chat], candidates: int) -> str:
    assert _worker_target is not None
    return write_shard(path, documents_of(_worker_target, chats, candidates))


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
