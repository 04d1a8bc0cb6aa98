"""The page in a real browser: what is said appears, drafts are marked, markup stays text."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

websockets = pytest.importorskip("websockets.sync.client")
BROWSER = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")


class Tab:
    """One tab, by the DevTools protocol."""

    def __init__(self, socket: Any) -> None:
        self._socket, self._count = socket, 0

    def call(self, method: str, **parameters: Any) -> Any:
        self._count += 1
        self._socket.send(json.dumps({"id": self._count, "method": method, "params": parameters}))
        while True:
            reply = json.loads(self._socket.recv(timeout=30))
            if reply.get("id") == self._count:
                return reply["result"]

    def run(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script)["result"].get("value")

    def wait(self, script: str, seconds: float = 40) -> None:
        for _ in range(int(seconds * 10)):
            if self.run(script):
                return
            time.sleep(0.1)
        pytest.fail(f"in vain: {script}")


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Tab]:
    assert BROWSER is not None
    words = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0"]
    words += ["--window-size=1000,900", f"--user-data-dir={tmp_path}", "about:blank"]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port_file = tmp_path / "DevToolsActivePort"
        for _ in range(200):
            if port_file.exists() and port_file.read_text().strip():
                break
            time.sleep(0.1)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as reply:
            page = next(one for one in json.load(reply) if one["type"] == "page")
        with websockets.connect(page["webSocketDebuggerUrl"], max_size=None) as socket:
            yield Tab(socket)
    finally:
        process.terminate()
        process.wait(timeout=20)


def visit(tab: Tab, url: str) -> None:
    """Open the page anew; what an earlier one shows must not be taken for it."""
    tab.run("window.earlier = true")
    tab.call("Page.enable")
    tab.call("Page.navigate", url=url)
    tab.wait("!window.earlier && document.getElementById('model')?.textContent")


def ask(tab: Tab, text: str) -> None:
    """Send a message and wait for the end of the answer, which may come between two looks."""
    before = tab.run("document.querySelectorAll('.turn').length")
    tab.run(f"document.getElementById('text').value = {json.dumps(text)}")
    tab.run("document.getElementById('form').requestSubmit()")
    tab.wait(f"document.querySelectorAll('.turn').length > {before}")
    tab.wait("document.getElementById('send').textContent === 'Send'")


def test_a_conversation(server: Any, tab: Tab, tmp_path: Path) -> None:
    visit(tab, f"{server.url}/")
    tab.run("document.getElementById('both').checked = true")
    tab.run("document.getElementById('most').value = 30")
    ask(tab, "one <b>two</b>")
    assert tab.run("document.querySelectorAll('.error').length") == 0
    drafted, plain = (
        tab.run(f"document.querySelectorAll('.turn.assistant')[{n}].textContent") for n in (0, 1)
    )
    assert drafted == plain != ""
    assert tab.run("document.querySelector('.turn.user').textContent") == "one <b>two</b>"
    assert tab.run("document.querySelectorAll('.turn b').length") == 0
    # The plain answer has no marked part; whether the drafted one has, its own count of accepted drafts says.
    marks = tab.run("document.querySelectorAll('.turn.assistant')[0].querySelectorAll('mark').length")
    assert tab.run("document.querySelectorAll('.turn.assistant')[1].querySelectorAll('mark').length") == 0
    length = float(tab.run("document.getElementById('length').textContent"))
    assert (length > 1) == (marks > 0)
    assert float(tab.run("document.getElementById('plain').textContent")) > 0
    assert tab.run("document.getElementById('bars').children.length") > 0
    picture = base64.b64decode(tab.call("Page.captureScreenshot")["data"])
    (tmp_path / "page.png").write_bytes(picture)
    assert len(picture) > 5000
    tab.run("document.getElementById('reset').click()")
    assert tab.run("document.querySelectorAll('.turn').length") == 0


def test_a_refusal_is_shown(server: Any, tab: Tab) -> None:
    visit(tab, f"{server.url}/")
    tab.run("document.getElementById('temperature').value = 9")
    ask(tab, "hello")
    assert "temperature" in tab.run("document.querySelector('.error').textContent")
