"""Options of commands that look at drafters, predict, measure or serve; how they decode: see `options`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from slipstream.core.errors import InputError


@dataclass(frozen=True)
class InspectOptions:
    """How far `inspect` looks at a pair.

    Attributes:
        answer_tokens: of the target's own greedy answer to each prompt, which is what is scored.
        anchors: blocks scored per answer, evenly spread.
    """

    answer_tokens: int = 128
    anchors: int = 128

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            InputError: names the field and its range.
        """
        for name in ("answer_tokens", "anchors"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, not {getattr(self, name)}")


@dataclass(frozen=True)
class PlanOptions:
    """What a plan is made for.

    Attributes:
        gpu: the card: H200, B200, RTX 4090, ..., or `cpu`, which is measured now.
        tp: cards that the weights are split over.
        precision: of the target's layers; `auto` takes what its config says, else bf16.
        context: tokens before a round, per request.
        concurrency: requests side by side, such as 1,4,8.
        block_size: slots of a block, anchor included; 0 takes the drafter's own, or 16.
        drafter_layers: of a drafter that does not exist yet, where none is named.
        acceptance_length: tokens per round, one rate for all slots.
        acceptance_profile: how often draft k is kept when all before it were: 0.8,0.7,... or a JSON file with
            such a list, or with `accepted_per_position` and `rounds` as `generate --json` has them.
        execution: `graph` (captured or compiled passes) or `eager`.
        overhead_ms: what a drafted round costs beyond its passes; negative takes the execution's own.
    """

    gpu: str = "H200"
    tp: int = 1
    precision: Literal["auto", "bf16", "fp8", "int4"] = "auto"
    context: int = 1500
    concurrency: str = "1,4,8,16,32"
    block_size: int = 0
    drafter_layers: int = 5
    acceptance_length: float = 0.0
    acceptance_profile: str = ""
    execution: Literal["graph", "eager"] = "graph"
    overhead_ms: float = -1.0


@dataclass(frozen=True)
class ServeOptions:
    """How a server treats those who call it; how it decodes stands in `EngineOptions`.

    Attributes:
        host: address to listen on; the default is reached from this machine only.
        port: to listen on; 0 takes a free one.
        queue: most texts that wait for a row; further requests are answered with 429.
        timeout: seconds that a request may take in all; 0 sets no limit.
        grace: seconds that running requests get to finish when the server is told to stop.
        api_key: bearer token that calls under /v1 must bring; empty asks for none.
        served_model_name: name that clients ask for; empty takes the target's own.
        max_body: most bytes of a request.
        max_choices: most texts that one request may ask for: prompts times n.
        cors_origin: origins whose pages may call the server from a browser; none by default.
        log_prompts: write prompts and answers into the log as well.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    queue: int = 64
    timeout: float = 600.0
    grace: float = 30.0
    api_key: str = field(default="", repr=False)
    served_model_name: str = ""
    max_body: int = 4 * 1024 * 1024
    max_choices: int = 32
    cors_origin: tuple[str, ...] = ()
    log_prompts: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            InputError: names the field and its range.
        """
        least = {"queue": 0, "timeout": 0, "grace": 0, "max_body": 1, "max_choices": 1}
        for name, value in least.items():
            if not getattr(self, name) >= value:
                raise InputError(f"{name} must be at least {value}, not {getattr(self, name)}")
        if not 0 <= self.port < 65536:
            raise InputError(f"port must be from 0 to 65535, not {self.port}")


@dataclass(frozen=True)
class BenchOptions:
    """What is measured.

    Attributes:
        workload: names with commas: chat, reasoning, code, summarise, translation, extraction, long,
            multiturn (bundled), gsm8k, math500, humaneval, mbpp, mt-bench, spec-bench, speed-bench (from
            the hub), or JSONL files of prompts or recorded chats.
        prompts: most of each workload; 0 takes all.
        systems: names with commas: plain, drafted, lookup, transformers.
        repeats: of every request.
        concurrency: users at a time, with commas; 1 is always measured.
        rate: for users above 1, requests per second that arrive by chance (open load); 0 lets every user
            ask again as soon as they have their answer (closed load).
        seed: of orders and arrivals.
        warm_up: every system first answers prompts of no workload, a short one and one as long as the
            longest; without it first calls are measured, and marked.
    """

    workload: str = "chat,reasoning,code"
    prompts: int = 20
    systems: str = "plain,drafted"
    repeats: int = 1
    concurrency: str = "1"
    rate: float = 0.0
    seed: int = 0
    warm_up: bool = True

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            InputError: names the field and its range.
        """
        for name, least in (("prompts", 0), ("repeats", 1), ("rate", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if not all(word.strip().isdigit() and int(word) for word in self.concurrency.split(",")):
            raise InputError(f"concurrency is numbers of users such as 1,4,8, not {self.concurrency!r}")

    @property
    def users(self) -> tuple[int, ...]:
        """Numbers of users above 1, ascending."""
        return tuple(sorted({int(word) for word in self.concurrency.split(",")} - {1}))


def split_names(names: str) -> tuple[str, ...]:
    """Words between commas, each once, in their order."""
    return tuple(dict.fromkeys(word.strip() for word in names.split(",") if word.strip()))
