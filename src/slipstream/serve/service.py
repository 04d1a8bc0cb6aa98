"""What the server does for each call: read it, plan it, have it decoded, answer it."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from slipstream import __version__
from slipstream.api import Session
from slipstream.core.command_options import ServeOptions
from slipstream.core.records import Completion, Piece, total_acceptance
from slipstream.serve.answers import Answer
from slipstream.serve.errors import ApiError
from slipstream.serve.fields import ChatFields, SharedFields, TextFields, parse
from slipstream.serve.metrics import Metrics
from slipstream.serve.plan import Plan, Planner
from slipstream.serve.stream import EventStream, event, unless_gone
from slipstream.serve.tokens import TokenTexts
from slipstream.serve.worker import Call, Worker

_LOG = logging.getLogger("slipstream.serve")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Seconds that a client may take to send a body.
_BODY_SECONDS = 60.0
_Fields = TypeVar("_Fields", bound=SharedFields)


@dataclass
class _Visit:
    """One call from arrival to the last byte, for headers and the log."""

    path: str
    ident: str
    begun: float = field(default_factory=time.perf_counter)
    answer: Answer | None = None
    status: int = 200
    error: str = ""


class Service:
    """The routes of the server.

    Args:
        session: target and drafter; nobody else may decode with them meanwhile.
        options: of the server.
    """

    def __init__(self, session: Session, options: ServeOptions = ServeOptions()) -> None:
        engine = session.engine
        self.options = options
        self.name = options.served_model_name or _own_name(session.target.info.name)
        self.worker = Worker(engine, session.options.max_rows, options.queue)
        self.metrics = Metrics(self.name, lambda: self.worker.load, engine.block_size - 1)
        self._planner = Planner(session, options, engine.max_context)
        self._context, self._created = engine.max_context, int(time.time())
        self._tokens = TokenTexts(session.target.tokenizer)
        # Tokenizers are not for several threads at once; one thread also keeps the order of arrival.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="slipstream-template")

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        return await self._visit(request, ChatFields, self._planner.chat)

    async def text(self, request: Request) -> Response:
        """Continue texts as they are."""
        return await self._visit(request, TextFields, self._planner.text)

    async def models(self, request: Request) -> Response:
        """The one model that is served."""
        self._admit(request)
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model by its name."""
        self._admit(request)
        self._check_model(request.path_params["model"])
        return JSONResponse(self._model())

    async def health(self) -> Response:
        """Whether calls are taken: 200, or 503 while stopping or once the engine is broken."""
        worker = self.worker
        state = "broken" if worker.broken else "stopping" if worker.draining else "ok"
        load = worker.load
        document = {"status": state, "running": load.running, "waiting": load.waiting}
        return JSONResponse(document, 200 if state == "ok" else 503)

    async def version(self) -> Response:
        """Of Slipstream."""
        return JSONResponse({"version": __version__})

    async def numbers(self) -> Response:
        """Metrics for Prometheus."""
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    def close(self) -> None:
        """End the threads."""
        self.worker.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _visit(
        self, request: Request, kind: type[_Fields], plan: Callable[[_Fields], Plan]
    ) -> Response:
        """A call from arrival to its answer, errors included; each is logged once."""
        visit = _Visit(request.url.path, _ident(request))
        try:
            self._admit(request)
            fields = parse(kind, await self._body(request))
            self._check_model(fields.model)
            planned = await asyncio.get_running_loop().run_in_executor(self._pool, plan, fields)
            visit.answer = Answer(planned, self.name, visit.ident, self._tokens)
            call = self.worker.submit(planned.requests, self.metrics.usual_seconds)
            return await self._answer(request, visit, call)
        except ApiError as error:
            return self._failed(visit, error)
        except ClientDisconnect:
            return self._failed(visit, ApiError(499, "the client went away"))
        except Exception as error:
            _LOG.error("a call failed", exc_info=error)
            return self._failed(visit, ApiError(500, "the server failed while answering"))

    async def _answer(self, request: Request, visit: _Visit, call: Call) -> Response:
        answer = visit.answer
        assert answer is not None
        if not answer.plan.fields.stream:
            try:
                done = await unless_gone(request.receive, self._collect(visit, call))
            finally:
                self.worker.close(call)
            if done is None:
                visit.status, visit.error = 499, "the client went away"
                self._log(visit)
                self.metrics.cancelled()
                return Response(status_code=499)
            self._log(visit)
            return JSONResponse(answer.whole(), headers=self._headers(visit))

        def ended(stayed: bool) -> None:
            self.worker.close(call)
            if not stayed:
                visit.status, visit.error = 499, "the client went away"
                self.metrics.cancelled()
            self._log(visit)

        return EventStream(self._events(visit, call), self._headers(visit), ended)

    def _pieces(self, visit: _Visit, call: Call) -> AsyncIterator[tuple[int, Piece | Completion]]:
        """Events of a call within the time that it has."""
        limit = self.options.timeout
        return call.read(limit, limit - (time.perf_counter() - visit.begun) if limit else None)

    async def _collect(self, visit: _Visit, call: Call) -> bool:
        """Read a call to its end."""
        assert visit.answer is not None
        async for place, happened in self._pieces(visit, call):
            if isinstance(happened, Piece):
                visit.answer.choices[place].add(happened)
            else:
                self._finish(visit, place, happened)
        return True

    async def _events(self, visit: _Visit, call: Call) -> AsyncIterator[bytes]:
        """The events of a stream; one that cannot go on ends with an error that says so."""
        answer = visit.answer
        assert answer is not None
        try:
            for chunk in answer.opening():
                yield event(chunk)
            async for place, happened in self._pieces(visit, call):
                if isinstance(happened, Piece):
                    yield b"".join(event(chunk) for chunk in answer.chunks(place, happened))
                else:
                    self._finish(visit, place, happened)
                    yield event(answer.ending(place))
            for chunk in answer.closing():
                yield event(chunk)
        except ApiError as error:
            visit.status, visit.error = error.status, error.message
            yield event(error.document)
        except Exception as error:
            _LOG.error("a stream failed", exc_info=error)
            visit.status, visit.error = 500, "the server failed while answering"
            yield event(ApiError(500, visit.error).document)
        yield b"data: [DONE]\n\n"

    def _finish(self, visit: _Visit, place: int, done: Completion) -> None:
        """A text has ended.

        Raises:
            ApiError: 500 where its grammar failed half-way.
        """
        assert visit.answer is not None
        plan, choice = visit.answer.plan, visit.answer.choices[place]
        choice.done = done
        self.metrics.finished(done, plan.template_s, choice.reason or done.finish_reason)
        if done.failure:
            raise ApiError(500, f"the grammar could not be followed: {done.failure[:300]}")

    async def _body(self, request: Request) -> bytes:
        """The body, no longer than allowed.

        Raises:
            ApiError: 413 for a longer one, 415 for another type, 408 where it does not come.
        """
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if kind != "application/json":
            # Also keeps pages of other origins out, which may send other types without being asked.
            raise ApiError(415, "the body must be of the type application/json")
        most = self.options.max_body
        too_long = ApiError(413, f"the body is longer than the {most} bytes allowed")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_long
        body = bytearray()
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_long
        except TimeoutError:
            raise ApiError(408, "the body did not come in time") from None
        return bytes(body)

    def _admit(self, request: Request) -> None:
        """Ask for the key, if there is one.

        Raises:
            ApiError: 401.
        """
        key = self.options.api_key
        given = request.headers.get("authorization", "")
        if key and not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY")

    def _check_model(self, name: str | None) -> None:
        if name not in (None, self.name):
            raise ApiError(404, f"there is no model {str(name)[:200]!r} here, only {self.name!r}", "model")

    def _model(self) -> dict[str, Any]:
        head = {"id": self.name, "object": "model", "created": self._created, "owned_by": "slipstream"}
        return head | {"max_model_len": self._context}

    def _headers(self, visit: _Visit) -> dict[str, str]:
        """Times and counts; those that are not known yet when a stream begins stand in its last chunk."""
        answer = visit.answer
        headers = {"X-Request-Id": visit.ident}
        if answer is None:
            return headers
        times = answer.timings()
        if answer.plan.fields.stream:
            times = {name: times[name] for name in ("template_ms", "grammar_ms")}
        else:
            done = answer.completions
            times["total_ms"] = round((time.perf_counter() - visit.begun) * 1e3, 3)
            headers |= {
                "X-Slipstream-Rounds": str(sum(item.rounds for item in done)),
                "X-Slipstream-Acceptance-Length": f"{total_acceptance(done):.4f}",
                "X-Slipstream-Drafted": str(sum(item.drafts for item in done)),
                "X-Slipstream-Accepted": str(sum(sum(item.accepted_per_position) for item in done)),
            }
        entries = (f"{name.removesuffix('_ms')};dur={value}" for name, value in times.items())
        return headers | {"Server-Timing": ", ".join(entries)}

    def _failed(self, visit: _Visit, error: ApiError) -> Response:
        visit.status, visit.error = error.status, error.message
        self._log(visit)
        return error_response(error, {"X-Request-Id": visit.ident})

    def _log(self, visit: _Visit) -> None:
        """One line for the call; prompts and answers only where that was asked for."""
        self.metrics.answered(visit.path, visit.status)
        entry: dict[str, Any] = {"id": visit.ident, "path": visit.path, "status": visit.status}
        entry["total_ms"] = round((time.perf_counter() - visit.begun) * 1e3, 3)
        if visit.error:
            entry["error"] = visit.error
        if visit.answer is not None:
            done, fields = visit.answer.completions, visit.answer.plan.fields
            entry |= visit.answer.timings() | {
                "user": fields.user or fields.safety_identifier,
                "stream": bool(fields.stream),
                "prompt_tokens": sum(len(r.prompt_ids) for r in visit.answer.plan.requests),
                "completion_tokens": sum(item.completion_tokens for item in done),
                "rounds": sum(item.rounds for item in done),
                "acceptance_length": round(total_acceptance(done), 4),
                "finish": [choice.reason for choice in visit.answer.choices],
            }
            if self.options.log_prompts:
                entry["prompts"] = visit.answer.plan.prompts
                entry["texts"] = [choice.text for choice in visit.answer.choices]
        _LOG.info("request", extra={"fields": entry})


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error as its client sees it."""
    headers = dict(headers or {})
    if error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(error.document, error.status, headers)


def _own_name(name: str) -> str:
    """A hub id as it is; of a folder or a file its last part, as clients need not know where it lies."""
    return Path(name).name if Path(name).exists() else name


def _ident(request: Request) -> str:
    """The client's own name for the call where it has a harmless one."""
    given = request.headers.get("x-request-id", "")
    return given if _NAME.fullmatch(given) else uuid.uuid4().hex
