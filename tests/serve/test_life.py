"""Limits, time, clients that go away, faults, the end: what a server meets besides good requests."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time

import httpx
import pytest

from slipstream.core.options import SamplingOptions
from slipstream.serve.run import JsonLines
from tests.serve.conftest import load, running

HELLO = [{"role": "user", "content": "hello"}]
LONG = {"messages": HELLO, "max_tokens": 450, "ignore_eos": True, "seed": 3}


@pytest.fixture(scope="module")
def small(folders):
    """One row, one place in the queue, and little time."""
    with running(load(folders, max_rows=1), queue=1, max_body=2000, api_key="secret", timeout=30) as server:
        server.http.headers["Authorization"] = "Bearer secret"
        yield server


@pytest.fixture
def slow(small, monkeypatch):
    """Each step takes a while, so that there is time to do something meanwhile."""
    rows = small.service.worker._rows
    step = type(rows).step

    def waits(self):
        time.sleep(0.02)
        return step(self)

    monkeypatch.setattr(type(rows), "step", waits)
    yield small
    monkeypatch.undo()
    small.idle()


def stream(server, **fields):
    return server.http.stream("POST", "/v1/chat/completions", json=LONG | {"stream": True} | fields)


def documents(lines):
    texts = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert texts[-1] == "[DONE]"
    return [json.loads(text) for text in texts[:-1]]


def test_the_queue_has_an_end(slow):
    with stream(slow) as first, stream(slow) as second:
        assert first.status_code == second.status_code == 200
        third = slow.chat()
        assert third.status_code == 429
        assert int(third.headers["retry-after"]) >= 1
        assert third.json()["error"]["type"] == "rate_limit_error"
        slow.http.get("/health")
        assert slow.service.worker.active == 2
    slow.idle()
    assert slow.chat().status_code == 200
    assert slow.chat(n=3).status_code == 400  # never fits


@pytest.mark.parametrize("streamed", [False, True])
def test_a_client_that_goes_away_frees_its_row_within_a_round(slow, streamed):
    steps = []
    rows = slow.service.worker._rows
    inner = rows.step
    rows.step = lambda: (steps.append(rows.running), inner())[1]
    host, port = slow.http.base_url.host, slow.http.base_url.port
    body = json.dumps(LONG | {"stream": streamed}).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer secret\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, port)) as connection:
        connection.sendall(head.encode() + body)
        while len(steps) < 5:
            time.sleep(0.01)
    before = len(steps)
    slow.idle()
    del rows.step
    # The network takes its time, a few steps of 20 ms; all 450 tokens would take hundreds.
    assert len(steps) < before + 25
    metrics = slow.http.get("/metrics").text
    assert "slipstream:request_cancelled_total" in metrics


@pytest.mark.parametrize("streamed", [False, True])
def test_the_time_of_a_request_has_an_end(folders, monkeypatch, streamed):
    with running(load(folders), timeout=0.3) as server:
        rows = server.service.worker._rows
        inner = rows.step
        monkeypatch.setattr(rows, "step", lambda: (time.sleep(0.05), inner())[1])
        response = server.http.post("/v1/chat/completions", json=LONG | {"stream": streamed})
        if streamed:
            last = documents(response.text.splitlines())[-1]
        else:
            assert response.status_code == 504
            last = response.json()
        assert last["error"]["type"] == "timeout_error"
        assert "0.3 seconds" in last["error"]["message"]
        server.idle()


def test_a_fault_fails_who_decodes_and_nobody_else(folders, alone, monkeypatch):
    with running(load(folders, max_rows=2), queue=8) as server:
        right = alone.generate(HELLO, SamplingOptions(temperature=0.7, seed=5, max_tokens=40))
        rows = server.service.worker._rows
        inner, steps = rows.step, []

        def fails_once():
            steps.append(1)
            if len(steps) == 4:
                raise RuntimeError("a broken kernel")
            time.sleep(0.02)
            return inner()

        monkeypatch.setattr(rows, "step", fails_once)
        answers = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(
                    server.chat(temperature=0.7, seed=5, max_tokens=40, ignore_eos=False)
                )
            )
            for _ in range(5)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        failed = [answer for answer in answers if answer.status_code == 500]
        finished = [answer.json() for answer in answers if answer.status_code == 200]
        assert len(failed) == 2
        assert "engine failed" in failed[0].json()["error"]["message"]
        assert len(finished) == 3
        assert {answer["choices"][0]["message"]["content"] for answer in finished} == {right.text}
        assert server.http.get("/health").status_code == 200
        assert 'slipstream:engine_faults{model_name="served0"} 1.0' in server.http.get("/metrics").text


def test_faults_before_a_texts_turn_are_not_repeated_for_ever(folders, monkeypatch):
    with running(load(folders)) as server:
        steps = []

        def fails(*_):
            steps.append(1)
            raise RuntimeError("no more")

        monkeypatch.setattr(type(server.service.worker._rows), "step", fails)
        assert server.chat().status_code == 500
        assert len(steps) == 4
        monkeypatch.undo()
        assert server.chat().status_code == 200


def test_an_engine_that_cannot_be_opened_again_says_so(folders, monkeypatch):
    with running(load(folders)) as server:

        def fails(*_):
            raise RuntimeError("no more")

        monkeypatch.setattr(server.service.worker._rows, "step", fails)
        monkeypatch.setattr(server.service.worker._engine, "open", fails)
        assert server.chat().status_code == 503
        health = server.http.get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "broken")
        assert server.chat().status_code == 503


def test_a_key_is_asked_for(small):
    for headers in ({"Authorization": ""}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for path in ("/v1/models", "/v1/models/served0"):
            assert small.http.get(path, headers=headers).status_code == 401
        response = small.http.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
    assert small.http.get("/v1/models").json()["data"][0]["id"] == "served0"
    assert small.http.get("/health", headers={"Authorization": ""}).status_code == 200


def test_bodies_have_a_limit(small):
    long = {"messages": [{"role": "user", "content": "x" * 3000}]}
    response = small.http.post("/v1/chat/completions", json=long)
    assert response.status_code == 413
    assert "2000 bytes" in response.json()["error"]["message"]

    def parts():
        for _ in range(30):
            yield b"x" * 100

    headers = {"Content-Type": "application/json"}
    chunked = small.http.post("/v1/chat/completions", content=parts(), headers=headers)
    assert chunked.status_code == 413
    assert small.chat().status_code == 200


def test_other_types_and_paths_are_refused_in_the_same_form(small):
    text = small.http.post("/v1/chat/completions", content=b"{}", headers={"Content-Type": "text/plain"})
    assert text.status_code == 415
    for response in (small.http.get("/nowhere"), small.http.get("/v1/chat/completions"), text):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert small.http.get("/v1/models/other").status_code == 404


def test_other_origins_are_not_let_in_unless_named(folders, small):
    ask = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    assert (
        "access-control-allow-origin" not in small.http.options("/v1/chat/completions", headers=ask).headers
    )
    with running(load(folders), cors_origin=("https://a.example",)) as server:
        allowed = server.http.options("/v1/chat/completions", headers=ask)
        assert allowed.headers["access-control-allow-origin"] == "https://a.example"


def test_a_slow_reader_keeps_nobody_else_waiting(server):
    with stream(server) as response:
        lines = response.iter_lines()
        next(lines)  # and no further
        server.idle()
        assert server.chat().status_code == 200
        assert documents(lines)[-1]["choices"][0]["finish_reason"] == "length"


def test_shutting_down_ends_streams_clearly(folders, monkeypatch):
    with running(load(folders), grace=0.2) as server:
        rows = server.service.worker._rows
        inner = rows.step
        monkeypatch.setattr(rows, "step", lambda: (time.sleep(0.05), inner())[1])
        with stream(server) as response:
            lines = response.iter_lines()
            said = [next(lines) for _ in range(6)]
            server.server.stop()
            last = documents([*said, *lines])[-1]
        assert last["error"]["message"] == "the server is shutting down"
        server.thread.join(timeout=20)


def test_shutting_down_lets_running_streams_finish(folders):
    with running(load(folders), grace=20) as server:
        other = httpx.Client(base_url=server.url)
        assert other.get("/health").status_code == 200  # a connection that is already open
        with stream(server, max_tokens=300) as response:
            lines = response.iter_lines()
            said = [next(lines) for _ in range(6)]
            server.service.worker.drain()
            refused = other.post("/v1/chat/completions", json=LONG)
            assert refused.status_code == 503
            server.server.stop()
            assert documents([*said, *lines])[-1]["choices"][0]["finish_reason"] == "length"
        other.close()
        server.thread.join(timeout=20)


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.setFormatter(JsonLines())
        self.lines = []

    def emit(self, record):
        self.lines.append(self.format(record))


@pytest.mark.parametrize("prompts", [False, True])
def test_the_log_has_a_line_per_call_and_no_text_unless_asked(folders, prompts):
    logger, lines = logging.getLogger("slipstream.serve"), Lines()
    logger.addHandler(lines)
    logger.setLevel(logging.INFO)
    try:
        with running(load(folders), log_prompts=prompts) as server:
            server.chat("a secret", user="me", stop=["%"])
            server.http.post("/v1/chat/completions", json={"a secret": 1})
            server.http.post("/v1/completions", json=LONG | {"a": "a secret"})
    finally:
        logger.removeHandler(lines)
    entries = [json.loads(line) for line in lines.lines]
    assert [entry["status"] for entry in entries] == [200, 400, 400]
    assert entries[0]["user"] == "me"
    assert entries[0]["completion_tokens"] >= 1
    assert ("a secret" in lines.lines[0]) == prompts


def test_metrics_count(folders):
    with running(load(folders), served_model_name="mine") as server:
        done = [server.chat(max_tokens=20, ignore_eos=True).json()["usage"] for _ in range(3)]
        text = server.http.get("/metrics").text
    label = '{model_name="mine"}'
    details = [usage["completion_tokens_details"] for usage in done]
    right = {
        "vllm:generation_tokens_total": 60,
        "vllm:prompt_tokens_total": sum(usage["prompt_tokens"] for usage in done),
        "vllm:spec_decode_num_draft_tokens_total": sum(item["drafted_tokens"] for item in details),
        "vllm:spec_decode_num_accepted_tokens_total": sum(item["accepted_tokens"] for item in details),
        "vllm:time_to_first_token_seconds_count": 3,
        "vllm:e2e_request_latency_seconds_count": 3,
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
    }
    for name, value in right.items():
        assert f"{name}{label} {float(value)}" in text, name
    assert 'vllm:request_success_total{finished_reason="length",model_name="mine"} 3.0' in text
    for position in range(3):
        total = float(sum(item["accepted_per_position"][position] for item in details))
        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
        assert f'{name}{{model_name="mine",position="{position}"}} {total}' in text
