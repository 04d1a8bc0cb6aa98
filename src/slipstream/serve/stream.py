"""Server-sent events that notice at once when their reader goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

#: Seconds without any reading after which a reader counts as gone.
_STALL_SECONDS = 120.0


def event(document: Any) -> bytes:
    """One event of JSON."""
    return b"data: " + json.dumps(document, ensure_ascii=False, allow_nan=False).encode() + b"\n\n"


async def gone(receive: Receive) -> None:
    """Return once the client has gone away."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(receive: Receive, work: Awaitable[Any]) -> Any:
    """The result of some work, or None where the client went away first; the work is cancelled then."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


class EventStream(Response):
    """An answer of server-sent events.

    Args:
        events: whole events, as bytes.
        headers: of the answer.
        on_end: called once with whether the client stayed to the end.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[bytes], headers: Mapping[str, str], on_end: Callable[[bool], None]
    ) -> None:
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events while the client is there."""
        stayed = False
        try:
            stayed = bool(await unless_gone(receive, self._send(send)))
        finally:
            self._on_end(stayed)

    async def _send(self, send: Send) -> bool:
        """Whether the client took it all; one that reads nothing for long is given up."""
        messages = self._messages()
        try:
            async for message in messages:
                async with asyncio.timeout(_STALL_SECONDS):
                    await send(message)
        except TimeoutError:
            return False
        return True

    async def _messages(self) -> AsyncIterator[Message]:
        yield {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        async for chunk in self._events:
            yield {"type": "http.response.body", "body": chunk, "more_body": True}
        yield {"type": "http.response.body", "body": b"", "more_body": False}
