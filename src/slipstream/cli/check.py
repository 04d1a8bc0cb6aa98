"""`slipstream check`: prove on real prompts that drafting changes nothing."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.flags import Decoding, Loading, ModelFlags, Models, Sampling, SamplingFlags
from slipstream.cli.session import need_drafter, open_session, say
from slipstream.cli.show import check_document, check_line, print_check, print_json
from slipstream.core.options import EngineOptions, TargetOptions


def check(
    *prompts: str,
    raw: bool = False,
    json: Annotated[bool, Parameter(name="--json")] = False,
    models: Models = ModelFlags(),
    sampling: Sampling = SamplingFlags(max_tokens=64),
    loading: Loading = TargetOptions(),
    decoding: Decoding = EngineOptions(),
) -> int:
    """Compare drafted with plain decoding and print where they differ; a real difference exits with 1.

    Args:
        prompts: to decode; four of our own when none are given.
        raw: continue the prompts as they are, without the chat template.
        json: print one JSON document.
    """
    session = open_session(models, loading, decoding)
    need_drafter(session)
    from slipstream.bench import DEMO_PROMPTS

    chosen = prompts or DEMO_PROMPTS
    report = session.check(
        chosen,
        sampling,
        raw=raw,
        report=lambda number, request: say(f"[{number + 1}/{len(chosen)}] {check_line(request)}"),
    )
    if json:
        print_json(check_document(report, chosen))
    else:
        print_check(report)
    return 0 if report.exact else 1
