"""Captured rounds: what is captured could be a CUDA graph, and a replay says what the round itself says.

There is no card here. A tape stands for the graph: it runs the recorded operations on the recorded tensors,
without their Python, and spoils in between what a graph does not own in between.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import slipstream.decode.graphs as graphs
import slipstream.decode.sampling as sampling
from slipstream.core.options import EngineOptions, SamplingOptions
from slipstream.core.records import Request
from slipstream.decode import DraftProposer, Engine, LookupProposer, NullProposer, Proposer, check
from slipstream.decode.graphs import CudaRecorder, Fixed, Graphs, Replayed
from slipstream.decode.plain import plain_decode
from slipstream.decode.rows import Rows
from slipstream.model import DraftConfig, Drafter
from slipstream.tape import Tape, TapeRecorder
from slipstream.target import Target, target_from_model
from slipstream.testing import ScriptedProposer, random_draft, tiny_config, tiny_target

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9},
    "top_k": {"temperature": 0.9, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "filters": {"temperature": 1.1, "top_k": 9, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"logit_bias": {3: 4.0, 9: -100.0}, "min_tokens": 9, "stop_token_ids": (5, 11, 17)},
}


def proposers(target: Target, drafter: Drafter) -> dict[str, Proposer | None]:
    return {
        "plain": None,
        "drafter": DraftProposer(target, drafter),
        "not kept": NullProposer(4),
        "lookup": LookupProposer(4),
    }


PROPOSERS = ("plain", "drafter", "not kept", "lookup")


def taped(
    target: Target, proposer: Proposer | None, tape: TapeRecorder | None = None, **options: Any
) -> Engine:
    return Engine(target, proposer, EngineOptions(**options), tape or TapeRecorder())


def request(prompt: tuple[int, ...] = (3, 4, 5), **options: Any) -> Request:
    return Request(prompt, SamplingOptions(**({"max_tokens": 20, "seed": 1} | options)))


def any_request(draw: random.Random) -> Request:
    prompt = tuple(draw.randrange(1, 60) for _ in range(draw.choice([1, 3, 17, 40, 61])))
    settings = dict(draw.choice(list(SETTINGS.values())))
    settings.pop("min_tokens", None)
    return request(prompt, max_tokens=draw.choice([1, 2, 9, 30]), seed=draw.randrange(99), **settings)


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", PROPOSERS)
def test_texts_are_the_oracles(target: Target, drafter: Drafter, name: str, settings: str) -> None:
    engine = taped(target, proposers(target, drafter)[name], drafts="max" if name != "plain" else "auto")
    requests = [request(**SETTINGS[settings]), request((9,), max_tokens=30, ignore_eos=True)]
    done = engine.generate(requests)
    assert [list(item.token_ids) for item in done] == [plain_decode(target, r) for r in requests]
    assert engine.graphs.replayed == max(item.rounds for item in done)
    assert not engine.graphs.as_they_are


@pytest.mark.parametrize("name", PROPOSERS)
def test_a_second_call_captures_nothing_new(target: Target, drafter: Drafter, name: str) -> None:
    engine = taped(target, proposers(target, drafter)[name], drafts="max" if name != "plain" else "auto")
    for number in range(3):
        asked = request(seed=number, temperature=0.5 + number / 4, ignore_eos=True)
        assert list(engine.generate([asked])[0].token_ids) == plain_decode(target, asked)
    assert engine.graphs.captured == 1
    assert not engine.graphs.as_they_are


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", PROPOSERS)
def test_arrivals_cancellations_and_parked_rounds(
    target: Target, drafter: Drafter, name: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buckets change, buffers grow, rows change hands, drafts come and go."""
    monkeypatch.setattr(graphs, "_FEWEST", 64)
    draw = random.Random(seed)
    engine = taped(target, proposers(target, drafter)[name], max_rows=3, prefill_chunk=20)
    drafts = [0] if name == "plain" else [0, 0, 1, 3]
    monkeypatch.setattr(engine._draft_length, "choose", lambda *told: draw.choice(drafts))
    rows = engine.open()
    asked: dict[int, Request] = {}
    gone: set[int] = set()
    while rows.busy or len(asked) < 10:
        while len(asked) < 10 and (draw.random() < 0.4 or not rows.busy):
            new = any_request(draw)
            asked[rows.submit(new)] = new
        if draw.random() < 0.1:
            number = draw.choice(list(asked))
            if number not in rows.completions:
                rows.cancel(number)
                gone.add(number)
        rows.step()
    for number, done in rows.completions.items():
        assert list(done.token_ids) == plain_decode(target, asked[number])
    assert set(rows.completions) == set(asked) - gone
    assert engine.graphs.replayed > 10
    assert not engine.graphs.as_they_are


@pytest.mark.parametrize("settings", ["greedy", "top_p", "filters"])
def test_long_texts_pass_through_many_sizes(settings: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_FEWEST", 64)
    monkeypatch.setattr(graphs, "_FINER", 64)
    target = tiny_target(tiny_config(max_position_embeddings=1024))
    torch.manual_seed(0)
    drafter = Drafter(DraftConfig.for_target(target.info, num_layers=1, block_size=4, num_taps=2)).eval()
    asked = request(max_tokens=220, ignore_eos=True, **SETTINGS[settings])
    eager = Engine(target, DraftProposer(target, drafter), EngineOptions(drafts="max")).generate([asked])[0]
    engine = taped(target, DraftProposer(target, drafter), drafts="max")
    assert engine.generate([asked])[0].token_ids == eager.token_ids
    assert engine.graphs.captured >= 4  # 64, 96, 128, 192, 256
    assert engine.graphs.replayed == eager.rounds


def test_the_acceptor_reject_draws_the_same(target: Target, drafter: Drafter) -> None:
    options: dict[str, Any] = {"acceptor": "reject", "draft_noise": "argmax", "drafts": "max"}
    requests = [request(temperature=0.9, seed=n, top_p=0.9, ignore_eos=True) for n in range(3)]
    proposer = DraftProposer(target, drafter)
    eager = Engine(target, proposer, EngineOptions(**options)).generate(requests)
    engine = taped(target, proposer, **options)
    assert [item.token_ids for item in engine.generate(requests)] == [item.token_ids for item in eager]
    assert engine.graphs.replayed
    assert not engine.graphs.as_they_are


@pytest.mark.parametrize("acceptor", ["match", "reject"])
@pytest.mark.parametrize("name", ["plain", "drafter", "lookup"])
def test_rows_that_have_to_choose_again(
    target: Target, drafter: Drafter, name: str, acceptor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody moves in such a round until everybody's choice is made."""
    requests = [
        request(temperature=1.5, top_p=0.95, repetition_penalty=1.2, seed=n, ignore_eos=True)
        for n in range(3)
    ]
    options: dict[str, Any] = {"acceptor": acceptor, "draft_noise": "argmax"}
    if name != "plain":
        options["drafts"] = "max"
    monkeypatch.setattr(sampling, "SURVIVORS", 8)
    eager = Engine(target, proposers(target, drafter)[name], EngineOptions(**options)).generate(requests)
    again = 0
    choose_again = graphs.choose_again

    def counted(*args: Any) -> Any:
        nonlocal again
        again += 1
        return choose_again(*args)

    monkeypatch.setattr(graphs, "choose_again", counted)
    engine = taped(target, proposers(target, drafter)[name], **options)
    done = engine.generate(requests)
    assert again > 3
    assert [item.token_ids for item in done] == [item.token_ids for item in eager]


def test_scripted_drafts_are_kept_as_far_as_they_are_right(target: Target) -> None:
    asked = request((7, 3, 9), max_tokens=40, ignore_eos=True)
    text = plain_decode(target, asked)
    proposer = ScriptedProposer([[7, 3, 9, *text]], random_draft(3), 6)
    engine = taped(target, proposer, drafts="max")
    done = engine.generate([asked])[0]
    assert list(done.token_ids) == text
    assert done.acceptance_length > 1.5
    assert engine.graphs.replayed == done.rounds


def test_every_check_passes_on_captured_rounds(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Graphs] = []

    def all_taped(of: Target, options: EngineOptions, block_size: int, recorder: None = None) -> Graphs:
        made.append(Graphs(TapeRecorder(), "", block_size))
        return made[-1]

    monkeypatch.setattr("slipstream.decode.engine.graphs_of", all_taped)
    report = check(target, DraftProposer(target, drafter), [request(temperature=t) for t in (0.0, 0.8)])
    assert report.exact
    assert report.ties == 0
    assert report.graphs.startswith("CUDA graphs: ")
    assert len(made) == 3
    assert all(one.report.replayed for one in made)


# What is captured can be captured: the same operations, shapes and addresses whatever the rows hold.


def outlines(rows: Rows, engine: Engine, steps: int) -> list[list[tuple[Any, ...]]]:
    """What the next rounds do, each recorded anew over the same tensors."""
    found, batch = [], rows._batch
    for _ in range(steps):
        visible = engine._graphs.visible(64)
        batch.anchor_B = engine._graphs._fixed.keep("anchor", batch.anchor_B)
        batch.length_B = engine._graphs._fixed.keep("length", batch.length_B)
        outside = bool(batch.num_drafts) and batch.proposer is not None and batch.proposer.generation is None
        with torch.no_grad(), Tape() as tape:
            engine._graphs._work(batch, min(visible, batch.cache.slots), outside)
        assert not tape.refused()
        found.append(tape.outline())
        rows.step()
    return found


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("acceptor", ["match", "reject"])
def test_rounds_differ_in_numbers_alone(
    target: Target, drafter: Drafter, name: str, settings: str, acceptor: str
) -> None:
    options: dict[str, Any] = {
        "acceptor": acceptor,
        "draft_noise": "argmax" if acceptor == "reject" else "coupled",
    }
    if name != "plain":
        options["drafts"] = 3
    engine = taped(target, proposers(target, drafter)[name], max_rows=2, **options)
    rows = engine.open()
    endless: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True, "stop_token_ids": ()}
    for number in range(2):
        rows.submit(request((3 + number,) * (1 + 9 * number), **(SETTINGS[settings] | endless)))
    for _ in range(3):
        rows.step()
    lengths = rows._batch.length_B.tolist()
    first, *others = outlines(rows, engine, 4)
    assert rows._batch.length_B.tolist() != lengths
    assert len(first) > 50
    assert all(other == first for other in others)


def test_a_row_that_changes_hands_keeps_its_addresses(target: Target, drafter: Drafter) -> None:
    """Other lengths, seeds, temperatures and filters of the same kind; the buffers stay."""
    engine = taped(target, DraftProposer(target, drafter), max_rows=2, drafts=3)
    found = []
    for temperature, top_k, prompt in ((0.7, 5, 3), (1.3, 5, 17), (0.2, 5, 40)):
        rows = engine.open()
        for number in range(2):
            asked = request(
                (3 + number,) * prompt, temperature=temperature * number, top_k=top_k, seed=number + prompt
            )
            rows.submit(asked)
        rows.step()
        rows.step()
        found.append(outlines(rows, engine, 1)[0])
    assert found[0] == found[1] == found[2]


def test_the_tape_sees_what_it_should() -> None:
    """Host reads, host data, shapes that hang on values, masks as indices; and addresses that move."""
    x, mask = torch.arange(6.0), torch.arange(6) > 2
    bad: dict[str, Callable[[], object]] = {
        "item": lambda: float(x[0]),
        "if": lambda: bool(mask.any()),
        "tolist": lambda: x.nonzero().tolist(),
        "select": lambda: x[mask],
        "put": lambda: x.clone().index_put_((mask,), torch.tensor(0.0)),
        "tensor": lambda: torch.tensor([1, 2]),
        "random": lambda: torch.rand(3),
    }
    for name, work in bad.items():
        with Tape() as tape:
            work()
        assert tape.refused(), name
    with Tape() as tape:
        x[torch.zeros(1, dtype=torch.int64)].add_(1).topk(1)
    assert not tape.refused()

    def outline(value: Tensor) -> list[tuple[Any, ...]]:
        with Tape() as tape:
            (value * 2).sum()
        return tape.outline()

    assert outline(x) == outline(x) != outline(x.clone())
    assert outline(x[:3]) != outline(x[3:])


def test_a_replay_runs_no_python_and_sees_new_numbers() -> None:
    x, factor, out = torch.arange(4.0), 3.0, torch.zeros(4)
    recorder = TapeRecorder()

    def work() -> Tensor:
        out.copy_(x * factor)
        return out.sum()[None]

    result, replay = recorder.record(work)
    x += 1
    factor = 100.0
    replay()
    assert out.tolist() == [3.0, 6.0, 9.0, 12.0]
    assert result.tolist() == [30.0]
    recorder.record(work)[1]()
    assert bool(result.isnan().all())  # another's replay takes its place


# What cannot be captured, and what follows from buffers that move.


def test_places_stay_until_their_shape_changes() -> None:
    fixed = Fixed()
    first = fixed.keep("a", torch.arange(3))
    assert fixed.keep("a", torch.arange(3) + 1) is first
    assert fixed.keep("a", first) is first
    assert first.tolist() == [1, 2, 3]
    fixed.keep("b", torch.zeros(2))
    assert fixed.generation == 0
    assert fixed.keep("a", torch.arange(4)) is not first
    assert fixed.generation == 1
    part = fixed.within("c", torch.ones(2, 3), 5)
    assert part.data_ptr() == fixed.within("c", torch.zeros(2, 4), 5).data_ptr()
    assert part.tolist() == [[0.0] * 3] * 2


@pytest.mark.parametrize("drafted", [False, True])
def test_buffers_of_another_size_are_noticed(target: Target, drafter: Drafter, drafted: bool) -> None:
    tape = TapeRecorder()
    proposer = DraftProposer(target, drafter) if drafted else None
    engine = taped(target, proposer, tape, max_rows=4, drafts="max" if drafted else "auto")
    captured = 0
    for rows, length in ((1, 3), (3, 3), (1, 3), (1, 120)):
        asked = [request((5 + n,) * length, ignore_eos=True) for n in range(rows)]
        done = engine.generate(asked)
        assert [list(item.token_ids) for item in done] == [plain_decode(target, r) for r in asked]
        assert engine.graphs.captured > captured
        captured = engine.graphs.captured
        assert tape.tapes


def test_two_engines_that_share_a_drafter(target: Target, drafter: Drafter) -> None:
    """Each call gives the drafter's buffers another shape, which the other engine's rounds must notice."""
    proposer = DraftProposer(target, drafter)
    one = taped(target, proposer, max_rows=1, drafts="max")
    two = taped(target, proposer, max_rows=2, drafts="max")
    asked = [request((3,), ignore_eos=True), request((4, 5), temperature=0.8)]
    for _ in range(3):
        assert list(one.generate(asked[:1])[0].token_ids) == plain_decode(target, asked[0])
        for done, wanted in zip(two.generate(asked), asked, strict=True):
            assert list(done.token_ids) == plain_decode(target, wanted)
    assert one.graphs.captured == 3
    assert two.graphs.captured == 6  # with a sampled row, and without once it has ended


def test_few_rounds_are_kept(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "_MOST", 2)
    engine = taped(target, None)
    for top_k in (3, 5, 3, 9, 3, 5):
        asked = request(temperature=0.8, top_k=top_k, ignore_eos=True)
        assert list(engine.generate([asked])[0].token_ids) == plain_decode(target, asked)
    # 9 takes the place of 5, which was used before 3.
    assert engine.graphs.captured == 4
    assert len(engine._graphs._captured) == 2


class Refusing(TapeRecorder):
    """A device that captures so many rounds and no more."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.left = after

    def record(self, work: Callable[[], Any]) -> Any:
        self.left -= 1
        result = super().record(work)
        if self.left < 0:
            raise RuntimeError("operation not permitted when stream is capturing\nand much more")
        return result


class Wrong(TapeRecorder):
    """A device whose replays say something else."""

    def record(self, work: Callable[[], Replayed]) -> Any:
        result, replay = super().record(work)

        def wrong() -> None:
            replay()
            result.packed.add_(1)

        return result, wrong


@pytest.mark.parametrize("recorder", [Refusing(), Refusing(after=1), Wrong()])
def test_a_failed_capture_costs_speed_and_nothing_else(
    target: Target, drafter: Drafter, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_FEWEST", 64)
    engine = taped(target, DraftProposer(target, drafter), recorder, drafts="max")
    for options in ({}, {"temperature": 0.9}, {"repetition_penalty": 1.2}):
        asked = request(max_tokens=90, ignore_eos=True, **options)  # type: ignore[arg-type]
        assert list(engine.generate([asked])[0].token_ids) == plain_decode(target, asked)
    assert engine.graphs.reason.startswith("capturing failed: ")
    assert "\n" not in engine.graphs.reason
    assert list(engine.graphs.as_they_are) == [engine.graphs.reason]
    assert engine.graphs.reason in engine.graphs.sentence()


def test_a_fault_of_the_round_itself_is_not_hidden(
    target: Target, drafter: Drafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = taped(target, DraftProposer(target, drafter), drafts="max")
    asked = request(ignore_eos=True)
    with monkeypatch.context() as patch:
        patch.setattr(target, "verify", lambda *args: (_ for _ in ()).throw(RuntimeError("a fault")))
        with pytest.raises(RuntimeError, match="a fault"):
            engine.generate([asked])
    assert list(engine.generate([asked])[0].token_ids) == plain_decode(target, asked)
    assert not engine.graphs.reason


def test_log_probabilities_run_as_they_are_and_the_rest_is_replayed(target: Target) -> None:
    engine = taped(target, None, max_rows=2)
    asked = [
        Request((3,), SamplingOptions(max_tokens=6, ignore_eos=True), logprobs=2),
        request((4,), max_tokens=30, temperature=0.7, ignore_eos=True),
    ]
    done = engine.generate(asked)
    assert [list(item.token_ids) for item in done] == [plain_decode(target, r) for r in asked]
    assert len(done[0].logprobs) == 6
    assert dict(engine.graphs.as_they_are) == {"a request wants log-probabilities": 5}
    assert engine.graphs.replayed == 24


def test_why_nothing_is_captured(target: Target, drafter: Drafter) -> None:
    def reason(of: Target, able: bool = True, **options: Any) -> str:
        engine = Engine(of, None, EngineOptions(**options), TapeRecorder() if able else None)
        assert list(engine.generate([request()])[0].token_ids) == plain_decode(of, request())
        assert not engine.graphs.replayed
        assert sum(engine.graphs.as_they_are.values()) > 0
        return engine.graphs.reason

    assert reason(target, able=False) == "a cpu has no CUDA graphs"
    assert reason(target, graphs="off") == "turned off"
    from transformers import Gemma3TextConfig

    general = tiny_target(
        Gemma3TextConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            eos_token_id=0,
            bos_token_id=None,
            pad_token_id=None,
        ),
        spread=0.2,
    )
    assert reason(general) == "transformers' own code runs the target"
    handle = target.model.get_input_embeddings().register_forward_hook(lambda *_: None)
    try:
        assert reason(target) == "somebody's hooks hang on the target"
    finally:
        handle.remove()
    split = target_from_model(target.model, None, "split")
    split.model.hf_device_map = {"a": 0, "b": 1}
    try:
        assert reason(split) == "the target lies on several devices"
    finally:
        del split.model.hf_device_map


def test_sizes_are_few_and_never_too_small() -> None:
    some = Graphs(TapeRecorder(), "", 8)
    needed = range(64, 40_000, 64)
    sizes = [some.visible(slots) for slots in needed]
    assert all(size >= slots for size, slots in zip(sizes, needed, strict=True))
    assert all(size <= 1.51 * slots for size, slots in zip(sizes, needed, strict=True) if slots > 2048)
    assert len(set(sizes)) < 14
    assert sizes == sorted(sizes)
    assert Graphs(None, "off", 8).visible(128) == 128


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA card")
@pytest.mark.parametrize("name", PROPOSERS)
def test_a_card_replays_the_same_texts(name: str) -> None:
    model = tiny_target().model.to("cuda")
    target = target_from_model(model, None, "on the card")
    torch.manual_seed(0)
    shape = DraftConfig.for_target(target.info, num_layers=2, block_size=6, num_taps=2)
    drafter = Drafter(shape).eval().to("cuda")
    proposer = proposers(target, drafter)[name]
    options: dict[str, Any] = {} if name == "plain" else {"drafts": "max"}
    for settings in SETTINGS.values():
        asked = [request(**settings), request((9,), max_tokens=30, ignore_eos=True)]
        engine = Engine(target, proposer, EngineOptions(**options))
        eager = Engine(target, proposer, EngineOptions(graphs="off", **options))
        texts = [item.token_ids for item in engine.generate(asked)]
        assert engine.graphs.replayed
        assert not engine.graphs.reason
        assert texts == [item.token_ids for item in eager.generate(asked)]
    assert isinstance(engine._graphs._recorder, CudaRecorder)
