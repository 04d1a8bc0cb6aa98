"""Results survive the way to disk and back, strictly, whole lines only."""

import json
from dataclasses import replace

import pytest

from slipstream.bench.records import (
    Divergence,
    Measured,
    Record,
    Run,
    Side,
    TimeSplit,
    append,
    mend,
    read_results,
    to_line,
)
from slipstream.core.errors import InputError

MEASURED = Measured(
    token_ids=(5, 6, 7),
    text="abc",
    stop_reason="stop",
    started_s=1.0,
    ttft_s=0.5,
    decode_s=2.0,
    total_s=2.5,
    spans=(("a", False), ("bc", True)),
    rounds=1,
    emitted_in_rounds=2,
    drafted_per_position=(1,),
    tried_per_position=(1,),
    accepted_per_position=(1,),
    accepted_runs=(1,),
    split=TimeSplit(0.1, 0.2, 0.3),
)
RECORD = Record(
    "drafted", "chat", "chat/01", 0, 0, 4, "h", "t", MEASURED, divergence=Divergence(2, None, 0.1, False)
)
RUN = Run(
    "slipstream bench",
    "2026-01-01T00:00:00Z",
    {"torch": "2"},
    {"cpu": "x"},
    {"name": "tiny"},
    8,
    (Side("plain", "plain", True), Side("drafted", "drafted", True, "d", 4, 9)),
    {"temperature": 0.0},
    {"drafts": "auto"},
)


def test_there_and_back(tmp_path):
    path = tmp_path / "sub" / "results.jsonl"
    append(path, [RUN])
    append(path, [RECORD, replace(RECORD, repeat=1, divergence=None)])
    found = read_results(path)
    assert found.runs == (RUN,)
    assert found.records == (RECORD, replace(RECORD, repeat=1, divergence=None))


def test_a_line_that_was_cut_off_is_left_out_and_mended(tmp_path):
    path = tmp_path / "results.jsonl"
    append(path, [RUN, RECORD])
    with path.open("a") as file:
        file.write(to_line(RECORD)[:40])
    assert len(read_results(path).records) == 1
    mend(path)
    append(path, [replace(RECORD, turn=1)])
    assert [record.turn for record in read_results(path).records] == [0, 1]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda raw: raw.update(sytem="x"), "sytem"),
        (lambda raw: raw.update(turn="0"), "turn"),
        (lambda raw: raw.update(turn=True), "turn"),
        (lambda raw: raw.pop("system"), "system"),
        (lambda raw: raw["measured"].update(token_ids=3), "token_ids"),
        (lambda raw: raw["measured"].update(token_ids=["a"]), "token_ids"),
        (lambda raw: raw.update(kind="other"), "other"),
    ],
)
def test_other_lines_are_refused_by_number(tmp_path, change, word):
    raw = json.loads(to_line(RECORD))
    change(raw)
    path = tmp_path / "results.jsonl"
    path.write_text(to_line(RUN) + json.dumps(raw) + "\n")
    with pytest.raises(InputError, match=rf"line 2.*{word}"):
        read_results(path)


def test_a_file_without_a_run_is_no_result(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text("")
    with pytest.raises(InputError, match="no results"):
        read_results(path)
    with pytest.raises(InputError, match="cannot read"):
        read_results(tmp_path / "nowhere.jsonl")


def test_settings_are_what_decides_the_numbers():
    assert RUN.settings == replace(RUN, command="other", started="later").settings
    assert RUN.settings != replace(RUN, sampling={"temperature": 1.0}).settings
