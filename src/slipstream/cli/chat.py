"""`slipstream chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slipstream.cli.flags import Decoding, Loading, ModelFlags, Models, Sampling, SamplingFlags
from slipstream.cli.session import open_session, say
from slipstream.cli.show import marks, print_piece, summary
from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, TargetOptions

#: Tokens of the conversation that no later turn reads again.
_KEPT = 16384

if TYPE_CHECKING:
    from slipstream.api import Session


def chat(
    *,
    no_draft: bool = False,
    models: Models = ModelFlags(),
    sampling: Sampling = SamplingFlags(),
    loading: Loading = TargetOptions(),
    decoding: Decoding = EngineOptions(prefix_tokens=_KEPT),
) -> None:
    """Talk with the target; `/reset` starts anew, `/quit` or end of input leaves.

    Args:
        no_draft: decode plainly, on the same engine.
    """
    session = open_session(models, loading, decoding, no_draft=no_draft)
    messages: list[dict[str, str]] = []
    while (line := _read_line()) is not None:
        if line == "/quit":
            return
        if line == "/reset":
            messages.clear()
            say("a new conversation")
        elif line:
            _answer(session, messages, line, sampling, draft=not no_draft)


def _read_line() -> str | None:
    try:
        return input("> " if sys.stdin.isatty() and sys.stdout.isatty() else "").strip()
    except EOFError:
        return None


def _answer(
    session: Session, messages: list[dict[str, str]], line: str, sampling: SamplingFlags, draft: bool
) -> None:
    """One turn; messages grow by it. Ctrl-C ends the answer early and keeps what was said."""
    turn = [*messages, {"role": "user", "content": line}]
    said: list[str] = []
    try:
        stream = session.stream(turn, sampling, draft=draft)
        try:
            mark = marks()
            for piece in stream:
                print_piece(piece, mark)
                said.append(piece.text)
            print()
            say(summary(stream.completion))
        except KeyboardInterrupt:
            stream.close()
            print()
    except InputError as error:
        say(f"slipstream: {error}; /reset starts a new conversation")
        return
    messages[:] = [*turn, {"role": "assistant", "content": "".join(said)}]
