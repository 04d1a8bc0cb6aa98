"""Features of chats: resumed after a loss, written by several processes, told in size beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.core.options import TargetOptions
from slipstream.data.chats import Chat
from slipstream.data.extract import Workers, documents_of, extract_features, feature_bytes
from slipstream.data.features import FeatureStore, read_index
from slipstream.target import Target, load_target
from tests.tiny import save_target

TAPS = (0, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = save_target(tmp_path_factory.mktemp("models") / "target")
    return made


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return load_target(str(folder), TargetOptions(dtype="float32"))


def chats_of(count: int) -> list[Chat]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 40, (count,), generator=generator).tolist()
    return [
        Chat(tuple(torch.randint(0, 256, (n,), generator=generator).tolist()), ((3, 5), (5, n)))
        for n in lengths
    ]


def test_features_are_the_models_own_whatever_shares_a_pass(target: Target) -> None:
    chats = chats_of(9)
    target.set_taps(TAPS)
    for chat, document in zip(chats, documents_of(target, chats, 5), strict=True):
        tokens = torch.tensor([chat.token_ids])
        with torch.no_grad():
            output = target.model(tokens, output_hidden_states=True)
        states = torch.cat([output.hidden_states[1][0], output.hidden_states[2][0]], -1)
        # The last entry of transformers has passed the final norm; the tap is before it.
        torch.testing.assert_close(document.features_LE[:, :32].float(), states[:, :32], atol=2e-2, rtol=1e-2)
        top = output.logits[0].log_softmax(-1).topk(5)
        torch.testing.assert_close(document.top_logprobs_LJ, top.values, atol=1e-4, rtol=1e-4)
        assert document.answer_L.tolist() == [0, 0, 0, 1, 1, *[2] * (len(chat.token_ids) - 5)]


def same(one: Path, other: Path) -> None:
    mine, theirs = FeatureStore(one), FeatureStore(other)
    assert len(mine) == len(theirs)
    for number in range(len(mine)):
        for name, value in vars(theirs[number]).items():
            assert torch.equal(getattr(mine[number], name), value)


def test_lost_and_damaged_shards_are_written_again_and_no_others(target: Target, tmp_path: Path) -> None:
    chats, lines = chats_of(10), []
    extract_features(target, chats, TAPS, tmp_path / "a", 4, shard_size=3, report=lines.append)
    tokens = sum(len(chat.token_ids) for chat in chats)
    assert f"{tokens} tokens" in lines[0]
    written = sum(path.stat().st_size for path in (tmp_path / "a").glob("shard-*"))
    assert feature_bytes(tokens, 2, 32, 4) == pytest.approx(written, rel=0.3)
    extract_features(target, chats, TAPS, tmp_path / "b", 4, shard_size=3)
    shards = sorted((tmp_path / "b").glob("shard-*"))
    assert len(shards) == 4
    times = [shard.stat().st_mtime_ns for shard in shards]
    shards[1].unlink()
    shards[2].write_bytes(shards[2].read_bytes()[:-9] + b"different")
    extract_features(target, chats, TAPS, tmp_path / "b", 4, shard_size=3)
    again = [shard.stat().st_mtime_ns for shard in shards]
    assert [a == b for a, b in zip(times, again, strict=True)] == [True, False, False, True]
    same(tmp_path / "b", tmp_path / "a")


def test_workers_write_what_one_process_writes(target: Target, folder: Path, tmp_path: Path) -> None:
    chats = chats_of(10)
    extract_features(target, chats, TAPS, tmp_path / "one", 4, shard_size=3)
    workers = Workers(2, str(folder), TargetOptions(dtype="float32"))
    extract_features(target, chats, TAPS, tmp_path / "two", 4, shard_size=3, workers=workers)
    assert read_index(tmp_path / "two").shards.keys() == read_index(tmp_path / "one").shards.keys()
    same(tmp_path / "two", tmp_path / "one")
