"""From flags to a loaded session, with progress on stderr."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from slipstream.cli.flags import ModelFlags
from slipstream.core.errors import InputError
from slipstream.core.options import EngineOptions, TargetOptions

if TYPE_CHECKING:
    from slipstream.api import Session


def say(line: str) -> None:
    """Write a line for people to stderr."""
    print(line, file=sys.stderr, flush=True)


def open_session(
    models: ModelFlags, loading: TargetOptions, decoding: EngineOptions, *, no_draft: bool = False
) -> Session:
    """Load what the flags name; the import of torch waits until here, so that --help is quick."""
    from transformers.utils import logging

    from slipstream.api import load

    logging.set_verbosity_error()  # its notes are for programmers; ours say what a user needs
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    draft = None if no_draft else models.draft
    session = load(models.target, draft, target_options=loading, engine_options=decoding, progress=say)
    if session.note and not no_draft:
        say(f"note: {session.note}")
    return session


def need_drafter(session: Session) -> None:
    """Refuse a session that cannot draft.

    Raises:
        InputError: it has no drafter.
    """
    if session.drafter is None:
        raise InputError(
            f"this command compares with and without drafts, but {session.note}; name a drafter with -d"
        )
