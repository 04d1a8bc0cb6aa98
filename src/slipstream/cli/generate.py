"""`slipstream generate`: answer one prompt."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.flags import Decoding, Loading, ModelFlags, Models, Sampling, SamplingFlags
from slipstream.cli.session import open_session, say
from slipstream.cli.show import document, marks, print_json, print_piece, summary
from slipstream.core.options import EngineOptions, TargetOptions


def generate(
    prompt: str,
    /,
    *,
    raw: bool = False,
    no_draft: bool = False,
    json: Annotated[bool, Parameter(name="--json")] = False,
    models: Models = ModelFlags(),
    sampling: Sampling = SamplingFlags(),
    loading: Loading = TargetOptions(),
    decoding: Decoding = EngineOptions(),
) -> None:
    """Answer one prompt; the text goes to stdout as it appears.

    Args:
        prompt: the user's turn; `-` reads it from stdin.
        raw: continue the prompt as it is, without the chat template.
        no_draft: decode plainly, on the same engine.
        json: print one JSON document instead of the text.
    """
    text = sys.stdin.read() if prompt == "-" else prompt
    session = open_session(models, loading, decoding, no_draft=no_draft)
    stream = session.stream(text, sampling, raw=raw, draft=not no_draft)
    mark = marks()
    for piece in stream:
        if not json:
            print_piece(piece, mark)
    if json:
        print_json(document(stream.completion, session.exact(not no_draft)))
        return
    print()
    say(summary(stream.completion))
