"""`slipstream synthesize`: the target writes chats, or answers given prompts."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from slipstream.cli.session import say
from slipstream.core.errors import InputError
from slipstream.core.options import CHAT_ROWS, SynthesisOptions, TargetOptions


@dataclass(frozen=True)
class ServerFlags:
    """Who writes instead of Slipstream.

    Attributes:
        endpoint: URL of an OpenAI-compatible server of the same target.
        endpoint_model: its name there; the first one listed if not given.
        api_key: of the server.
    """

    endpoint: str | None = None
    endpoint_model: str | None = None
    api_key: str | None = None


def synthesize(
    *,
    target: Annotated[str, Parameter(alias="-t")] = "smollm2",
    out: Annotated[Path, Parameter(alias="-o")],
    count: Annotated[int, Parameter(alias="-n")] = 0,
    max_tokens: int | None = None,
    prompts: str | None = None,
    keep_answers: bool = False,
    rows: int = CHAT_ROWS,
    force: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
    chat: Annotated[SynthesisOptions, Parameter(name="*", group="Chats")] = SynthesisOptions(),
    server: Annotated[ServerFlags, Parameter(name="*", group="Server")] = ServerFlags(),
    loading: Annotated[TargetOptions, Parameter(name="*", group="Models")] = TargetOptions(),
) -> int:
    """Write chats for training: the target's own questions and answers; a stopped call goes on.

    Args:
        target: the model that speaks: smollm2 (bundled), a hub id, a folder or a GGUF file.
        out: JSONL file of the chats.
        count: chats wanted, or the most prompts to take; needed unless prompts are given.
        max_tokens: longest answer; the same as answer-tokens.
        prompts: file or hub data set whose user turns are answered instead of self-written ones.
        keep_answers: take the answers of the prompts file as they are.
        rows: chats decoded side by side.
        force: overwrite an existing file.
        as_json: print the final figures as JSON.
    """
    from slipstream.core.files import refuse_existing
    from slipstream.data.make import ChatPlan, make_chats
    from slipstream.target import load_target

    if count < 0 or (count == 0 and prompts is None):
        raise InputError("say how many chats with -n, at least 1, or give --prompts")
    if keep_answers and prompts is None:
        raise InputError("--keep-answers needs --prompts")
    refuse_existing(out, force)
    options = chat if max_tokens is None else replace(chat, answer_tokens=max_tokens)
    model = load_target(target, loading, say)
    decoder = _writer(model, server, rows)
    made = make_chats(model, decoder, ChatPlan(count, prompts, keep_answers, options), out, force, say)
    if as_json:
        print(json.dumps(asdict(made) | {"out": str(out)}))
        return 0
    print(
        f"{out}: {made.chats} chats, {made.tokens} tokens, {made.answer_tokens} of them answers; "
        f"{made.new_answer_tokens / max(made.seconds, 1e-9):.0f} answer tokens/s"
    )
    return 0


def _writer(model: Any, server: ServerFlags, rows: int) -> Any:
    """Whatever decodes: an engine, or the server."""
    from slipstream.core.options import EngineOptions
    from slipstream.data.endpoint import Endpoint
    from slipstream.decode import Engine

    if server.endpoint is None:
        return Engine(model, None, EngineOptions(max_rows=rows))
    ends = model.info.eos_token_ids
    return Endpoint(server.endpoint, model.tokenizer, ends, server.endpoint_model, server.api_key)
