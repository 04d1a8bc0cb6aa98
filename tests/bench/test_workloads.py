"""Bundled prompts are many, distinct and real; files of several layouts are read; the hub is named."""

import json
from dataclasses import replace

import pytest
from datasets import Dataset

from slipstream.bench.workloads import BUNDLED, HUB, load_tasks
from slipstream.bench.workloads.hub import WITHHELD, HubSet
from slipstream.core.errors import InputError


@pytest.mark.parametrize("workload", BUNDLED)
def test_bundled_workloads(workload):
    tasks = load_tasks(workload, 0)
    assert len(tasks) >= 20
    assert len({task.turns for task in tasks}) == len(tasks)
    assert len({task.name for task in tasks}) == len(tasks)
    assert len({task.language for task in tasks}) >= 4
    assert all(turn.strip() for task in tasks for turn in task.turns)
    assert load_tasks(workload, 0) == tasks, "the same each time"
    assert load_tasks(workload, 3) == tasks[:3]


def test_kinds_of_workloads():
    assert min(len(task.turns) for task in load_tasks("multiturn", 0)) >= 3
    long = load_tasks("long", 0)
    assert min(len(task.turns[0]) for task in long) > 8000
    assert len({task.turns[0][:400] for task in long}) == len(long), "no common beginning to cache"


def test_a_file_of_prompts_and_chats(tmp_path):
    path = tmp_path / "mine.jsonl"
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    lines = [
        {"prompt": "one"},
        {"turns": ["one", "two"]},
        {"messages": messages},
        {"token_ids": [5, 6, 7, 8], "answers": [[2, 4]]},
        {"prompt_ids": [5, 6], "answer_ids": [7]},
    ]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    prompt, turns, chat, ids, pair = load_tasks(str(path), 0)
    assert prompt.turns == ("one",)
    assert turns.turns == ("one", "two")
    assert chat.turns == ("c",)
    assert [message["content"] for message in chat.history] == ["s", "a", "b"]
    assert ids.prompt_ids == pair.prompt_ids == (5, 6)
    assert {task.workload for task in (prompt, chat, ids)} == {"mine"}
    path.write_text('{"prompt": "a"}\n{"nothing": 1}\n')
    with pytest.raises(InputError, match="line 2"):
        load_tasks(str(path), 0)


def test_unknown_names_are_answered_with_known_ones():
    with pytest.raises(InputError, match="did you mean reasoning"):
        load_tasks("reasonning", 0)


# Features of each set as its card on the hub states them, with a row of our own.
ROWS = {
    "gsm8k": {"question": "How many?", "answer": "#### 4"},
    "math500": {
        "problem": "Find x.",
        "solution": "x = 1",
        "answer": "1",
        "subject": "Algebra",
        "level": 1,
        "unique_id": "test/algebra/1.json",
    },
    "humaneval": {
        "task_id": "HumanEval/0",
        "prompt": "def f():\n",
        "canonical_solution": "    return 1\n",
        "test": "assert f() == 1",
        "entry_point": "f",
    },
    "mbpp": {
        "source_file": "a.ipynb",
        "task_id": 2,
        "prompt": "Write a function.",
        "code": "def f(): pass",
        "test_imports": ["import math"],
        "test_list": ["assert f() is None"],
    },
    "mt-bench": {
        "prompt": ["First?", "Second?"],
        "prompt_id": 7,
        "category": "writing",
        "reference": ["", ""],
    },
    "spec-bench": {"question_id": 1, "category": "writing", "turns": ["First?", "Second?"]},
    "speed-bench": {
        "question_id": "a",
        "category": "coding",
        "sub_category": "python",
        "turns": ["First?", "Second?"],
        "source": "somewhere",
        "src_id": "1",
        "difficulty": "easy",
        "multiturn": True,
    },
}
TURNS = {
    "gsm8k": ("How many?",),
    "math500": ("Find x.",),
    "humaneval": ("Complete this Python function:\n\ndef f():\n",),
    "mbpp": ("Write a function.",),
}


@pytest.mark.parametrize("name", HUB)
def test_a_set_in_the_layout_of_its_card(name, tmp_path, monkeypatch):
    """A folder that `datasets` loads by the same config and split stands in for the hub."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    known = HUB[name]
    folder = tmp_path / "set" / (known.config or "data")
    folder.mkdir(parents=True)
    held_back = {**ROWS[name], known.column: [WITHHELD]} if name == "speed-bench" else ROWS[name]
    Dataset.from_list([held_back, *[ROWS[name]] * 3]).to_parquet(str(folder / "rows.parquet"))
    files = {"split": known.split, "path": f"{folder.name}/rows.parquet"}
    config = {"config_name": known.config or "default", "data_files": [files]}
    (tmp_path / "set" / "README.md").write_text("---\n" + json.dumps({"configs": [config]}) + "\n---\n")
    local = {name: replace(known, place=str(tmp_path / "set"), data_files=None)}
    monkeypatch.setattr("slipstream.bench.workloads.hub.HUB", local)
    tasks = load_tasks(name, 2)
    assert [task.turns for task in tasks] == [TURNS.get(name, ("First?", "Second?"))] * 2
    assert {(task.workload, task.source) for task in tasks} == {(name, "hub")}


def test_sets_of_the_hub(tmp_path, monkeypatch):
    path = tmp_path / "set.jsonl"
    path.write_text(json.dumps({"turns": ["a", "b"]}) + "\n" + json.dumps({"turns": ["c", "d"]}) + "\n")
    assert {"gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "spec-bench", "speed-bench"} == set(HUB)
    local = {"mine": HubSet("json", "turns", split="train", data_files=str(path), ask="Q: ")}
    for module in ("hub", "tasks"):
        monkeypatch.setattr(f"slipstream.bench.workloads.{module}.HUB", local)
    (task,) = load_tasks("mine", 1)
    assert task.turns == ("Q: a", "b")
    local["mine"] = HubSet("json", "prompt", split="train", data_files=str(path))
    with pytest.raises(InputError, match="column prompt"):
        load_tasks("mine", 1)
    local["mine"] = HubSet("json", "prompt", split="train", data_files=str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(InputError, match="neither a file nor a data set"):
        load_tasks("mine", 1)
