"""Chats from other people's files: messages, ShareGPT, prompt and response, plain text, recorded token ids.

JSONL is read line by line; Parquet files and data sets of the hub are read by the `datasets` library.
Templates are the renderer's business.
"""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.core.errors import InputError, MissingExtraError
from slipstream.data.chats import Chat, from_record
from slipstream.data.render import Message, Renderer

_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
}
_PAIRS = (("prompt", "response"), ("prompt", "completion"), ("instruction", "output"), ("question", "answer"))
_OPEN: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_KNOWN = (
    "messages, conversations, prompt and response, text, token_ids and answers, or prompt_ids and answer_ids"
)


@dataclass(frozen=True)
class Reading:
    """What a source held.

    Attributes:
        chats: with at least one answer each.
        skipped: records without any answer.
    """

    chats: list[Chat]
    skipped: int


def read_chats(
    source: str | Path,
    renderer: Renderer | None,
    tokenize: Callable[[str], list[int]] | None = None,
    thinking: bool | None = None,
    limit: int | None = None,
) -> Reading:
    """Read a source of chats.

    Args:
        source: a JSONL (also .gz or .xz) or Parquet file, or the id of a data set on the hub.
        renderer: of the target's template; None where the target has none, and then messages are refused.
        tokenize: text to token ids with the target's own start token, for records of plain text.
        thinking: stored with every chat that is rendered here.
        limit: most chats to read; None reads all.

    Raises:
        InputError: the source or one of its records cannot be read; the record is named.
    """
    chats: list[Chat] = []
    skipped = 0
    for where, record in records(source):
        if limit is not None and len(chats) >= limit:
            break
        try:
            found = _chats_of(record, renderer, tokenize, thinking)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{where} is not a chat record ({type(error).__name__}: {error})") from error
        found = [chat for chat in found if chat.answers]
        skipped += not found
        chats += found
    return Reading(chats[:limit], skipped)


def records(source: str | Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Every record with words that say where it stands.

    Raises:
        InputError: no such source, or a line that is not a JSON object.
    """
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".ndjson") or (path.is_file() and path.suffix != ".parquet"):
        yield from _lines(path)
        return
    if path.suffix == ".parquet" and not path.is_file():
        raise InputError(f"cannot read chats from {path}: no such file")
    file = str(path) if path.is_file() else None
    rows = hub_rows(str(source) if file is None else "parquet", data_files=file)
    for number, row in enumerate(rows, start=1):
        yield f"{source}, row {number}", row


def hub_rows(
    place: str, config: str | None = None, split: str = "train", data_files: str | None = None
) -> Any:
    """A data set that the `datasets` library reads: a sized iterable of rows.

    Args:
        place: repository on the hub, or the kind of file, such as `parquet`.
        config: of the repository.
        split: that is read.
        data_files: the file, where `place` is a kind.

    Raises:
        InputError: it is not there, or the hub cannot be reached.
        MissingExtraError: there is no `datasets`.
    """
    try:
        import datasets
    except ImportError as error:
        raise MissingExtraError("datasets", "train") from error
    try:
        return datasets.load_dataset(place, config, split=split, data_files=data_files)
    except Exception as error:  # the library raises its own kinds, and the network's
        first = str(error).strip().split("\n")[0]
        source = data_files or place
        raise InputError(
            f"{source} is neither a file nor a data set that the hub would give: {first}"
        ) from error


def messages_of(record: Mapping[str, Any]) -> list[Message] | None:
    """The chat of a record in any of the layouts that hold one; None where it holds ids or plain text."""
    if record.get("messages"):
        return [dict(message) for message in record["messages"]]
    if record.get("conversations"):
        turns = record["conversations"]
        if "from" in turns[0]:
            return [
                {"role": _ROLES.get(turn["from"], turn["from"]), "content": turn["value"]} for turn in turns
            ]
        return [dict(turn) for turn in turns]
    for asked, answered in _PAIRS:
        if isinstance(record.get(asked), str):
            system = [{"role": "system", "content": record["system"]}] if record.get("system") else []
            answer = record.get(answered)
            said = [{"role": "assistant", "content": answer}] if isinstance(answer, str) else []
            return [*system, {"role": "user", "content": record[asked]}, *said]
    return None


def _lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    try:
        with _OPEN.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                where = f"{path}, line {number}"
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise InputError(f"{where}, is not JSON") from error
                if not isinstance(record, dict):
                    raise InputError(f"{where}, is not a JSON object")
                yield where, record
    except (OSError, EOFError, lzma.LZMAError) as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read chats from {path}: {why}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text") from error


def _chats_of(
    record: Mapping[str, Any],
    renderer: Renderer | None,
    tokenize: Callable[[str], list[int]] | None,
    thinking: bool | None,
) -> list[Chat]:
    """The chats of one record; several where a template rewrites earlier turns."""
    if "token_ids" in record:
        return [from_record(record)]
    if "prompt_ids" in record:
        prompt, answer = tuple(record["prompt_ids"]), tuple(record["answer_ids"])
        spans = ((len(prompt), len(prompt) + len(answer)),) if answer else ()
        return [from_record({"token_ids": prompt + answer, "answers": spans})]
    messages = messages_of(record)
    if messages is not None:
        if renderer is None:
            raise InputError("it holds messages, but the target's tokenizer has no chat template")
        return [
            Chat(document.token_ids, document.answers, tuple(messages), None, thinking)
            for document in renderer.documents(messages)
        ]
    if isinstance(record.get("text"), str):
        if tokenize is None:
            raise InputError("it holds text, but the target has no tokenizer")
        ids = tuple(tokenize(record["text"]))
        return [Chat(ids, ((1, len(ids)),) if len(ids) > 1 else ())]
    raise InputError(f"it has none of the known fields: {_KNOWN}")
