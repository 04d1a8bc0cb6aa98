"""A server on loopback that continues token ids, and what a client makes of its replies."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions
from slipstream.core.records import Completion, Request
from slipstream.data.endpoint import Endpoint
from slipstream.testing import byte_tokenizer


class Handler(BaseHTTPRequestHandler):
    """Says the prompt's length; with ids only where the prompt asks for them by its first token."""

    seen: list[dict[str, Any]]

    def do_GET(self) -> None:
        """Models."""
        self._reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        """Completions."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).seen.append(body)
        if body["prompt"][0] == 9:
            self._reply(400, {"error": "no nines"})
            return
        choice: dict[str, Any] = {"text": str(len(body["prompt"])), "finish_reason": "stop"}
        if body["prompt"][0] == 7:
            choice |= {"token_ids": [5, 6, 0]}
        self._reply(200, {"choices": [choice]})

    def _reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


class Server(ThreadingHTTPServer):
    """As many callers in line as a real server takes."""

    request_queue_size = 128


@pytest.fixture
def url() -> Iterator[str]:
    Handler.seen = []
    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


def test_prompts_go_as_ids_and_answers_come_back_in_order(url: str) -> None:
    tokenizer = byte_tokenizer()
    endpoint = Endpoint(url, tokenizer, (0,))
    sampling = SamplingOptions(temperature=0.8, top_k=40, seed=2**40, max_tokens=9)
    requests = [Request((1,) * length, sampling) for length in range(1, 30)]
    completions = endpoint.generate([*requests, Request((7, 1), sampling)])
    for length, completion in enumerate(completions[:-1], start=1):
        assert completion.text == str(length)
        assert completion.token_ids == (*tokenizer(str(length)).input_ids, 0)
        assert completion.finish_reason == "stop"
    assert completions[-1].token_ids == (5, 6, 0)
    asked = Handler.seen[0]
    assert (asked["model"], asked["max_tokens"], asked["top_k"]) == ("tiny", 9, 40)


def test_conversations_go_on_at_their_own_pace(url: str) -> None:
    heard: dict[int, list[str]] = {number: [] for number in range(20)}

    def follow(number: int, completion: Completion) -> Request | None:
        heard[number].append(completion.text)
        turns = len(heard[number])
        return Request((1,) * (number + 1 + turns), SamplingOptions()) if turns <= number % 4 else None

    requests = [Request((1,) * (number + 1), SamplingOptions()) for number in range(20)]
    Endpoint(url, byte_tokenizer(), (0,)).converse(requests, follow)
    for number, texts in heard.items():
        assert texts == [str(number + 1 + turn) for turn in range(1 + number % 4)]


def test_refusals_and_absent_servers_are_one_sentence(url: str) -> None:
    endpoint = Endpoint(url + "/v1/", byte_tokenizer(), ())
    with pytest.raises(InputError, match=r"answers 400.*no nines"):
        endpoint.generate([Request((9,), SamplingOptions())])
    with pytest.raises(InputError, match="no OpenAI-compatible server"):
        Endpoint("http://127.0.0.1:9", byte_tokenizer(), ())
