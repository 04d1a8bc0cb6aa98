"""Answers from an OpenAI-compatible server of the same target, in place of our own decoding.

Not a client for anyone's chats: prompts are sent as token ids to `/v1/completions`, so that the template is
ours, and what the server says is turned back into ids (it sends them itself where it can).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from slipstream.core.records import Completion, FollowUp, Request
from slipstream.data.openai_server import OpenAIServer

_STREAMS = 64


class Endpoint:
    """A server that continues prompts of token ids.

    Args:
        url: of the server, with or without `/v1`.
        tokenizer: of the target.
        end_ids: tokens that end an answer; the first is put behind an answer that the server says has ended.
        model: name to ask for; None takes the first that the server lists.
        api_key: sent as a bearer token.

    Raises:
        InputError: no server answers there.
    """

    def __init__(
        self,
        url: str,
        tokenizer: Any,
        end_ids: Sequence[int],
        model: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._server, self._tokenizer = OpenAIServer(url, api_key), tokenizer
        eos = tokenizer.eos_token_id
        self._end = eos if eos is not None else next(iter(end_ids), None)
        self._model = model or self._server.first_model()

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Continue all prompts, many at a time; completions in the order of the requests.

        Raises:
            InputError: the server refuses a request or goes away.
        """
        with ThreadPoolExecutor(_STREAMS) as pool:
            return list(pool.map(self._one, requests))

    def converse(self, requests: Sequence[Request], follow: FollowUp) -> None:
        """Continue all prompts, and whatever follows from a completion, many at a time.

        Args:
            requests: the first ones.
            follow: called with a request's number and its completion, never twice at once; what it returns
                is asked next, under the same number.

        Raises:
            InputError: the server refuses a request or goes away.
        """
        one_at_a_time = Lock()

        def talk(number: int) -> None:
            request: Request | None = requests[number]
            while request is not None:
                completion = self._one(request)
                with one_at_a_time:
                    request = follow(number, completion)

        with ThreadPoolExecutor(_STREAMS) as pool:
            list(pool.map(talk, range(len(requests))))

    def _one(self, request: Request) -> Completion:
        sampling = request.sampling
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(request.prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed % 2**31,
            "top_p": sampling.top_p,
            "return_token_ids": True,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        choice = self._server.call("/v1/completions", body)["choices"][0]
        text = str(choice["text"])
        ended = choice.get("finish_reason") == "stop"
        ids = choice.get("token_ids")
        if not ids:
            ids = self._tokenizer(text, add_special_tokens=False).input_ids
            ids = [*ids, self._end] if ended and self._end is not None else ids
        return Completion(
            text=text,
            token_ids=tuple(ids),
            prompt_tokens=len(request.prompt_ids),
            finish_reason="stop" if ended else "length",
            rounds=0,
            emitted_in_rounds=0,
            accepted_per_position=(),
            ttft_s=0.0,
            decode_s=0.0,
        )
