"""The fields of a request: every one of OpenAI's is honoured or refused by its name; so are vLLM's extras."""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from slipstream.serve.errors import ApiError, bad

#: Most of the likeliest tokens that are reported beside a token.
MOST_LOGPROBS = 20

#: Known fields that are not honoured, and values that ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}

Tokens = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Words = Annotated[str, Field(min_length=1)]
_Fields = TypeVar("_Fields", bound="SharedFields")


class Strict(BaseModel):
    """No conversions, no unknown fields, no NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamFields(Strict):
    """What a stream holds besides text; `include_spans` is Slipstream's own: which parts were drafted."""

    include_usage: bool = False
    include_spans: bool = False
    include_obfuscation: bool = False


class SharedFields(Strict):
    """What chats and plain texts have in common."""

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, lt=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    stop: Words | Annotated[list[Words], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=64)] | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    n: int | None = Field(None, ge=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=10)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamFields | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    return_token_ids: bool | None = None
    draft: bool | None = Field(None, description="False decodes this request without drafts.")
    best_of: Any = None
    metadata: Any = None
    service_tier: Any = None
    store: Any = None
    suffix: Any = None


class TextPart(Strict):
    """A part of a message; others than text are refused."""

    type: Literal["text"]
    text: str


class CalledFunction(Strict):
    """A function that an earlier answer called."""

    name: str
    arguments: str


class EarlierCall(Strict):
    """A tool call of an earlier answer."""

    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None
    function: CalledFunction


class Message(Strict):
    """A turn of the conversation. Answers may come back as they were sent, empty fields included."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None


class ToolFunction(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(min_length=1, max_length=128, pattern="^[a-zA-Z0-9_.-]+$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Strict):
    """The name of a function."""

    name: str


class NamedTool(Strict):
    """The tool that must be called."""

    type: Literal["function"]
    function: NamedFunction


class JsonSchema(Strict):
    """A schema that the answer must follow."""

    model_config = ConfigDict(protected_namespaces=())

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatFields(SharedFields):
    """A request to /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TextFields(SharedFields):
    """A request to /v1/completions."""

    prompt: (
        Words
        | Tokens
        | Annotated[list[Words], Field(min_length=1)]
        | Annotated[list[Tokens], Field(min_length=1)]
    )
    logprobs: int | None = Field(None, ge=0, le=MOST_LOGPROBS)
    echo: bool | None = None
    add_special_tokens: bool | None = None


def parse(kind: type[_Fields], body: bytes) -> _Fields:
    """Read a request.

    Raises:
        ApiError: 400; names the field that is to blame.
    """
    try:
        fields = kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(kind, error) from error
    except RecursionError as error:
        raise ApiError(400, "the body is nested too deeply") from error
    for name, neutral in _NEUTRAL.items():
        value = getattr(fields, name, None)
        if value is not None and value not in neutral:
            raise bad(name, f"{name} is not supported; leave it out")
    return fields


def _refusal(kind: type[BaseModel], error: ValidationError) -> ApiError:
    """The first complaint, as one sentence about one field; of alternatives the one that got furthest."""
    every = error.errors(include_url=False, include_context=False, include_input=False)
    of_first = [complaint for complaint in every if complaint["loc"][:1] == every[0]["loc"][:1]]
    first = max(of_first, key=lambda complaint: len(_known(complaint["loc"])))
    known = _known(first["loc"])
    name = ".".join(known)
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON that can be read: {first['msg']}")
    if first["type"] == "extra_forbidden":
        near = difflib.get_close_matches(known[-1], kind.model_fields, n=1)
        hint = f"; did you mean {near[0]}?" if near and len(known) == 1 else ""
        return bad(name, f"the field {name[:200]} is not known{hint}")
    if not name:
        return ApiError(400, f"the body must be a JSON object: {first['msg']}")
    return bad(name, f"{name[:200]}: {first['msg'][:500]}")


def _known(place: tuple[int | str, ...]) -> list[str]:
    """Where a complaint is about; names of alternatives of a union are ours, not the client's."""
    return [str(part) for part in place if not _is_alternative(part)]


def _is_alternative(part: int | str) -> bool:
    return isinstance(part, str) and ("[" in part or part in _ALTERNATIVES)


_ALTERNATIVES = {"str", "NamedTool", "constrained-str"}
