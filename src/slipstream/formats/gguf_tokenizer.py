"""A target's tokenizer as GGUF keys: byte-level BPE, the tokenizer of Llama 3, Qwen and SmolLM.

Not every tokenizer: others (SentencePiece, for one) are left to llama.cpp's own converter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from slipstream.core.errors import CheckpointError
from slipstream.formats.checkpoint import read_json

_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_CONVERTER = "llama.cpp's convert_hf_to_gguf.py can convert it"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: llama.cpp's names of ways to split a text, by the pattern of the `Split` that comes first.
_SPLITS: Final = {_WORDS + _REST: "qwen2", _WORDS + "{1,3}" + _REST: "llama-bpe"}


@dataclass(frozen=True)
class Vocabulary:
    """What GGUF says about a tokenizer.

    Attributes:
        tokens: by id.
        types: of each, in llama.cpp's numbers.
        merges: pairs joined by a space, the first one first.
        splitting: llama.cpp's name for the way a text is split before merging.
        special: role (bos, eos, unknown, padding) to id.
        adds_bos: whether a text begins with the bos token.
        template: of chats; empty for none.
    """

    tokens: tuple[str, ...]
    types: tuple[int, ...]
    merges: tuple[str, ...]
    splitting: str
    special: Mapping[str, int]
    adds_bos: bool
    template: str


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """Read a Hugging Face tokenizer.

    Args:
        folder: holds tokenizer.json, and tokenizer_config.json if there is one.
        size: rows of the target's embedding; ids without a token are filled up.

    Raises:
        CheckpointError: there is none, or it is of another kind.
    """
    raw = read_json(folder / "tokenizer.json")
    model = raw.get("model")
    if (
        not isinstance(model, Mapping)
        or model.get("type") != "BPE"
        or not isinstance(model.get("vocab"), Mapping)
    ):
        raise CheckpointError(f"the tokenizer of {folder} is no byte-level BPE; {_CONVERTER}")
    splitting = _splitting(raw, folder)
    tokens, types = _tokens(model["vocab"], raw.get("added_tokens") or [], size, folder)
    merges = tuple(item if isinstance(item, str) else " ".join(item) for item in model.get("merges") or [])
    path = folder / "tokenizer_config.json"
    settings = read_json(path) if path.exists() else {}
    places = {token: number for number, token in enumerate(tokens)}
    roles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special = {
        role: places[name] for role, key in roles.items() if (name := _name(settings.get(key))) in places
    }
    first = Tokenizer.from_file(str(folder / "tokenizer.json")).encode("a").ids[:1]
    return Vocabulary(
        tokens,
        types,
        merges,
        splitting,
        special,
        "bos" in special and first == [special["bos"]],
        _template(folder, settings),
    )


def put_vocabulary(writer: Any, vocabulary: Vocabulary) -> None:
    """Write a vocabulary's keys.

    Args:
        writer: `gguf.GGUFWriter`.
        vocabulary: to write.
    """
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(vocabulary.splitting)
    writer.add_token_list(list(vocabulary.tokens))
    writer.add_token_types(list(vocabulary.types))
    writer.add_token_merges(list(vocabulary.merges))
    for role, token in vocabulary.special.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
    writer.add_add_bos_token(vocabulary.adds_bos)
    if vocabulary.template:
        writer.add_chat_template(vocabulary.template)


def _tokens(
    vocab: Mapping[str, int], added: list[Mapping[str, Any]], size: int, folder: Path
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    tokens = [f"[PAD{number}]" for number in range(size)]
    types = [_UNUSED] * size
    extra = {item["content"]: item["id"] for item in added}
    if any(number >= size for number in (*vocab.values(), *extra.values())):
        raise CheckpointError(f"the tokenizer of {folder} has tokens beyond the target's {size} rows")
    for text, number in vocab.items():
        tokens[number], types[number] = text, _NORMAL
    for item in added:
        tokens[item["id"]] = item["content"]
        types[item["id"]] = _CONTROL if item.get("special") else _USER_DEFINED
    return tuple(tokens), tuple(types)


def _splitting(raw: Mapping[str, Any], folder: Path) -> str:
    """llama.cpp's name for the way this tokenizer splits a text."""
    steps = raw.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    kinds = [step.get("type") for step in steps]
    normalizer = raw.get("normalizer") or {}
    if kinds[-1:] == ["ByteLevel"] and normalizer.get("type", "NFC") == "NFC":
        first = steps[0]
        if len(kinds) == 1 and first.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and first.get("individual_digits"):
            return "smollm"
        pattern = (first.get("pattern") or {}).get("Regex") if len(kinds) == 2 else None
        if pattern in _SPLITS:
            return _SPLITS[pattern]
    raise CheckpointError(
        f"the tokenizer of {folder} splits texts in a way that is not known here; {_CONVERTER}"
    )


def _name(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token)


def _template(folder: Path, settings: Mapping[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.exists():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template") or ""
    return template if isinstance(template, str) else json.dumps(template)
