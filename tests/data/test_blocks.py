"""Rows, anchors, labels and padding against slow loops; shards survive the disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.data.blocks import build_batch, cut, draw_anchors, pack
from slipstream.data.features import (
    Document,
    FeatureIndex,
    FeatureStore,
    answer_numbers,
    is_whole,
    open_index,
    read_index,
    write_index,
    write_shard,
)
from tests.train.tiny import random_document

INDEX = FeatureIndex("tiny", (0, 1), 16, 3, "template", "chats")


def two_answers(length: int, seed: int) -> Document:
    """A document with answers at 2..5 and 7..length."""
    document = random_document(length, 2, seed)
    return replace(document, answer_L=answer_numbers(length, [(2, 5), (7, length)]))


def test_anchors_are_answer_tokens_with_a_successor_in_their_answer() -> None:
    document = two_answers(12, seed=0)
    seen = set()
    for seed in range(50):
        anchors = draw_anchors(document, 3, torch.Generator().manual_seed(seed)).tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == 3
        seen |= set(anchors)
    assert seen == {2, 3, *range(7, 11)}
    assert draw_anchors(document, 99, None).tolist() == sorted(seen)


def test_an_answer_of_one_token_has_no_anchor() -> None:
    assert len(draw_anchors(random_document(6, 5, seed=0), 4, None)) == 0


def test_packing_keeps_documents_whole_and_apart() -> None:
    documents = [two_answers(length, seed=length) for length in (9, 20, 11, 8, 20, 10)]
    rows = pack(documents)
    assert sorted(len(row.document) for row in rows) == [18, 20, 20, 20]
    for row in rows:
        assert sum(len(document) for document, _ in row.parts) == len(row.document) <= 20
        numbers = set()
        for document, start in row.parts:
            part = row.document.window(start, start + len(document))
            assert part.tokens_L.equal(document.tokens_L)
            assert part.features_LE.equal(document.features_LE)
            assert (row.start_L[start : start + len(document)] == start).all()
            own = set(part.answer_L.unique().tolist()) - {0}
            assert len(own) == 2
            assert not own & numbers
            numbers |= own


def test_batch_against_loops() -> None:
    documents = [two_answers(12, seed=1), random_document(9, 3, seed=2), two_answers(20, seed=3)]
    rows = pack(documents)
    assert len(rows) == 3 or len(rows) == 2
    anchors = [draw_anchors(row.document, 99, None) for row in rows]
    anchors[0] = anchors[0][:2]
    batch = build_batch(rows, anchors, num_drafts=3)
    for b, (row, anchor_A) in enumerate(zip(rows, anchors, strict=True)):
        joined = row.document
        torch.testing.assert_close(batch.features_BLE[b, : len(joined)], joined.features_LE)
        for a in range(batch.anchor_BA.shape[1]):
            real = a < len(anchor_A)
            for k in range(1, 4):
                position = int(anchor_A[a]) + k if real else 0
                inside = real and position < len(joined)
                inside = inside and joined.answer_L[position] == joined.answer_L[int(anchor_A[a])]
                assert bool(batch.labelled_BAK[b, a, k - 1]) == inside
                if inside:
                    assert batch.label_ids_BAK[b, a, k - 1] == joined.tokens_L[position]
                    assert batch.top_ids_BAKJ[b, a, k - 1, 0] == joined.tokens_L[position]
                    torch.testing.assert_close(
                        batch.top_logprobs_BAKJ[b, a, k - 1], joined.top_logprobs_LJ[position - 1]
                    )
            if real:
                place = int(anchor_A[a])
                assert batch.anchor_ids_BA[b, a] == joined.tokens_L[place]
                (start,) = (s for d, s in row.parts if s <= place < s + len(d))
                assert batch.start_BA[b, a] == start
    assert batch.blocks == sum(len(anchor_A) for anchor_A in anchors)


def test_long_documents_are_cut_around_an_anchor() -> None:
    document = random_document(100, 40, seed=0)
    assert cut(document, 100, None) is document
    assert cut(document, 30, None).tokens_L.equal(document.tokens_L[70:])
    starts = set()
    for seed in range(30):
        part = cut(document, 40, torch.Generator().manual_seed(seed))
        assert len(part) == 40
        found = [s for s in range(61) if document.tokens_L[s : s + 40].equal(part.tokens_L)]
        starts |= set(found)
        assert len(draw_anchors(part, 5, None)) == 5
    assert len(starts) > 5
    assert min(starts) >= 10


def stored(folder: Path) -> list[Document]:
    documents = [random_document(5 + n, 2, seed=n) for n in range(4)]
    shards = {}
    for number, part in enumerate((documents[:3], documents[3:])):
        name = f"shard-{number}.safetensors"
        shards[name] = write_shard(folder / name, part)
    write_index(folder, replace(INDEX, shards=shards))
    return documents


def test_shards_round_trip(tmp_path: Path) -> None:
    documents = stored(tmp_path)
    store = FeatureStore(tmp_path)
    assert replace(store.index, shards={}) == INDEX
    assert len(store) == 4
    assert store.answer_tokens() == sum(3 + n for n in range(4))
    assert [store.longest_answer(n) for n in range(4)] == [3, 4, 5, 6]
    counts = torch.bincount(torch.cat([doc.tokens_L for doc in documents]), minlength=64)
    assert store.token_counts(64).equal(counts)
    for number, document in enumerate(documents):
        read = store[number]
        assert read.answer_L.equal(document.answer_L)
        assert read.tokens_L.equal(document.tokens_L)
        assert read.top_ids_LJ.equal(document.top_ids_LJ)
        assert read.features_LE.equal(document.features_LE.bfloat16())


def test_missing_and_damaged_shards_are_one_sentence(tmp_path: Path) -> None:
    stored(tmp_path)
    path = tmp_path / "shard-1.safetensors"
    mark = read_index(tmp_path).shards[path.name]
    assert is_whole(path, mark)
    data = path.read_bytes()
    path.write_bytes(data[:40])
    assert not is_whole(path, mark)
    with pytest.raises(InputError, match="damaged"):
        FeatureStore(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="missing"):
        FeatureStore(tmp_path)
    assert not is_whole(path, mark)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"target": "other"}, "target"),
        ({"target_layer_ids": (0,)}, "choice of taps"),
        ({"template": "x"}, "chat template"),
        ({"chats": "x"}, "set of chats"),
        ({"width": 8}, "width"),
    ],
)
def test_features_of_something_else_are_refused(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    assert open_index(tmp_path, INDEX) == INDEX
    assert open_index(tmp_path, INDEX) == INDEX
    with pytest.raises(InputError, match=f"another {words}"):
        open_index(tmp_path, replace(INDEX, **change))  # type: ignore[arg-type]


def test_a_folder_without_features_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"index\.json"):
        read_index(tmp_path / "nowhere")
    open_index(tmp_path, INDEX)
    with pytest.raises(InputError, match="no feature shards"):
        FeatureStore(tmp_path)
