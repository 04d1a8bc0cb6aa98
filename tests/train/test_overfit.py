"""The whole path on a tiny target: chats, features, training, and decoding with what was learnt.

A drafter that cannot learn twenty chats by heart has a fault in its mask, its positions or its labels.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions, TrainOptions
from slipstream.core.records import Completion, Request
from slipstream.data.chats import Chat
from slipstream.data.extract import extract_features
from slipstream.data.features import FeatureStore
from slipstream.data.live import LiveFeatures
from slipstream.decode import DraftProposer, Engine
from slipstream.model import DraftConfig
from slipstream.target import Target
from slipstream.testing import tiny_config, tiny_target
from slipstream.train.checkpoint import new_run, restore, save
from slipstream.train.evaluate import evaluate
from slipstream.train.loop import train
from slipstream.train.prepare import fresh_drafter, frozen_ends

BLOCK = 6
OPTIONS = TrainOptions(
    max_steps=300,
    documents=10,
    anchors=24,
    learning_rate=1e-2,
    vocabulary=0,
    average=0.9,
    soft_share=0.0,
    initialise=False,
    weight_decay=0.0,
    evaluate_every=10_000,
    save_every=10_000,
)


@pytest.fixture(scope="module")
def target() -> Target:
    config = tiny_config(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=6)
    return tiny_target(config, seed=5)


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    """Sampled, as greedy text of a random model soon repeats itself and would be too easy."""
    generator = torch.Generator().manual_seed(3)
    return [
        Request(
            torch.randint(1, 96, (4,), generator=generator).tolist(),
            SamplingOptions(temperature=0.8, seed=number, max_tokens=32, ignore_eos=True),
        )
        for number in range(20)
    ]


@pytest.fixture(scope="module")
def spoken(target: Target, requests: list[Request]) -> list[Completion]:
    return Engine(target).generate(requests)


def chats_of(requests: list[Request], spoken: list[Completion]) -> list[Chat]:
    return [
        Chat(
            (*request.prompt_ids, *completion.token_ids),
            ((len(request.prompt_ids), len(request.prompt_ids) + len(completion.token_ids)),),
        )
        for request, completion in zip(requests, spoken, strict=True)
    ]


@pytest.fixture(scope="module")
def store(
    target: Target,
    requests: list[Request],
    spoken: list[Completion],
    tmp_path_factory: pytest.TempPathFactory,
) -> FeatureStore:
    chats = chats_of(requests, spoken)
    folder = tmp_path_factory.mktemp("features")
    extract_features(target, chats, config_for(target).target_layer_ids, folder, candidates=4, shard_size=8)
    return FeatureStore(folder)


def config_for(target: Target) -> DraftConfig:
    return DraftConfig.for_target(target.info, num_layers=2, block_size=BLOCK, num_taps=2)


def test_features_are_the_targets_hidden_states(target: Target, store: FeatureStore) -> None:
    document = store[13]
    with torch.no_grad():
        output = target.model(document.tokens_L[None], output_hidden_states=True)
    taps = [output.hidden_states[layer + 1][0] for layer in store.index.target_layer_ids]
    torch.testing.assert_close(document.features_LE.float(), torch.cat(taps, -1), atol=2e-2, rtol=1e-2)
    top = output.logits[0].log_softmax(-1).topk(4)
    torch.testing.assert_close(document.top_logprobs_LJ, top.values, atol=2e-3, rtol=1e-3)


def test_twenty_chats_are_learnt_by_heart(
    target: Target, store: FeatureStore, requests: list[Request], spoken: list[Completion], tmp_path: Path
) -> None:
    drafter, _ = fresh_drafter(config_for(target), target, store, OPTIONS)
    run = new_run(drafter, OPTIONS)
    ends = frozen_ends(target)
    before = evaluate(run.average, ends, store).acceptance_length
    train(run, ends, store, None, OPTIONS, tmp_path)
    after = evaluate(run.average, ends, store).acceptance_length
    assert before < 1.5
    assert after > 0.8 * BLOCK
    engine = Engine(target, DraftProposer(target, run.average.eval()), EngineOptions(drafts="max"))
    drafted = engine.generate(requests)
    assert [c.token_ids for c in drafted] == [c.token_ids for c in spoken]
    emitted = sum(c.emitted_in_rounds for c in drafted)
    assert emitted / sum(c.rounds for c in drafted) > 0.8 * BLOCK


def test_a_stopped_run_continues(target: Target, store: FeatureStore, tmp_path: Path) -> None:
    options = replace(OPTIONS, max_steps=3)
    drafter, _ = fresh_drafter(config_for(target), target, store, options)
    run = new_run(drafter, options)
    train(run, frozen_ends(target), store, None, options, tmp_path)
    assert run.step == 3
    other, _ = fresh_drafter(config_for(target), target, store, replace(options, seed=9))
    again = new_run(other, options)
    assert restore(again, tmp_path)
    assert again.step == 3
    for mine, theirs in zip(run.drafter.parameters(), again.drafter.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    save(again, tmp_path)
    longer = replace(options, max_steps=5)
    train(again, frozen_ends(target), store, None, longer, tmp_path)
    assert again.step == 5


def test_live_features_are_those_on_disk(
    target: Target, requests: list[Request], spoken: list[Completion], store: FeatureStore
) -> None:
    live = LiveFeatures(target, chats_of(requests, spoken), store.index.target_layer_ids, candidates=4)
    assert replace(live.index, shards={}) == replace(store.index, shards={})
    assert len(live) == len(store)
    assert live.answer_tokens() == store.answer_tokens()
    assert live.token_counts(96).equal(store.token_counts(96))
    assert [live.longest_answer(n) for n in range(20)] == [store.longest_answer(n) for n in range(20)]
    assert [live.length(n) for n in range(20)] == [store.length(n) for n in range(20)]
    for number, mine in zip((3, 0, 19), live.documents((3, 0, 19)), strict=True):
        theirs = store[number]
        assert mine.tokens_L.equal(theirs.tokens_L)
        assert mine.answer_L.equal(theirs.answer_L)
        torch.testing.assert_close(mine.features_LE, theirs.features_LE, atol=2e-2, rtol=1e-2)
        torch.testing.assert_close(mine.top_logprobs_LJ, theirs.top_logprobs_LJ, atol=4e-3, rtol=1e-3)


def test_features_of_other_layers_are_refused(target: Target, store: FeatureStore, tmp_path: Path) -> None:
    config = replace(config_for(target), target_layer_ids=(0, 3))
    drafter, _ = fresh_drafter(config, target, store, OPTIONS)
    with pytest.raises(InputError, match="features hold layers"):
        train(new_run(drafter, OPTIONS), frozen_ends(target), store, None, OPTIONS, tmp_path)
