"""Real HTTP servers that stream like each engine: times, ids and counters are read rightly."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from slipstream.bench.engines import DIALECTS, GENERIC
from slipstream.bench.server import ServerSystem
from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.testing import byte_tokenizer

REQUEST = Request([5, 6, 7], SamplingOptions(max_tokens=6))


class Server:
    """Says the same ids to everybody, as one kind of engine would: two rounds keep two drafts and none."""

    OWNERS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm", "llama.cpp": "llamacpp"}

    def __init__(self, kind, ids=(10, 11, 12, 13, 0), past=0, tells=("reply", "counters")):
        self.kind, self.ids, self.past, self.tells, self.asked = kind, ids, past, tells, []
        self.requests = 0
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def send(self, text, status=200):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def do_GET(self):
                page = outer.page(self.path)
                self.send("nothing here", 404) if page is None else self.send(page)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body)
                refused = outer.refuses(self.path, body)
                if refused:
                    self.send(refused, 400)
                    return
                self.send(
                    "".join(f"data: {json.dumps(event)}\n\n" for event in outer.events()) + "data: [DONE]\n"
                )

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def refuses(self, path, body):
        if self.kind == "broken":
            return "no such model"
        if self.kind == "llama.cpp":
            return None if path == "/completion" else "wrong page"
        if self.kind == "trtllm" and {"return_token_ids", "cache_salt", "return_spec_tokens_details"} & set(
            body
        ):
            return "Extra inputs are not permitted"
        return "top_k" if self.kind == "trtllm" and body["top_k"] < 0 else None

    def page(self, path):
        done = self.requests
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "tiny", "owned_by": self.OWNERS.get(self.kind, "")}]})
        if path == "/version" and self.kind in ("vllm", "trtllm"):
            return json.dumps({"version": "9.9"})
        if path == "/server_info" and self.kind == "sglang":
            state = {"avg_spec_accept_length": 2.25} if "mean" in self.tells else {}
            return json.dumps(
                {
                    "version": "0.5",
                    "speculative_algorithm": "DFLASH",
                    "speculative_num_draft_tokens": 3,
                    "internal_states": [state],
                }
            )
        if "counters" not in self.tells:
            return None
        if path == "/metrics" and self.kind == "vllm":
            return (
                "# HELP something\n"
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {2 * done}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {2 * done}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {done}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {done}.0\n'
            )
        if path == "/metrics" and self.kind == "sglang" and done:
            return f'sglang:spec_verify_calls_total{{model_name="tiny"}} {2 * done}.0\n'
        if path == "/metrics" and self.kind == "trtllm":
            return '[{"iter": 1}]'
        if path == "/prometheus/metrics" and self.kind == "trtllm" and done:
            return "".join(
                f'trtllm_spec_decode_{name}_tokens_total{{token_position="{place}"}} {count * done}.0\n'
                for name, count in (("drafted", 2), ("accepted", 1))
                for place in (0, 1)
            )
        return None

    def events(self):
        self.requests += 1
        sent = [*self.ids, *([9] * self.past)]
        for place, token in enumerate(sent):
            text = "" if token == 0 else chr(64 + token)
            if self.kind == "llama.cpp":
                if token:
                    yield {"content": text, "tokens": [token], "stop": False}
                continue
            choice = {"text": text, "finish_reason": None}
            if self.kind in ("vllm", "sglang"):
                choice["token_ids"] = [token]
            if self.kind == "trtllm":  # either of both, and a mean over passes, the prompt's included
                choice |= {"text": "", "token_ids": [token], "avg_decoded_tokens_per_iter": 5 / 3}
            if place == len(sent) - 1:
                choice["finish_reason"] = "stop" if 0 in sent else "length"
            yield {"choices": [choice]}
        yield from self.last(len(sent))

    def last(self, count):
        usage = {"completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 2}}
        if self.kind == "llama.cpp":
            timings = {"draft_n": 6, "draft_n_accepted": 2, "predicted_n": 5, "cache_n": 2}
            told = timings if "reply" in self.tells else {"predicted_n": 5, "cache_n": 2}
            end = {"content": "", "tokens": [], "stop": True, "stop_type": "eos"}
            yield end | {"tokens_predicted": count, "timings": told}
            return
        if self.kind == "sglang" and "reply" in self.tells:
            details = {
                "spec_verify_ct": 2,
                "spec_num_correct_drafts": 2,
                "spec_num_proposed_drafts": 4,
                "spec_correct_drafts_histogram": [1, 0, 1],
            }
            yield {"choices": [], "sglext": {"spec_tokens_details": details}}
        yield {"choices": [], "usage": usage}


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


@pytest.mark.parametrize("kind", ["vllm", "sglang", "trtllm"])
def test_an_engine_with_ids_and_counters(serve, kind):
    server = serve(kind, past=2)
    system = ServerSystem(server.url + "/v1", byte_tokenizer(), (0,))
    for _ in range(2):  # counters are differences
        found = system.answer(REQUEST, 0.0)
        assert found.token_ids == (10, 11, 12, 13, 0)
        assert found.past_end == 2
        assert found.cached_tokens == 2
        assert (found.rounds, found.emitted_in_rounds) == (2, 4)
        assert found.accepted_per_position == (1, 1)
        assert found.tried_per_position == (2, 1)
        assert found.drafted_per_position == (2, 2)
        assert found.stated_acceptance is None
        assert 0 < found.ttft_s <= found.total_s
    assert server.asked[0]["prompt"] == [5, 6, 7], "our template, so ids"
    assert ("9.9" if kind != "sglang" else "0.5") in system.side.detail
    assert system.side.block_size == (3 if kind == "sglang" else 0)


def test_several_users_share_counters_but_not_replies(serve):
    """Counters of several users are nobody's; what a reply says is its own."""
    rounds = {
        kind: ServerSystem(serve(kind).url, byte_tokenizer(), (0,)).answer(REQUEST, 0.0, alone=False).rounds
        for kind in Server.OWNERS
    }
    assert rounds == {"vllm": 0, "sglang": 2, "trtllm": 2, "llama.cpp": 2}


def test_sglang_without_details_then_without_counters(serve):
    """Rounds are counted still; without them its mean is stated as one, not passed off as a count."""
    system = ServerSystem(serve("sglang", tells=("counters",)).url, byte_tokenizer(), (0,))
    for _ in range(2):
        found = system.answer(REQUEST, 0.0)
        assert (found.rounds, found.emitted_in_rounds, found.accepted_per_position) == (2, 4, ())
    system = ServerSystem(serve("sglang", tells=("mean",)).url, byte_tokenizer(), (0,))
    found = system.answer(REQUEST, 0.0)
    assert (found.rounds, found.stated_acceptance) == (0, 2.25)


def test_tensorrt_without_counters(serve):
    """Five tokens in three passes, of which one was the prompt's."""
    server = serve("trtllm", tells=())
    found = ServerSystem(server.url, byte_tokenizer(), (0,)).answer(REQUEST, 0.0)
    assert found.text == byte_tokenizer().decode([10, 11, 12, 13])
    assert (found.rounds, found.emitted_in_rounds) == (2, 4)
    assert server.asked[0]["detokenize"] is False


def test_llama_cpp(serve):
    """Its native call sends ids, the last one of the text left out."""
    server = serve("llama.cpp")
    found = ServerSystem(server.url, byte_tokenizer(), (0,)).answer(REQUEST, 0.0)
    assert found.token_ids == (10, 11, 12, 13, 0)
    assert (found.rounds, found.emitted_in_rounds) == (2, 4)
    assert found.text == "JKLM"
    assert (found.past_end, found.cached_tokens, found.stop_reason) == (0, 2, "stop")
    assert server.asked[0]["cache_prompt"] is False
    plain = ServerSystem(serve("llama.cpp", tells=()).url, byte_tokenizer(), (0,)).answer(REQUEST, 0.0)
    assert (plain.rounds, plain.stated_acceptance) == (0, None)


def test_any_other_server(serve):
    """Text alone is read with the target's tokenizer."""
    found = ServerSystem(serve("something").url, byte_tokenizer(), (0,)).answer(REQUEST, 0.0)
    assert found.token_ids == (*byte_tokenizer()("JKLM", add_special_tokens=False)["input_ids"], 0)
    assert (found.rounds, found.text, found.stop_reason) == (0, "JKLM", "stop")


def test_errors_are_sentences(serve):
    system = ServerSystem(serve("broken").url, byte_tokenizer(), (0,))
    with pytest.raises(InputError, match="answers 400: no such model"):
        system.answer(REQUEST, 0.0)
    with pytest.raises(InputError, match="no OpenAI-compatible server"):
        ServerSystem("http://127.0.0.1:9", byte_tokenizer(), (0,))


@pytest.mark.parametrize("dialect", [GENERIC, *DIALECTS], ids=lambda one: one.name or "generic")
def test_every_setting_is_stated(dialect):
    asked = SamplingOptions(temperature=0.5, seed=-1, stop=("x",))
    body = dialect.body(Request([1], asked), "m", "salt")
    penalty = "repeat_penalty" if dialect.name == "llamacpp" else "repetition_penalty"
    assert body["seed"] >= 0
    assert (body["top_p"], body["min_p"], body["stop"], body[penalty]) == (1.0, 0.0, ["x"], 1.0)
    assert body["top_k"] == (0 if dialect.name in ("tensorrt_llm", "llamacpp") else -1), "its word for all"
    assert "detokenize" not in body, "a stop string needs text"
    assert dialect.body(Request([1], SamplingOptions(top_k=4)), "m", "salt")["top_k"] == 4
    assert body["stream"] is True


def test_prompts_are_kept_out_of_prefix_caches(serve):
    for kind in ("vllm", "sglang"):
        server = serve(kind)
        system = ServerSystem(server.url, byte_tokenizer(), (0,))
        for _ in range(2):
            system.answer(REQUEST, 0.0)
        assert len({body["cache_salt"] for body in server.asked}) == 2
