"""The page holds all that was asked for, needs nothing from outside, and says the same as the records."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from slipstream.bench.metrics import by_position
from slipstream.bench.records import Measured, Record, Results, Side, TimeSplit, append
from slipstream.bench.report import changes, example, html, to_markdown
from slipstream.bench.summary import summarise
from slipstream.cli.app import run as cli
from tests.bench.test_records import RUN

SIDES = (
    Side("plain", "plain", True, "our engine"),
    Side("drafted", "drafted", True, "<drafter> & co", 4, 5_000_000),
    Side("transformers", "transformers", False, "generate"),
)
HONEST = replace(
    RUN,
    sides=SIDES,
    target={"name": "tiny", "dtype": "float32"},
    machine={"processor": "some cpu", "device": "cpu"},
    sampling={"temperature": 0.0, "max_tokens": 128},
)


def one(system, workload, number, users=1, slower=1.0):
    """Drafted is twice as fast on code, as fast on chat, and slower on prose."""
    gain = {"code": 2.0, "chat": 1.0, "prose": 0.5}[workload] if system == "drafted" else 1.0
    noise = 1 + 0.05 * (number % 3) * (1 if system == "drafted" else 0 if workload != "chat" else 1)
    rounds = [(3, number % 4, False)] * 8 if system == "drafted" else []
    if system == "drafted" and workload == "prose":
        rounds = [(0, 0, False)] * 8
    counts = by_position(rounds, 3 if system == "drafted" else 0)
    decode = slower * 4.0 * noise / gain
    spans = (("say <b>", False), (" this &", True)) if system != "transformers" else ()
    measured = Measured(
        *(tuple(range(33)), "say <b> this &", "stop", 10.0 * number, 0.5, decode, 0.5 + decode, spans),
        *(len(rounds), sum(kept + 1 for _, kept, _ in rounds), *counts, tuple(kept for _, kept, _ in rounds)),
        parked=sum(drafts == 0 for drafts, _, _ in rounds),
        split=TimeSplit(0.2 * decode, 0.7 * decode, 0.1 * decode) if system != "transformers" else None,
        peak_memory_bytes=10**9,
    )
    return Record(system, workload, f"{number:03d}", 0, 0, 7, f"{workload}{number}", "t", measured, users)


def results(slower=1.0, count=20, users=(), workloads=("code", "chat", "prose")):
    records = [
        one(side.name, workload, number, 1, slower)
        for workload in workloads
        for number in range(count)
        for side in SIDES
    ]
    for load in users:
        records += [
            one(side.name, workload, n, load, load)
            for workload in workloads
            for n in range(4)
            for side in SIDES[:2]
        ]
    return Results((HONEST,), tuple(records), "mine.jsonl")


class Page(HTMLParser):
    """Tags in balance, their text, and what they point at."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.text, self.links, self.tables, self.kept = [], "", [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        named = dict(attrs)
        self.links += [named[name] for name in ("src", "href", "xlink:href") if named.get(name)]
        if tag == "span" and named.get("class") == "kept":
            self.kept.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.kept and self.open[-1] == "span":
            self.kept[-1] += data


def test_the_verdict_says_what_holds_where():
    verdict = summarise(results()).verdict
    assert re.fullmatch(
        r"drafted: 1\.9\dx as fast on code as plain; slower on prose \(0\.4\dx\); no clear gain on chat; "
        r"drafting parked itself on prose\.",
        verdict,
    )


def test_the_page_is_whole_and_needs_nothing_from_outside():
    found = results(users=(2, 4))
    page = Page(html(found, summarise(found)))
    assert page.open == []
    assert all(link.startswith("#") for link in page.links)
    for words in (
        "tiny",
        "some cpu",
        "slipstream bench",
        "torch 2",
        "Several users",
        "<drafter> & co",
        "5 MB",
    ):
        assert words in page.text
    for heading in ("Speed", "Acceptance", "Where the time goes", "Memory", "A typical text"):
        assert heading in page.text
    assert page.kept[-1] == " this &"
    text = html(found, summarise(found))
    assert "<script" not in text
    assert "http://" not in re.sub(r'xmlns(:xlink)?="[^"]*"', "", text)


def test_pictures_are_svg_with_ids_of_their_own():
    found = results(users=(2, 4))
    text = html(found, summarise(found))
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 6
    for picture in pictures:
        ElementTree.fromstring(picture)
        assert "#010203" not in picture
        assert "currentColor" in picture
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(set(ids)) == len(ids)
    for used in re.findall(r'(?:url\(#|href="#)([^)"]*)', text):
        assert used in ids


def test_without_a_sweep_or_drafts_there_is_no_such_section():
    plain = results()
    only = Results(
        (replace(HONEST, sides=SIDES[:1]),), tuple(r for r in plain.records if r.system == "plain"), "x"
    )
    page = Page(html(only, summarise(only)))
    assert "Several users" not in page.text
    assert "Acceptance" not in page.text
    assert "nothing was compared" in page.text


def test_the_example_is_typical():
    found = example(results(workloads=("code",)))
    lengths = sorted(
        r.measured.emitted_in_rounds / 8 for r in results(workloads=("code",)).records if r.measured.rounds
    )
    assert abs(found.measured.emitted_in_rounds / 8 - lengths[len(lengths) // 2]) <= 1
    assert example(Results((HONEST,), ())) is None


def test_two_files_side_by_side():
    now, before = results(), results(slower=2.0)
    found = {(change.system, change.workload): change for change in changes(now, before)}
    assert found["plain", "code"].ratio.value == pytest.approx(2.0)
    assert found["drafted", "code"].length == pytest.approx(0.0)
    assert found["plain", "code"].length is None
    page = Page(html(now, summarise(now), before))
    assert "Against mine.jsonl" in page.text
    other = Results((replace(HONEST, target={"name": "x", "dtype": "y"}),), before.records, "x.jsonl")
    assert "different targets" in Page(html(now, summarise(now), other)).text


def test_markdown_tables_have_as_many_cells_in_every_row():
    found = results(users=(2,))
    text = to_markdown(found, summarise(found), results(slower=2.0))
    tables = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert len(tables) == 3
    for table in tables:
        assert len({line.count("|") for line in table.splitlines()}) == 1
    assert "<drafter>" not in text or "&lt;" not in text
    assert text.splitlines()[2].startswith("**drafted:")


def test_the_command(tmp_path, capsys):
    path = tmp_path / "mine.jsonl"
    found = results(count=3)
    append(path, [*found.runs, *found.records])
    words = ["report", str(path), "--markdown", str(tmp_path / "mine.md"), "--against", str(path)]
    assert cli(words) == 0
    assert capsys.readouterr().out.startswith("drafted: ")
    assert "<svg" in (tmp_path / "mine.html").read_text()
    assert "Against" in (tmp_path / "mine.md").read_text()
    assert cli(words) == 1, "nothing is overwritten"
    assert "exists already" in capsys.readouterr().err
    assert cli([*words, "--force", "--json"]) == 0
    assert '"verdict"' in capsys.readouterr().out
    assert cli(["report", str(tmp_path / "nowhere.jsonl")]) == 1


def test_what_a_server_does_not_tell_is_left_empty():
    """One that counts rounds alone, and one that states a mean: neither has drafts per round, nor weights."""
    server = Side("url:x", "url", False, "at x")
    base = [one("plain", "code", number) for number in range(20)]
    for counts, words in (
        ({"rounds": 16, "emitted_in_rounds": 32}, "2.00 (2.00-2.00)"),
        ({"stated_acceptance": 2.25}, "stated 2.2"),
    ):
        asked = [
            replace(item, system="url:x", measured=replace(item.measured, **counts, spans=()))
            for item in base
        ]
        made = Results((replace(HONEST, sides=(SIDES[0], server)),), (*base, *asked))
        page = html(made, summarise(made))
        assert words in page
        assert "0.0</td>" not in page
        assert "not known" in page
        assert words.split(" (")[0] in to_markdown(made, summarise(made))
