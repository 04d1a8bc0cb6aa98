"""Feature shards on disk: tokens, tapped hidden states and the target's likeliest next tokens, per position.

A folder holds `index.json` (what the features were taken from) and `shard-*.safetensors`. Documents lie one
after another along the first axis of every per-position tensor. This file reads and writes; it runs no model.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from slipstream.core.errors import InputError
from slipstream.core.files import replace_bytes, replacing

INDEX_NAME = "index.json"


@dataclass(frozen=True)
class FeatureIndex:
    """What a folder of shards was computed from; a run that asks for something else is refused.

    Attributes:
        target: name of the target model.
        target_layer_ids: 0-based ids of the layers whose output is stored, in this order.
        width: hidden width of the target.
        candidates: likeliest next tokens stored per position (J).
        template: fingerprint of the chat template; empty where the target has none.
        chats: fingerprint of the chats, in their order.
        shards: fingerprint of every shard written so far, by file name.
    """

    target: str
    target_layer_ids: tuple[int, ...]
    width: int
    candidates: int
    template: str = ""
    chats: str = ""
    shards: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Document:
    """One token sequence with everything that training reads.

    Attributes:
        tokens_L: token ids, int64.
        answer_L: number of the answer that a token belongs to, from 1; 0 where the target did not say it.
        features_LE: tapped hidden states; the row of the last token is unspecified, it is never context.
        top_ids_LJ: the target's likeliest tokens AFTER each position, best first.
        top_logprobs_LJ: their log-probabilities (natural logarithm); meaningful before answer tokens.
    """

    tokens_L: Tensor
    answer_L: Tensor
    features_LE: Tensor
    top_ids_LJ: Tensor
    top_logprobs_LJ: Tensor

    def __len__(self) -> int:
        """Length in tokens."""
        return int(self.tokens_L.shape[0])

    def window(self, start: int, end: int) -> Document:
        """The part from `start` to before `end`; what lies before is no longer context."""
        part = slice(start, end)
        return Document(
            self.tokens_L[part],
            self.answer_L[part],
            self.features_LE[part],
            self.top_ids_LJ[part],
            self.top_logprobs_LJ[part],
        )


def answer_numbers(length: int, spans: Sequence[tuple[int, int]]) -> Tensor:
    """`answer_L` of a sequence with these spans, int16."""
    answer_L = torch.zeros(length, dtype=torch.int16)
    for number, (start, end) in enumerate(spans, start=1):
        answer_L[start:end] = number
    return answer_L


def fingerprint(*parts: str | bytes) -> str:
    """SHA-256 of the parts, each with its length, as hexadecimal."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def open_index(folder: Path, wanted: FeatureIndex) -> FeatureIndex:
    """Begin a folder of features, or go on with one of the same origin.

    Args:
        folder: made if needed.
        wanted: with no shards.

    Returns:
        The index in the folder, with the shards that are there.

    Raises:
        InputError: the folder holds features of something else; what differs is named.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / INDEX_NAME).exists():
        write_index(folder, wanted)
        return wanted
    found = read_index(folder)
    same = replace(found, shards={})
    different = [name for name, value in asdict(wanted).items() if asdict(same)[name] != value]
    if different:
        raise InputError(
            f"{folder} already holds features of another {' and '.join(map(_words, different))}; "
            "remove it or name another folder"
        )
    return found


def write_index(folder: Path, index: FeatureIndex) -> None:
    """Write `index.json`, to a temporary name first."""
    with replacing(folder / INDEX_NAME, force=True) as file:
        file.write(json.dumps(asdict(index), indent=2) + "\n")


def read_index(folder: Path) -> FeatureIndex:
    """Read `index.json`.

    Raises:
        InputError: there is none, or it is not one of ours.
    """
    try:
        raw = json.loads((folder / INDEX_NAME).read_text())
        return FeatureIndex(
            str(raw["target"]),
            tuple(raw["target_layer_ids"]),
            int(raw["width"]),
            int(raw["candidates"]),
            str(raw["template"]),
            str(raw["chats"]),
            dict(raw["shards"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder} holds no readable {INDEX_NAME} of feature shards") from error


def write_shard(path: Path, documents: Sequence[Document]) -> str:
    """Write documents as one shard: to a temporary name first, then renamed.

    Returns:
        The fingerprint of the file.

    Raises:
        InputError: the file cannot be written.
    """
    tensors = {
        "tokens": torch.cat([doc.tokens_L.int() for doc in documents]),
        "answers": torch.cat([doc.answer_L.short() for doc in documents]),
        "lengths": torch.tensor([len(doc) for doc in documents], dtype=torch.int32),
        "features": torch.cat([doc.features_LE.bfloat16() for doc in documents]),
        "top_ids": torch.cat([doc.top_ids_LJ.int() for doc in documents]),
        "top_logprobs": torch.cat([doc.top_logprobs_LJ.half() for doc in documents]),
    }
    data = save(tensors)
    replace_bytes(path, data)
    return fingerprint(data)


def is_whole(path: Path, expected: str) -> bool:
    """Whether a shard has the content that the index says."""
    return path.exists() and fingerprint(path.read_bytes()) == expected


class Features(Protocol):
    """What training reads: shards on disk, or a target that computes them."""

    index: FeatureIndex

    def __len__(self) -> int:
        """Number of documents."""

    def length(self, number: int) -> int:
        """Tokens of one document."""

    def answer_tokens(self) -> int:
        """Answer tokens of all documents together."""

    def answer_tokens_of(self, number: int) -> int:
        """Answer tokens of one document."""

    def longest_answer(self, number: int) -> int:
        """Tokens of a document's longest answer; 0 where it has none."""

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs, shape [V]; used to choose a reduced training vocabulary."""

    def documents(self, numbers: Sequence[int]) -> list[Document]:
        """Some documents."""

    def __getitem__(self, number: int) -> Document:
        """One document."""


class FeatureStore:
    """All documents of a folder, read on demand from memory-mapped shards."""

    def __init__(self, folder: Path) -> None:
        """Open a folder.

        Raises:
            InputError: no index, no shard in it, or a shard that is missing or damaged.
        """
        self.index = read_index(folder)
        if not self.index.shards:
            raise InputError(f"{folder} holds no feature shards")
        names = sorted(self.index.shards)
        self._shards = [_open_shard(folder / name) for name in names]
        self._where: list[tuple[int, int, int]] = []
        self._answers: list[tuple[int, int]] = []
        for number, shard in enumerate(self._shards):
            answers = shard.get_tensor("answers")
            start = 0
            for length in shard.get_tensor("lengths").tolist():
                self._where.append((number, start, length))
                said = answers[start : start + length].long().bincount()[1:]
                self._answers.append((int(said.sum()), int(said.max()) if len(said) else 0))
                start += length

    def __len__(self) -> int:
        """Number of documents."""
        return len(self._where)

    def length(self, number: int) -> int:
        """Tokens of one document."""
        return self._where[number][2]

    def answer_tokens(self) -> int:
        """Answer tokens of all documents together."""
        return sum(total for total, _ in self._answers)

    def answer_tokens_of(self, number: int) -> int:
        """Answer tokens of one document."""
        return self._answers[number][0]

    def longest_answer(self, number: int) -> int:
        """Tokens of a document's longest answer; 0 where it has none."""
        return self._answers[number][1]

    def token_counts(self, vocab_size: int) -> Tensor:
        """How often each token occurs, shape [V]; used to choose a reduced training vocabulary."""
        counts_V = torch.zeros(vocab_size, dtype=torch.int64)
        for shard in self._shards:
            counts_V += torch.bincount(shard.get_tensor("tokens").long(), minlength=vocab_size)
        return counts_V

    def documents(self, numbers: Sequence[int]) -> list[Document]:
        """Some documents."""
        return [self[number] for number in numbers]

    def __getitem__(self, number: int) -> Document:
        """One document; only its own rows are read from disk."""
        shard_number, start, length = self._where[number]
        shard = self._shards[shard_number]
        rows = slice(start, start + length)
        return Document(
            tokens_L=shard.get_slice("tokens")[rows].long(),
            answer_L=shard.get_slice("answers")[rows],
            features_LE=shard.get_slice("features")[rows],
            top_ids_LJ=shard.get_slice("top_ids")[rows].long(),
            top_logprobs_LJ=shard.get_slice("top_logprobs")[rows].float(),
        )


def _open_shard(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError as error:
        raise InputError(f"the feature shard {path} is missing; extract the features again") from error
    except (OSError, SafetensorError) as error:
        raise InputError(f"the feature shard {path} is damaged; remove it and extract again") from error


def _words(name: str) -> str:
    return {"target_layer_ids": "choice of taps", "template": "chat template", "chats": "set of chats"}.get(
        name, name
    )
