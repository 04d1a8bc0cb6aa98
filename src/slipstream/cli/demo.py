"""`slipstream demo`: the same prompts plain and drafted, side by side in numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from slipstream.cli.flags import Decoding, Loading, ModelFlags, Models, Sampling, SamplingFlags
from slipstream.cli.session import need_drafter, open_session, say
from slipstream.cli.show import comparison_document, marks, print_comparison, print_json, print_piece
from slipstream.core.options import EngineOptions, TargetOptions

if TYPE_CHECKING:
    from slipstream.bench import Observer
    from slipstream.core.records import Piece


def demo(
    *prompts: str,
    json: Annotated[bool, Parameter(name="--json")] = False,
    models: Models = ModelFlags(),
    sampling: Sampling = SamplingFlags(max_tokens=128),
    loading: Loading = TargetOptions(),
    decoding: Decoding = EngineOptions(),
) -> int:
    """Watch the bundled model speak plainly and with drafts, and see the difference in numbers.

    Accepted drafts are green and underlined. The exit status is 1 if the two texts differ by more than a tie
    of two tokens that rounding may decide.

    Args:
        prompts: to answer; four of our own when none are given.
        json: print one JSON document instead of texts and table.
    """
    session = open_session(models, loading, decoding)
    need_drafter(session)
    from slipstream.bench import DEMO_PROMPTS, compare

    say("warming up")
    chosen = prompts or DEMO_PROMPTS
    comparison = compare(session, chosen, sampling, observer=None if json else _show(chosen))
    if json:
        print_json(comparison_document(comparison, session.exact()))
    else:
        print_comparison(comparison)
    return 0 if comparison.same_up_to_ties or not session.exact() else 1


def _show(prompts: tuple[str, ...]) -> Observer:
    """An observer that prints each answer under its heading."""
    mark = marks()
    shown: set[tuple[int, bool]] = set()

    def observe(number: int, draft: bool, piece: Piece) -> None:
        if (number, draft) not in shown:
            shown.add((number, draft))
            heading = f"\n[{number + 1}/{len(prompts)}] {prompts[number]}\n" if not draft else ""
            print(f"{heading}--- {'drafted' if draft else 'plain'} ---")
        print_piece(piece, mark)
        if piece.finish_reason is not None:
            print()

    return observe
