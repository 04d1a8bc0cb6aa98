"""The process: listens, logs, and stops the way it is asked to."""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import sys
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from slipstream.api import Session
from slipstream.core.command_options import ServeOptions
from slipstream.core.errors import InputError
from slipstream.serve.app import create_app
from slipstream.serve.service import Service


class JsonLines(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Time, level, what happened, and its fields."""
        entry = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "event": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            entry["trace"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


class Server(uvicorn.Server):
    """Told to stop, it takes no further calls, lets running ones finish for a while, then ends them.

    Args:
        config: of uvicorn.
        service: what is to be stopped.
        grace: seconds that running calls get.
    """

    def __init__(self, config: uvicorn.Config, service: Service, grace: float) -> None:
        super().__init__(config)
        self._service, self._grace = service, grace
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn does it."""
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On SIGTERM or SIGINT; the second SIGINT ends at once.

        Unlike uvicorn's own this does not raise the signal again in the end: having stopped is no failure.
        """
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.stop()

    def stop(self) -> None:
        """Begin to stop; from any thread."""
        self.should_exit = True
        if self._loop is not None and not self._service.worker.draining:
            self._service.worker.drain()
            self._loop.call_soon_threadsafe(self._loop.call_later, self._grace, self._service.worker.abandon)


def make_server(session: Session, options: ServeOptions) -> Server:
    """A server that has not begun to listen.

    Raises:
        InputError: buffers for the rows do not fit into memory.
    """
    app = create_app(session, options)
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        # Ours ends calls first; this is for connections that do not end even then.
        timeout_graceful_shutdown=int(options.grace) + 10,
        h11_max_incomplete_event_size=65536,
    )
    return Server(config, app.state.service, options.grace)


def serve(session: Session, options: ServeOptions, ready: Callable[[str], None] | None = None) -> None:
    """Serve until told to stop by SIGTERM or Ctrl-C.

    Args:
        session: target and drafter.
        options: where to listen and what to allow.
        ready: called with the address once it is listened to.

    Raises:
        InputError: the address cannot be listened to, or buffers for the rows do not fit into memory.
    """
    _log_to_stderr()
    listener = _listen(options)
    with listener:
        server = make_server(session, options)
        host, port = listener.getsockname()[:2]
        if ready is not None:
            ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        server.run(sockets=[listener])


def _listen(options: ServeOptions) -> socket.socket:
    """A bound socket, so that a taken port is noticed before models are warmed."""
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((options.host, options.port))
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot listen on {options.host}:{options.port}: {reason}") from error
    return listener


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name, level in (("slipstream.serve", logging.INFO), ("uvicorn", logging.WARNING)):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level)
