"""A server of a tiny target and its drafter, on loopback, in a thread of this process."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest

pytest.importorskip("fastapi")

import httpx
import openai

import slipstream
from slipstream import EngineOptions, TargetOptions
from slipstream.core.command_options import ServeOptions
from slipstream.serve import make_server
from slipstream.serve.run import _listen
from tests.tiny import save_drafter, save_target

#: ChatML that shows tools, and asks for calls in the Hermes form.
TEMPLATE = (
    "{% if tools %}<|start|>system\nTools: {% for t in tools %}{{ t.function.name }} {% endfor %}"
    "called as <tool_call>{...}</tool_call>"
    "<|end|>\n{% endif %}"
    "{% if shout is defined and shout %}LOUD {% endif %}"
    "{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% for c in m.get('tool_calls', []) %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


class Running:
    """A server that runs, and clients for it."""

    def __init__(self, session, options):
        self.session, self.listener = session, _listen(options)
        self.server = make_server(session, options)
        self.service = self.server._service
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.thread = threading.Thread(
            target=self.server.run, kwargs={"sockets": [self.listener]}, daemon=True
        )
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.openai = openai.OpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0, timeout=60)

    def chat(self, text="hello", **fields):
        messages = fields.pop("messages", [{"role": "user", "content": text}])
        body = {"messages": messages, "max_tokens": 12, "seed": 1, **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def idle(self, seconds=20):
        """Wait until nothing decodes."""
        deadline = time.monotonic() + seconds
        while self.service.worker.active or self.service.worker.load.running:
            assert time.monotonic() < deadline, self.service.worker.load
            time.sleep(0.01)

    def stop(self):
        self.http.close()
        self.openai.close()
        self.server.stop()
        self.thread.join(timeout=20)
        self.listener.close()
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(session, **options):
    server = Running(session, ServeOptions(port=0, **{"grace": 0.2, **options}))
    try:
        yield server
    finally:
        server.stop()


def load(folders, **engine):
    target, drafter = folders
    return slipstream.load(
        str(target),
        str(drafter) if drafter else None,
        target_options=TargetOptions(dtype="float32"),
        engine_options=EngineOptions(**{"max_rows": 4, "drafts": "max", **engine}),
    )


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    target = save_target(tmp_path_factory.mktemp("served"), TEMPLATE)
    return target, save_drafter(tmp_path_factory.mktemp("served") / "drafter", target)


@pytest.fixture(scope="session")
def server(folders):
    with running(load(folders)) as server:
        yield server


@pytest.fixture(scope="session")
def alone(folders):
    """A session of the same models, to decode single requests with."""
    return load(folders)
