"""Calls to an OpenAI-compatible server: bearer token, time limit, and errors in one sentence.

What is asked and what the answers mean is the callers' business.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from slipstream.core.errors import InputError

_TIMEOUT_S = 600


class OpenAIServer:
    """A server by its URL.

    Args:
        url: with or without `/v1`.
        api_key: sent as a bearer token.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.root = url.rstrip("/").removesuffix("/v1")
        self._key = api_key

    def models(self) -> list[dict[str, Any]]:
        """What the server lists: each model with its `id`.

        Raises:
            InputError: no server answers there, or it lists none.
        """
        found = self.call("/v1/models")
        listed = found.get("data") if isinstance(found, dict) else None
        if not listed or not all(isinstance(one, dict) and "id" in one for one in listed):
            raise InputError(f"{self.root}/v1/models lists no model")
        return list(listed)

    def first_model(self) -> str:
        """The first model that the server lists; errors as for `models`."""
        return str(self.models()[0]["id"])

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """The JSON of an answer.

        Args:
            path: from the root.
            body: posted as JSON; None asks without one.

        Raises:
            InputError: the server refuses the call, or none answers there.
        """
        with self.open(path, body) as reply:
            return json.load(reply)

    @contextmanager
    def open(self, path: str, body: Mapping[str, Any] | None = None) -> Iterator[Any]:
        """An answer to be read bit by bit; arguments and errors as for `call`."""
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            call = urllib.request.Request(self.root + path, data, headers)
            with urllib.request.urlopen(call, timeout=_TIMEOUT_S) as reply:
                yield reply
        except urllib.error.HTTPError as error:
            said = " ".join(error.read(300).decode(errors="replace").split())
            raise InputError(f"{self.root}{path} answers {error.code}: {said}") from error
        except (OSError, ValueError) as error:
            raise InputError(f"no OpenAI-compatible server answers at {self.root}/v1: {error}") from error
