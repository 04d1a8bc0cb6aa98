"""How each engine's server is asked, so that it answers with token ids and says what it accepted.

Where names of fields and pages come from stands in `docs/benchmarks.md`. A server is known by the `owned_by`
of its models; any other is asked in the terms that most of them share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from slipstream.core.errors import InputError
from slipstream.core.options import SamplingOptions
from slipstream.core.records import Request
from slipstream.data.openai_server import OpenAIServer

#: Why llama.cpp stopped, in OpenAI's words.
_ENDS: Final = {"eos": "stop", "word": "stop", "limit": "length"}
Body = dict[str, Any]


@dataclass(frozen=True)
class Dialect:
    """One kind of server.

    Attributes:
        name: as its models' `owned_by` says.
        path: where texts are asked for.
        body: what is asked, from a request, the model's name, and a word that no other request shares.
        metrics: pages of Prometheus counters; an engine has one of them.
        about: pages that say its version.
    """

    name: str
    path: str
    body: Callable[[Request, str, str], Body]
    metrics: tuple[str, ...] = ("/metrics",)
    about: tuple[str, ...] = ("/version",)


def _common(request: Request, model: str) -> Body:
    """What all but llama.cpp call alike; every setting is stated, so that a server's defaults have no say."""
    sampling: SamplingOptions = request.sampling
    return {
        "model": model,
        "prompt": list(request.prompt_ids),
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed % 2**31,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        **({"stop": list(sampling.stop)} if sampling.stop else {}),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _plain(request: Request, model: str, mark: str) -> Body:
    return {**_common(request, model), "return_token_ids": True}


def _vllm(request: Request, model: str, mark: str) -> Body:
    """A salt of its own keeps a prompt from being found in the prefix cache."""
    return {**_plain(request, model, mark), "cache_salt": mark}


def _sglang(request: Request, model: str, mark: str) -> Body:
    return {**_vllm(request, model, mark), "return_spec_tokens_details": True}


def _tensorrt(request: Request, model: str, mark: str) -> Body:
    """It refuses fields that it does not know, and sends either text or ids; 0 is its word for all tokens."""
    body = {**_common(request, model), "top_k": request.sampling.top_k}
    return body if request.sampling.stop else {**body, "detokenize": False}


def _llama(request: Request, model: str, mark: str) -> Body:
    """The native call, as the OpenAI one sends no ids."""
    sampling: SamplingOptions = request.sampling
    return {
        "prompt": list(request.prompt_ids),
        "n_predict": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed % 2**31,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repeat_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "ignore_eos": sampling.ignore_eos,
        "stop": list(sampling.stop),
        "stream": True,
        "return_tokens": True,
        "cache_prompt": False,
    }


_OPENAI: Final = "/v1/completions"
GENERIC: Final = Dialect("", _OPENAI, _plain)
DIALECTS: Final = (
    Dialect("vllm", _OPENAI, _vllm),
    Dialect("sglang", _OPENAI, _sglang, about=("/server_info", "/get_server_info")),
    # /metrics there is a list of iterations in JSON.
    Dialect("tensorrt_llm", _OPENAI, _tensorrt, metrics=("/prometheus/metrics",)),
    Dialect("llamacpp", "/completion", _llama, metrics=(), about=("/props",)),
)


def dialect_of(owner: str) -> Dialect:
    """The dialect of a server whose models are owned by this one."""
    return next((one for one in DIALECTS if one.name == owner), GENERIC)


def as_openai(chunk: Mapping[str, Any]) -> Mapping[str, Any]:
    """An event of llama.cpp's native stream as one of OpenAI's; others stay as they are."""
    if "content" not in chunk or "choices" in chunk:
        return chunk
    reason = _ENDS.get(str(chunk.get("stop_type")), "length") if chunk.get("stop") else None
    choice = {"text": chunk["content"], "token_ids": chunk.get("tokens") or (), "finish_reason": reason}
    timings = chunk.get("timings") or {}
    usage = {
        "completion_tokens": chunk.get("tokens_predicted"),
        "prompt_tokens_details": {"cached_tokens": timings.get("cache_n")},
    }
    return {"choices": [choice], "timings": timings, "usage": usage if reason else {}}


@dataclass(frozen=True)
class About:
    """What a server says of itself.

    Attributes:
        version: empty where it does not say.
        block_size: slots of a block, the target's own token included; 0 where it does not say.
        mean: tokens per round over all that it has served; None where it does not say.
    """

    version: str = ""
    block_size: int = 0
    mean: float | None = None


def about(server: OpenAIServer, pages: Iterable[str]) -> About:
    """Ask the first page that answers."""
    for page in pages:
        try:
            found = server.call(page)
        except InputError:
            continue
        if isinstance(found, Mapping):
            return read_about(found)
    return About()


def read_about(found: Mapping[str, Any]) -> About:
    """From the object of a page; `avg_spec_accept_length` is SGLang's, whose workers each have their own."""
    states = [state for state in found.get("internal_states") or () if isinstance(state, Mapping)]
    lengths = [value for state in states if (value := state.get("avg_spec_accept_length"))]
    drafting = found.get("speculative_algorithm") or found.get("speculative_num_draft_tokens")
    return About(
        str(found.get("version") or found.get("build_info") or ""),
        int(found.get("speculative_num_draft_tokens") or 0) if drafting else 0,
        sum(lengths) / len(lengths) if lengths else None,
    )
