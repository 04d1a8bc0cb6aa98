"""Anchors, labels and padding against slow loops; shards survive the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.data.blocks import build_batch, draw_anchors
from slipstream.data.features import FeatureIndex, FeatureStore, read_index, write_index, write_shard
from tests.train.tiny import random_document


def test_anchors_are_answer_tokens_with_a_successor() -> None:
    document = random_document(12, 5, seed=0)
    seen = set()
    for seed in range(50):
        anchors = draw_anchors(document, 3, torch.Generator().manual_seed(seed)).tolist()
        assert anchors == sorted(set(anchors))
        assert len(anchors) == 3
        seen |= set(anchors)
    assert seen == set(range(5, 11))
    assert draw_anchors(document, 99, None).tolist() == list(range(5, 11))


def test_an_answer_of_one_token_has_no_anchor() -> None:
    assert len(draw_anchors(random_document(6, 5, seed=0), 4, None)) == 0


def test_batch_against_loops() -> None:
    documents = [random_document(12, 4, seed=1), random_document(9, 3, seed=2)]
    anchors = [torch.tensor([4, 7, 10]), torch.tensor([3, 7])]
    batch = build_batch(documents, anchors, num_drafts=3)
    for b, (document, anchor_A) in enumerate(zip(documents, anchors, strict=True)):
        assert batch.length_B[b] == len(document)
        torch.testing.assert_close(batch.features_BLE[b, : len(document)], document.features_LE)
        for a in range(3):
            real = a < len(anchor_A)
            for k in range(1, 4):
                inside = real and int(anchor_A[a]) + k < len(document)
                assert bool(batch.labelled_BAK[b, a, k - 1]) == inside
                if inside:
                    position = int(anchor_A[a]) + k
                    assert batch.label_ids_BAK[b, a, k - 1] == document.tokens_L[position]
                    assert batch.top_ids_BAKJ[b, a, k - 1, 0] == document.tokens_L[position]
                    torch.testing.assert_close(
                        batch.top_logprobs_BAKJ[b, a, k - 1], document.top_logprobs_LJ[position - 1]
                    )
            if real:
                assert batch.anchor_ids_BA[b, a] == document.tokens_L[int(anchor_A[a])]


def test_shards_round_trip(tmp_path: Path) -> None:
    index = FeatureIndex("tiny", (0, 1), 16, 3)
    write_index(tmp_path, index)
    documents = [random_document(5 + n, 2, seed=n) for n in range(4)]
    write_shard(tmp_path / "shard-0.safetensors", documents[:3])
    write_shard(tmp_path / "shard-1.safetensors", documents[3:])
    store = FeatureStore(tmp_path)
    assert store.index == index
    assert len(store) == 4
    assert store.answer_tokens() == sum(3 + n for n in range(4))
    counts = torch.bincount(torch.cat([doc.tokens_L for doc in documents]), minlength=64)
    assert store.token_counts(64).equal(counts)
    for number, document in enumerate(documents):
        read = store[number]
        assert read.prompt_length == document.prompt_length
        assert read.tokens_L.equal(document.tokens_L)
        assert read.top_ids_LJ.equal(document.top_ids_LJ)
        assert read.features_LE.equal(document.features_LE.bfloat16())


def test_features_of_something_else_are_refused(tmp_path: Path) -> None:
    write_index(tmp_path, FeatureIndex("tiny", (0, 1), 16, 3))
    with pytest.raises(InputError, match="other taps"):
        write_index(tmp_path, FeatureIndex("tiny", (0,), 16, 3))
    with pytest.raises(InputError, match=r"index\.json"):
        read_index(tmp_path / "nowhere")
    with pytest.raises(InputError, match="no feature shards"):
        FeatureStore(tmp_path)
