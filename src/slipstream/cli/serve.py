"""`slipstream serve`: an OpenAI-compatible server."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.flags import Decoding, Loading, ModelFlags, Models
from slipstream.cli.session import open_session, say
from slipstream.core.command_options import ServeOptions
from slipstream.core.options import EngineOptions, TargetOptions

Serving = Annotated[ServeOptions, Parameter(name="*", group="Server")]


def serve(
    *,
    no_draft: bool = False,
    models: Models = ModelFlags(),
    serving: Serving = ServeOptions(),
    loading: Loading = TargetOptions(),
    decoding: Decoding = EngineOptions(),
) -> None:
    """Serve the target over HTTP, as OpenAI's API has it; Ctrl-C or SIGTERM stops it.

    Args:
        no_draft: decode plainly.
    """
    from slipstream.serve import serve as run

    session = open_session(models, loading, decoding, no_draft=no_draft)
    run(session, serving, lambda url: say(f"serving {session.target.info.name} at {url}/v1, a page at {url}"))
