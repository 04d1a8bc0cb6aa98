"""A benchmark end to end on a tiny model: what is recorded, that it resumes, and several users."""

import json
from dataclasses import replace

import pytest
import torch

from slipstream.api import load
from slipstream.bench import sweep
from slipstream.bench.command import Wanted, run_bench
from slipstream.bench.prompts import looks_random
from slipstream.bench.records import read_results
from slipstream.bench.run import RANDOM_PROMPT, Bench
from slipstream.bench.systems import GenerateSystem, generation_settings
from slipstream.core.command_options import BenchOptions
from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions, TargetOptions
from slipstream.core.records import Request
from slipstream.testing import tiny_target
from tests.tiny import save_drafter, save_target

SAMPLING = SamplingOptions(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    target = save_target(tmp_path_factory.mktemp("target"))
    drafter = save_drafter(tmp_path_factory.mktemp("drafter") / "d", target)
    options = EngineOptions(drafts="max")
    plain = TargetOptions(dtype="float32")
    return load(str(target), str(drafter), target_options=plain, engine_options=options)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "mine.jsonl"
    lines = [{"prompt": "hello there"}, {"turns": ["a", "b"]}, {"prompt": "tell me more about it, please"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def bench(session, out, workload, force=False, sampling=SAMPLING, **options):
    steps = []
    summary = run_bench(
        *(
            session,
            Wanted(command="slipstream bench"),
            BenchOptions(workload, **options),
            sampling,
            out,
            force,
        ),
        *(lambda line: None, lambda done, total, what: steps.append((done, total))),
    )
    return summary, steps


def test_every_system_answers_every_turn(session, tmp_path, prompts):
    out = tmp_path / "out.jsonl"
    names = "plain,drafted,lookup,transformers"
    summary, steps = bench(session, out, prompts, systems=names, repeats=2)
    records = read_results(out).records
    assert len(records) == 4 * 4 * 2
    assert len({record.key for record in records}) == len(records)
    assert steps[0] == (0, 32)
    assert steps[-1] == (32, 32)
    by_turn = {}
    for record in records:
        by_turn.setdefault(record.key[1:], []).append(record)
    for group in by_turn.values():
        assert {record.system for record in group} == set(names.split(","))
        assert len({record.measured.token_ids for record in group}) == 1, "greedy, float32: all say the same"
        assert len({record.prompt_hash for record in group}) == 1
    assert all(record.divergence is None for record in records)
    assert summary.whole("drafted").different == 0
    assert summary.workloads == ("mine",)


def test_what_is_recorded_adds_up(session, tmp_path, prompts):
    bench(session, tmp_path / "out.jsonl", prompts, systems="plain,drafted,lookup")
    for record in read_results(tmp_path / "out.jsonl").records:
        found = record.measured
        assert found.tokens == 12
        assert found.emitted_in_rounds == found.tokens - 1, "the first token comes from the prompt's pass"
        assert len(found.accepted_runs) == found.rounds
        assert sum(found.accepted_per_position) == sum(found.accepted_runs)
        assert found.text == "".join(text for text, _ in found.spans)
        assert 0 < found.ttft_s <= found.total_s
        assert found.total_s == pytest.approx(found.ttft_s + found.decode_s)
        assert found.split.verify_s > 0
        assert found.split.draft_s + found.split.verify_s + found.split.other_s == pytest.approx(
            found.decode_s
        )
        if record.system == "plain":
            assert found.split.draft_s == 0
            assert found.rounds == 11
            assert found.drafted_per_position == ()
        else:
            assert found.drafted_per_position[0] == found.rounds


def test_a_stopped_run_goes_on(session, tmp_path, prompts, monkeypatch):
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    bench(session, whole, prompts)
    real, calls = Bench._answer, []

    def stops(self, *arguments):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(arguments)
        real(self, *arguments)

    monkeypatch.setattr(Bench, "_answer", stops)
    with pytest.raises(KeyboardInterrupt):
        bench(session, part, prompts)
    monkeypatch.undo()
    kept = read_results(part).records
    assert len(kept) == 4
    bench(session, part, prompts)
    done = read_results(part)
    assert done.records[:4] == kept, "what was measured is kept"
    assert len(done.runs) == 2
    said = [{r.key: r.measured.token_ids for r in read_results(p).records} for p in (whole, part)]
    assert said[0] == said[1]


def test_a_file_of_other_settings_is_left_alone(session, tmp_path, prompts):
    out = tmp_path / "out.jsonl"
    bench(session, out, prompts)
    before = out.read_text()
    with pytest.raises(InputError, match="other settings"):
        bench(session, out, prompts, sampling=replace(SAMPLING, temperature=0.5))
    assert out.read_text() == before
    bench(session, out, prompts, force=True, sampling=replace(SAMPLING, temperature=0.5))
    records = read_results(out).records
    assert {record.divergence for record in records} == {None}, "the same noise, the same text"


@pytest.mark.parametrize("rate", [0.0, 200.0])
def test_several_users(session, tmp_path, prompts, rate):
    out = tmp_path / "out.jsonl"
    names = "plain,drafted,transformers"
    summary, _ = bench(session, out, prompts, systems=names, concurrency="1,2,3", rate=rate)
    records = read_results(out).records
    loads = [record for record in records if record.concurrency > 1]
    assert {(r.system, r.concurrency) for r in loads} == {
        (s, c) for s in ("plain", "drafted") for c in (2, 3)
    }
    assert sum(record.concurrency == 3 for record in loads) == 2 * 6
    alone = {(r.prompt, r.turn): r.measured.token_ids for r in records if r.concurrency == 1}
    assert all(r.measured.token_ids == alone[r.prompt, 0] for r in loads)
    assert all(r.rate == rate for r in loads)
    assert [curve.system for curve in summary.curves] == ["plain", "drafted"]
    assert [load.concurrency for load in summary.curves[0].loads] == [1, 2, 3]
    bench(session, out, prompts, systems=names, concurrency="1,2,3", rate=rate)
    assert len(read_results(out).records) == len(records), "nothing is measured twice"


def test_without_a_warm_up_the_first_request_of_each_is_cold(session, tmp_path, prompts):
    summary, _ = bench(session, tmp_path / "out.jsonl", prompts, warm_up=False)
    records = read_results(tmp_path / "out.jsonl").records
    assert [record.warm for record in records] == [False] * 2 + [True] * 6
    assert any("plain answered without" in mark.text for mark in summary.marks if mark.kind == "stop")


def test_the_warm_up_is_as_long_as_the_longest_prompt(session, tmp_path, monkeypatch):
    asked, real = [], GenerateSystem.answer

    def answer(self, request, origin):
        asked.append(request.prompt_ids)
        return real(self, request, origin)

    monkeypatch.setattr(GenerateSystem, "answer", answer)
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b" * 200}))
    bench(session, tmp_path / "out.jsonl", str(path), systems="plain,transformers")
    short, long, *measured = asked
    assert len(long) == max(map(len, measured)) > len(short)
    assert not {tuple(ids) for ids in measured} & {tuple(short), tuple(long)}


def test_a_difference_under_load_is_found_too(session, tmp_path, prompts, monkeypatch):
    real = sweep.serve

    def other(*arguments):
        return [replace(one, token_ids=(5, *one.token_ids[1:])) for one in real(*arguments)]

    monkeypatch.setattr(sweep, "serve", other)
    summary, _ = bench(session, tmp_path / "out.jsonl", prompts, concurrency="2")
    records = read_results(tmp_path / "out.jsonl").records
    assert all(r.divergence is None for r in records if r.concurrency == 1)
    assert {r.divergence.position for r in records if r.concurrency == 2} == {0}
    (stop,) = [mark for mark in summary.marks if mark.kind == "stop" and "of drafted differ" in mark.text]
    assert "4 of 8 texts of drafted" in stop.text


def test_a_difference_is_found_and_explained(session, tmp_path, prompts, monkeypatch):
    real = GenerateSystem.answer

    def other(self, request, origin):
        found = real(self, request, origin)
        return replace(found, token_ids=(*found.token_ids[:3], 5, *found.token_ids[4:]))

    monkeypatch.setattr(GenerateSystem, "answer", other)
    summary, _ = bench(session, tmp_path / "out.jsonl", prompts, systems="plain,transformers")
    assert summary.whole("transformers").different == 4
    records = read_results(tmp_path / "out.jsonl").records
    assert {r.divergence.position for r in records if r.system == "transformers"} == {3}
    (stop,) = [mark for mark in summary.marks if mark.kind == "stop" and "differ" in mark.text]
    assert "4 of 4 texts of transformers" in stop.text
    assert "Not to be quoted" in summary.verdict


def test_what_cannot_be_measured_is_refused(session, tmp_path, prompts):
    for options, words in (
        ({"systems": "plain,faster"}, "faster is no system"),
        ({"systems": ""}, "no system"),
        ({"workload": "chatt"}, "did you mean chat"),
    ):
        chosen = {"workload": prompts, **options}
        with pytest.raises(InputError, match=words):
            bench(session, tmp_path / "out.jsonl", chosen.pop("workload"), **chosen)
    sampling = replace(SAMPLING, presence_penalty=1.0)
    with pytest.raises(InputError, match="no presence_penalty"):
        bench(session, tmp_path / "out.jsonl", prompts, systems="plain,transformers", sampling=sampling)
    with pytest.raises(InputError, match="no prompt fits"):
        bench(session, tmp_path / "out.jsonl", prompts, sampling=replace(SAMPLING, max_tokens=600))
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(InputError, match="concurrency"):
        BenchOptions(concurrency="1,x")


def test_long_prompts_are_left_out_loudly(session, tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "b" * 600}))
    summary, _ = bench(session, tmp_path / "out.jsonl", str(path))
    assert any("1 of 2 prompts are left out" in mark.text for mark in summary.marks)


def test_random_prompts_are_marked(session, tmp_path):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 250, (60,), generator=generator).tolist()
    path = tmp_path / "random.jsonl"
    path.write_text(json.dumps({"prompt_ids": ids, "answer_ids": []}))
    summary, _ = bench(session, tmp_path / "out.jsonl", str(path))
    assert read_results(tmp_path / "out.jsonl").records[0].marks == (RANDOM_PROMPT,)
    assert any("random tokens" in mark.text for mark in summary.marks if mark.kind == "stop")


def test_what_the_target_expects_is_not_random():
    target = tiny_target(spread=1.0)
    said = [5]
    for _ in range(40):
        said.append(int(target.recompute(torch.tensor([said]))[0, -1].argmax()))
    assert not looks_random(target, said)
    assert not looks_random(target, said[:3])


def test_generate_is_told_everything():
    settings = generation_settings(SamplingOptions(temperature=0.7, top_k=5, max_tokens=9), (0,))
    assert (settings.do_sample, settings.temperature, settings.top_k, settings.top_p) == (True, 0.7, 5, 1.0)
    assert generation_settings(SamplingOptions(), (0,)).do_sample is False
    target = tiny_target()
    request = Request([5, 6, 7], SamplingOptions(max_tokens=5, ignore_eos=True))
    found = GenerateSystem(target).answer(request, 0.0)
    assert (found.tokens, found.stop_reason) == (5, "length")
    assert 0 < found.ttft_s < found.total_s
