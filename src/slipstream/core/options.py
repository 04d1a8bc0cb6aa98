"""Every option and its default, defined once: flags, help and Python calls all read them from here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from slipstream.core.errors import InputError

Acceptor = Literal["match", "reject"]
DraftChoice = Literal["coupled", "argmax"]


@dataclass(frozen=True)
class SamplingOptions:
    """How one request is decoded; every field has its OpenAI / vLLM meaning.

    Attributes:
        temperature: 0 is greedy; above 0 logits are divided by it before the filters.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches it.
        min_p: drop tokens less likely than min_p times the most likely one.
        repetition_penalty: divides positive (multiplies negative) logits of tokens in prompt or output.
        presence_penalty: subtracted once from tokens already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: token id -> value added to its logit.
        seed: of the sampling noise; with it the text is a function of the request alone.
        max_tokens: most tokens to emit.
        min_tokens: no stop token can be chosen before so many tokens.
        stop_token_ids: extra ids that end the text (kept in token_ids, not in text).
        stop: strings that end the text (not part of it).
        ignore_eos: the model's own end tokens do not end the text.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            InputError: names the field, its value and its range.
        """
        checks = (
            ("temperature", self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k >= 0, "at least 0 (0 keeps all)"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "at least 0 and below 1"),
            ("repetition_penalty", self.repetition_penalty > 0, "above 0"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, "from 0 to max_tokens"),
            ("stop", all(self.stop), "strings of at least one character"),
        )
        for name, good, range_ in checks:
            if not good:
                raise InputError(f"{name} must be {range_}, not {getattr(self, name)!r}")

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens said so far."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass(frozen=True)
class EngineOptions:
    """What is bound when an engine is built.

    Attributes:
        block_size: slots of a block, anchor included; 0 takes the drafter's own, 1 decodes plainly.
        acceptor: `match` keeps drafts that equal the target's choice; `reject` is p/q rejection sampling.
        drafts: `coupled` drafts with the target's noise, `argmax` drafts without noise.
        max_rows: requests decoded side by side.
        max_context: longest prompt plus output in tokens; 0 takes the target's own limit.
        prefill_chunk: prompt tokens per target pass.
    """

    block_size: int = 0
    acceptor: Acceptor = "match"
    drafts: DraftChoice = "coupled"
    max_rows: int = 8
    max_context: int = 0
    prefill_chunk: int = 512

    def __post_init__(self) -> None:
        """Refuse values outside their range.

        Raises:
            InputError: names the field and its range.
        """
        for name, least in (("block_size", 0), ("max_rows", 1), ("max_context", 0)):
            if getattr(self, name) < least:
                raise InputError(f"{name} must be at least {least}, not {getattr(self, name)}")
        if self.prefill_chunk < 1:
            raise InputError(f"prefill_chunk must be at least 1, not {self.prefill_chunk}")


@dataclass(frozen=True)
class TargetOptions:
    """How a target is loaded.

    Attributes:
        dtype: `auto`, `float32`, `bfloat16` or `float16`; auto is bfloat16 where the hardware multiplies it
            natively and float32 elsewhere.
        device: `auto`, `cpu`, `cuda`, `cuda:N` or `mps`.
        trust_remote_code: let the hub repository run its own modelling code.
    """

    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
