"""A seed gives the same text with drafts and without, alone and under load, while others come and go."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import threading

import httpx
import psutil
import pytest

from tests.serve.conftest import load, running

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9999}, "b": {"enum": ["x", "yes"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def kinds(draw: random.Random) -> dict:
    """Some request of some kind."""
    body = {
        "messages": [
            {"role": "user", "content": "".join(draw.choices("abc äöü🌊\n", k=draw.randrange(1, 60)))}
        ],
        "max_tokens": draw.choice([1, 7, 30, 60]),
        "seed": draw.randrange(1000),
        "temperature": draw.choice([0, 0.7, 1.2]),
    }
    extras = (
        *(
            {},
            {"top_k": 5, "top_p": 0.8},
            {"repetition_penalty": 1.2, "min_tokens": 1},
            {"stop": ["a", "\n"]},
        ),
        *({"logprobs": True, "top_logprobs": 2}, {"draft": False}, {"logit_bias": {"65": 5}}),
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    )
    return body | draw.choice(extras)


def text_of(document):
    return document["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def plain(folders):
    with running(load((folders[0], None), max_rows=1), queue=100) as server:
        yield server


@pytest.mark.parametrize("temperature", [0, 0.8])
def test_with_and_without_a_drafter(server, plain, temperature):
    draw = random.Random(7)
    for _ in range(6):
        body = kinds(draw) | {"temperature": temperature}
        drafted, other = (s.http.post("/v1/chat/completions", json=body).json() for s in (server, plain))
        assert text_of(drafted) == text_of(other)
        assert drafted["choices"][0]["finish_reason"] == other["choices"][0]["finish_reason"]


async def client(base, jobs, answers, draw):
    """Sends requests one after the other; goes away from some of them at some point."""
    async with httpx.AsyncClient(base_url=base, timeout=120) as http:
        while jobs:
            number, body, cancelled = jobs.pop()
            if not cancelled and draw.random() < 0.5:
                response = await http.post("/v1/chat/completions", json=body)
                assert response.status_code == 200, response.text
                answers[number] = text_of(response.json())
                continue
            left = draw.randrange(0, 12) if cancelled else None
            answers[number] = await streamed(http, body, left)


async def streamed(http, body, left):
    """The text of a stream, or None where it is left after some lines."""
    said = ""
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if left is not None and left <= 0:
                return None
            left = left - 1 if left is not None else None
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                said += choice["delta"].get("content", "")
    return said


def load_test(server, count, seed):
    """All texts of finished requests, by number, and the requests."""
    draw = random.Random(seed)
    bodies = [kinds(draw) for _ in range(count)]
    jobs = [(number, body, draw.random() < 0.3) for number, body in enumerate(bodies)]
    answers: dict[int, str | None] = {}

    async def everyone():
        clients = (client(server.url, jobs, answers, random.Random(n)) for n in range(16))
        await asyncio.gather(*clients)

    asyncio.run(everyone())
    server.idle()
    return bodies, answers


def check_load(server, plain, count, seed):
    bodies, answers = load_test(server, count, seed)
    finished = {number: text for number, text in answers.items() if text is not None}
    assert len(answers) == count
    assert len(finished) > count // 2
    for number, text in finished.items():
        right = plain.http.post("/v1/chat/completions", json=bodies[number] | {"draft": False})
        assert text == text_of(right.json()), bodies[number]


def test_under_load_with_clients_that_leave(folders, plain):
    with running(load(folders, max_rows=4), queue=64) as server:
        check_load(server, plain, 120, 1)
        worker = server.service.worker
        assert not worker._active
        assert not worker._jobs
        assert worker.load.running == worker.load.waiting == 0


@pytest.mark.long
def test_a_long_load_leaves_nothing_behind(folders, plain):
    with running(load(folders, max_rows=4, prefix_tokens=0), queue=64) as server:
        check_load(server, plain, 250, 2)
        gc.collect()
        before, threads = psutil.Process().memory_info().rss, threading.active_count()
        check_load(server, plain, 500, 3)
        gc.collect()
        assert psutil.Process().memory_info().rss - before < 32 * 2**20
        assert threading.active_count() <= threads + 1
