"""Feature shards on disk: tokens, tapped hidden states and the target's likeliest next tokens, per position.

A folder holds `index.json` (what the features were taken from) and `shard-*.safetensors`. Documents lie one
after another along the first axis of every per-position tensor. This file reads and writes; it runs no model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.core.errors import InputError

INDEX_NAME = "index.json"


@dataclass(frozen=True)
class FeatureIndex:
    """What a folder of shards was computed from; a run that asks for something else is refused.

    Attributes:
        target: name of the target model.
        target_layer_ids: 0-based ids of the layers whose output is stored, in this order.
        width: hidden width of the target.
        candidates: likeliest next tokens stored per position (J).
    """

    target: str
    target_layer_ids: tuple[int, ...]
    width: int
    candidates: int


@dataclass(frozen=True)
class Document:
    """One chat with everything that training reads.

    Attributes:
        tokens_L: token ids, prompt then answer, int64.
        prompt_length: where the answer begins.
        features_LE: tapped hidden states; the row of the last token is unspecified, it is never context.
        top_ids_LJ: the target's likeliest tokens AFTER each position, best first.
        top_logprobs_LJ: their log-probabilities (natural logarithm); meaningful from prompt_length - 1 on.
    """

    tokens_L: Tensor
    prompt_length: int
    features_LE: Tensor
    top_ids_LJ: Tensor
    top_logprobs_LJ: Tensor

    def __len__(self) -> int:
        """Length in tokens."""
        return int(self.tokens_L.shape[0])


def write_index(folder: Path, index: FeatureIndex) -> None:
    """Write `index.json`; an index that says the same already is left alone.

    Raises:
        InputError: the folder holds features of something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if (folder / INDEX_NAME).exists():
        if read_index(folder) != index:
            raise InputError(f"{folder} already holds features of another target or other taps")
        return
    temporary = folder / (INDEX_NAME + ".tmp")
    temporary.write_text(json.dumps(asdict(index), indent=2) + "\n")
    os.replace(temporary, folder / INDEX_NAME)


def read_index(folder: Path) -> FeatureIndex:
    """Read `index.json`.

    Raises:
        InputError: there is none, or it is not one of ours.
    """
    try:
        raw = json.loads((folder / INDEX_NAME).read_text())
        return FeatureIndex(
            raw["target"], tuple(raw["target_layer_ids"]), int(raw["width"]), int(raw["candidates"])
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder} holds no readable {INDEX_NAME} of feature shards") from error


def write_shard(path: Path, documents: Sequence[Document]) -> None:
    """Write documents as one shard: to a temporary name first, then renamed."""
    tensors = {
        "tokens": torch.cat([doc.tokens_L.int() for doc in documents]),
        "lengths": torch.tensor([len(doc) for doc in documents], dtype=torch.int32),
        "prompts": torch.tensor([doc.prompt_length for doc in documents], dtype=torch.int32),
        "features": torch.cat([doc.features_LE.bfloat16() for doc in documents]),
        "top_ids": torch.cat([doc.top_ids_LJ.int() for doc in documents]),
        "top_logprobs": torch.cat([doc.top_logprobs_LJ.half() for doc in documents]),
    }
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    os.replace(temporary, path)


class FeatureStore:
    """All documents of a folder, read on demand from memory-mapped shards."""

    def __init__(self, folder: Path) -> None:
        """Open a folder.

        Raises:
            InputError: no index or no shard in it.
        """
        self.index = read_index(folder)
        paths = sorted(folder.glob("shard-*.safetensors"))
        if not paths:
            raise InputError(f"{folder} holds no feature shards")
        self._shards = [safe_open(path, framework="pt") for path in paths]
        self._where: list[tuple[int, int, int, int]] = []
        for number, shard in enumerate(self._shards):
            lengths = shard.get_tensor("lengths").tolist()
            start = 0
            for length, prompt in zip(lengths, shard.get_tensor("prompts").tolist(), strict=True):
                self._where.append((number, start, length, prompt))
                start += length

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._where)

    def length(self, number: int) -> int:
        """Tokens of one document."""
        return self._where[number][2]

    def answer_tokens(self) -> int:
        """Answer tokens of all documents together."""
        return sum(length - prompt for _, _, length, prompt in self._where)

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs, shape [V]; used to choose a reduced training vocabulary."""
        counts_V = torch.zeros(vocab_size, dtype=torch.int64)
        for shard in self._shards:
            counts_V += torch.bincount(shard.get_tensor("tokens").long(), minlength=vocab_size)
        return counts_V

    def __getitem__(self, number: int) -> Document:
        """One document; only its own rows are read from disk."""
        shard_number, start, length, prompt = self._where[number]
        shard = self._shards[shard_number]
        rows = slice(start, start + length)
        return Document(
            tokens_L=shard.get_slice("tokens")[rows].long(),
            prompt_length=prompt,
            features_LE=shard.get_slice("features")[rows],
            top_ids_LJ=shard.get_slice("top_ids")[rows].long(),
            top_logprobs_LJ=shard.get_slice("top_logprobs")[rows].float(),
        )
