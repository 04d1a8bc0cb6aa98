"""A real HTTP server that streams like vLLM and like llama.cpp: times, ids and counters are read rightly."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slipstream.bench.server import ServerSystem, read_counters, request_body
from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.testing import byte_tokenizer

REQUEST = Request([5, 6, 7], SamplingOptions(max_tokens=6))


class Server:
    """Says the same ids to everybody, as one kind of engine would."""

    def __init__(self, kind, ids=(10, 11, 12, 13, 0), past=0):
        self.kind, self.ids, self.past, self.asked = kind, ids, past, []
        self.drafts = self.accepted = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def send(self, text, status=200):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def do_GET(self):
                if self.path == "/v1/models":
                    self.send(json.dumps({"data": [{"id": "tiny"}]}))
                elif self.path == "/metrics" and outer.kind == "vllm":
                    self.send(outer.metrics())
                else:
                    self.send("nothing here", 404)

            def do_POST(self):
                outer.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                if outer.kind == "broken":
                    self.send("no such model", 400)
                    return
                self.send(
                    "".join(f"data: {json.dumps(event)}\n\n" for event in outer.events()) + "data: [DONE]\n"
                )

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def events(self):
        self.drafts += 2
        self.accepted += 2
        sent = [*self.ids, *([9] * self.past)]
        for place, token in enumerate(sent):
            choice = {"text": "" if token == 0 else chr(64 + token), "finish_reason": None}
            if self.kind == "vllm":
                choice["token_ids"] = [token]
            if place == len(sent) - 1:
                choice["finish_reason"] = "stop" if 0 in sent else "length"
            yield {"choices": [choice]}
        last = {"choices": [], "usage": {"completion_tokens": len(sent)}}
        if self.kind == "vllm":
            last["usage"]["prompt_tokens_details"] = {"cached_tokens": 2}
        else:
            last["timings"] = {"draft_n": 6, "draft_n_accepted": 2, "predicted_n": 5}
        yield last

    def metrics(self):
        return (
            "# HELP something\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {self.drafts}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {self.accepted}.0\n'
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} '
            f"{self.accepted}.0\n"
            'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 0.0\n'
        )


@pytest.fixture
def serve():
    servers = []

    def start(*arguments, **named):
        servers.append(Server(*arguments, **named))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def test_vllm(serve):
    server = serve("vllm", past=2)
    system = ServerSystem(server.url + "/v1", byte_tokenizer(), (0,))
    for _ in range(2):  # counters are differences
        found = system.answer(REQUEST, 0.0)
        assert found.token_ids == (10, 11, 12, 13, 0)
        assert found.past_end == 2
        assert found.cached_tokens == 2
        assert (found.rounds, found.emitted_in_rounds) == (2, 4)
        assert found.accepted_per_position == (2, 0)
        assert found.tried_per_position == (2, 2)
        assert found.drafted_per_position == (2, 2)
        assert 0 < found.ttft_s <= found.total_s
    assert server.asked[0]["prompt"] == [5, 6, 7], "our template, so ids"
    assert system.answer(REQUEST, 0.0, alone=False).rounds == 0, "counters of several users are nobody's"


def test_llama_cpp(serve):
    system = ServerSystem(serve("llama.cpp").url, byte_tokenizer(), (0,))
    found = system.answer(REQUEST, 0.0)
    tokenizer = byte_tokenizer()
    assert found.token_ids == (*tokenizer("JKLM", add_special_tokens=False)["input_ids"], 0)
    assert (found.rounds, found.emitted_in_rounds) == (2, 4)
    assert found.text == "JKLM"
    assert (found.past_end, found.stop_reason) == (0, "stop")


def test_errors_are_sentences(serve):
    system = ServerSystem(serve("broken").url, byte_tokenizer(), (0,))
    with pytest.raises(InputError, match="answers 400: no such model"):
        system.answer(REQUEST, 0.0)
    with pytest.raises(InputError, match="no OpenAI-compatible server"):
        ServerSystem("http://127.0.0.1:9", byte_tokenizer(), (0,))


def test_every_setting_is_stated():
    body = request_body(Request([1], SamplingOptions(temperature=0.5, seed=-1, stop=("x",))), "m")
    assert body["seed"] >= 0
    assert (body["top_k"], body["top_p"], body["min_p"], body["stop"]) == (-1, 1.0, 0.0, ["x"])
    assert request_body(Request([1], SamplingOptions(top_k=4)), "m")["top_k"] == 4


def test_counters_of_several_engines_add_up():
    page = (
        'vllm:spec_decode_num_drafts_total{engine="0"} 2\nvllm:spec_decode_num_drafts_total{engine="1"} 3\n'
    )
    assert read_counters(page) == {"drafts": 5}
    assert read_counters("other 3\n") is None
