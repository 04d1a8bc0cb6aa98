"""Chat records, and readers of other layouts."""

from __future__ import annotations

import gzip
import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream.core.errors import InputError
from slipstream.data.chats import Chat, write_chats
from slipstream.data.readers import read_chats, records
from slipstream.data.render import Renderer
from tests.data.templates import tokenizer_of

MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tokenizer_of("chatml")


@pytest.fixture(scope="module")
def renderer(tokenizer: Any) -> Renderer:
    return Renderer(tokenizer)


def write(path: Path, *entries: Any) -> Path:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


def test_chats_round_trip_and_are_not_overwritten(tmp_path: Path) -> None:
    chats = [
        Chat((1, 2, 3, 2), ((2, 4),), ({"role": "user", "content": "Grüße, 世界\n"},), 0.0, None, 4),
        Chat((5, 6, 7, 8), ((1, 2), (3, 4)), (), None, True, 9),
    ]
    path = tmp_path / "chats.jsonl"
    write_chats(path, chats)
    assert read_chats(path, None).chats == chats
    with pytest.raises(InputError, match="--force"):
        write_chats(path, chats[:1])
    write_chats(path, chats[:1], force=True)
    assert read_chats(path, None).chats == chats[:1]
    assert chats[1].answer_tokens == 2


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    write_chats(path, [Chat((1, 2), ((1, 2),))])

    def broken() -> Any:
        yield Chat((3, 4), ((1, 2),))
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        write_chats(path, broken(), force=True)
    assert read_chats(path, None).chats[0].token_ids == (1, 2)
    assert [file.name for file in tmp_path.iterdir()] == ["chats.jsonl"]


@pytest.mark.parametrize("spans", [((0, 1),), ((2, 2),), ((1, 5),), ((2, 3), (1, 2)), ((1, 3), (2, 4))])
def test_spans_that_do_not_fit_are_refused(spans: Any) -> None:
    with pytest.raises(InputError, match="answer span"):
        Chat((1, 2, 3, 4), spans)


def test_layouts_of_others(tmp_path: Path, renderer: Renderer, tokenizer: Any) -> None:
    expected = renderer.documents(MESSAGES)[0]
    same = [
        {"messages": MESSAGES},
        {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]},
        {"conversations": MESSAGES},
        {"prompt": "Why?", "response": "Because."},
        {"instruction": "Why?", "output": "Because."},
        {"token_ids": list(expected.token_ids), "answers": [list(span) for span in expected.answers]},
        {
            "prompt_ids": list(expected.token_ids[: expected.answers[0][0]]),
            "answer_ids": list(expected.token_ids[expected.answers[0][0] :]),
        },
    ]
    reading = read_chats(write(tmp_path / "a.jsonl", *same), renderer)
    assert [chat.token_ids for chat in reading.chats] == [expected.token_ids] * len(same)
    assert [chat.answers for chat in reading.chats] == [expected.answers] * len(same)
    text = read_chats(write(tmp_path / "b.jsonl", {"text": "abc"}), None, lambda t: [0, *map(ord, t)])
    assert text.chats[0] == Chat((0, 97, 98, 99), ((1, 4),))
    system = {"system": "Be brief.", "prompt": "Why?", "response": "Because."}
    (chat,) = read_chats(write(tmp_path / "c.jsonl", system), renderer).chats
    assert "Be brief." in tokenizer.decode(chat.token_ids)


def test_parquet_is_read_like_jsonl(tmp_path: Path, renderer: Renderer) -> None:
    datasets = pytest.importorskip("datasets")
    path = tmp_path / "a.parquet"
    datasets.Dataset.from_list([{"messages": MESSAGES}, {"messages": MESSAGES}]).to_parquet(str(path))
    reading = read_chats(path, renderer)
    assert [chat.answers for chat in reading.chats] == [renderer.documents(MESSAGES)[0].answers] * 2


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.xz"])
def test_packed_files_are_read_and_damaged_ones_refused(
    tmp_path: Path, renderer: Renderer, name: str
) -> None:
    line = json.dumps({"messages": MESSAGES}).encode() + b"\n"
    path = tmp_path / name
    path.write_bytes((gzip if name.endswith("gz") else lzma).compress(line * 3))
    assert len(read_chats(path, renderer).chats) == 3
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(InputError, match="cannot read chats from"):
        read_chats(path, renderer)


def test_records_without_an_answer_are_counted(tmp_path: Path, renderer: Renderer) -> None:
    path = write(tmp_path / "a.jsonl", {"messages": MESSAGES[:1]}, {"messages": MESSAGES}, {"prompt": "Why?"})
    reading = read_chats(path, renderer)
    assert (len(reading.chats), reading.skipped) == (1, 2)
    assert (
        len(read_chats(write(tmp_path / "b.jsonl", *[{"messages": MESSAGES}] * 5), renderer, limit=2).chats)
        == 2
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "is not JSON"),
        ("[1, 2]", "is not a JSON object"),
        ('{"messages": 3}', "is not a chat record"),
        ('{"messages": [{"role": "user"}]}', None),
        ('{"question_text": "x"}', "none of the known fields"),
        ('{"token_ids": [1, 2], "answers": [[0, 9]]}', "answer span"),
        ('{"token_ids": "x", "answers": []}', "is not a chat record"),
        ('{"prompt_ids": [1]}', "is not a chat record"),
    ],
)
def test_a_bad_record_is_named(tmp_path: Path, renderer: Renderer, line: str, words: str | None) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": MESSAGES}) + "\n\n" + line + "\n")
    if words is None:
        assert read_chats(path, renderer).skipped == 1
        return
    with pytest.raises(InputError, match=f"line 3.*{words}"):
        read_chats(path, renderer)


def test_missing_sources_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot read chats from"):
        list(records(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="no such file"):
        list(records(tmp_path / "none.parquet"))
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(InputError, match="not UTF-8"):
        list(records(tmp_path / "latin.jsonl"))
    messages = write(tmp_path / "m.jsonl", {"messages": MESSAGES})
    with pytest.raises(InputError, match="no chat template"):
        read_chats(messages, None)


def test_thinking_is_stored(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("qwen 3")
    path = write(tmp_path / "m.jsonl", {"messages": MESSAGES})
    (chat,) = read_chats(path, Renderer(tokenizer, False), thinking=False).chats
    assert chat.thinking is False
    assert replace(chat, thinking=None) != chat
