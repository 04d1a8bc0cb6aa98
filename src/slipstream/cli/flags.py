"""The flags that commands share; their defaults and help come from the option dataclasses in `core`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, SamplingOptions, TargetOptions


def read_biases(words: Sequence[str]) -> dict[int, float]:
    """Turn `ID:VALUE` words into a mapping.

    Raises:
        InputError: a word has another form.
    """
    biases = {}
    for word in words:
        name, _, value = word.partition(":")
        try:
            biases[int(name)] = float(value)
        except ValueError as error:
            raise InputError(f"--logit-bias takes ID:VALUE such as 42:-1.5, not {word!r}") from error
    return biases


# Words on the command line; a mapping once the flags are read.
Biases = Annotated[tuple[str, ...], Parameter(n_tokens=1, metavar="ID:VALUE")]


@dataclass(frozen=True)
class SamplingFlags(SamplingOptions):
    """SamplingOptions with the form that its one mapping takes on a command line."""

    logit_bias: Biases = ()  # type: ignore[assignment]

    def __post_init__(self) -> None:
        """Read the words, then check as always.

        Raises:
            InputError: a word cannot be read, or a value is out of range.
        """
        if isinstance(self.logit_bias, tuple):
            object.__setattr__(self, "logit_bias", read_biases(self.logit_bias))
        super().__post_init__()


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
