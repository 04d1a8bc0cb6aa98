"""The errors a user may see. Each message is one clear sentence that says what is wrong and what to do."""

from __future__ import annotations


class SlipstreamError(Exception):
    """Base of every error that Slipstream raises on purpose; the command line prints it without a trace."""


class InputError(SlipstreamError):
    """A request, an option or a file from the user cannot be used as it is."""


class TargetError(SlipstreamError):
    """A target model cannot be loaded or cannot be decoded speculatively."""


class CheckpointError(SlipstreamError):
    """A drafter checkpoint is malformed or does not fit its target."""


class MissingExtraError(SlipstreamError):
    """An optional package is not installed.

    Args:
        package: name of the package that could not be imported.
        extra: the extra of Slipstream that brings it.
    """

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(f"{package} is not installed; install it with: pip install 'slipstream[{extra}]'")


class GrammarError(SlipstreamError):
    """A grammar cannot be followed: its parser gave up."""


class TrainingError(SlipstreamError):
    """A training run went wrong by itself: its loss is no longer a number."""
