"""The flags that commands share; their defaults and help come from the option dataclasses in `core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from cyclopts import Parameter, Token

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions, TargetOptions


def read_biases(_type: Any, tokens: Sequence[Token]) -> dict[int, float]:
    """Turn `ID:VALUE` words into a mapping.

    Raises:
        InputError: a word has another form.
    """
    biases = {}
    for token in tokens:
        name, _, value = token.value.partition(":")
        try:
            biases[int(name)] = float(value)
        except ValueError as error:
            raise InputError(f"--logit-bias takes ID:VALUE such as 42:-1.5, not {token.value!r}") from error
    return biases


# Words on the command line, a mapping once read.
Biases = Annotated[tuple[str, ...], Parameter(converter=read_biases, n_tokens=1, metavar="ID:VALUE")]


@dataclass(frozen=True)
class SamplingFlags(SamplingOptions):
    """SamplingOptions with the form that its one mapping takes on a command line."""

    logit_bias: Biases = field(default_factory=dict)  # type: ignore[assignment, arg-type]


@dataclass(frozen=True)
class ModelFlags:
    """Which models decode.

    Attributes:
        target: the model that speaks: smollm2 (bundled), a hub id, a folder or a GGUF file.
        draft: the drafter: auto (the bundled one, where the target has one), a folder or a hub id.
    """

    target: Annotated[str, Parameter(alias="-t")] = "smollm2"
    draft: Annotated[str, Parameter(alias="-d")] = "auto"


Models = Annotated[ModelFlags, Parameter(name="*", group="Models")]
Loading = Annotated[TargetOptions, Parameter(name="*", group="Models")]
Sampling = Annotated[SamplingFlags, Parameter(name="*", group="Sampling")]
Decoding = Annotated[EngineOptions, Parameter(name="*", group="Engine")]
