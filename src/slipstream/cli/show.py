"""How results look: JSON documents, text with marked drafts, tables."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from slipstream.core.records import Completion, Piece

if TYPE_CHECKING:
    from slipstream.bench import Comparison
    from slipstream.decode import Report, RequestReport
    from slipstream.decode.lossless import Difference

_DRAFTED, _PLAIN_AGAIN = "\x1b[32;4m", "\x1b[0m"  # green and underlined: seen without colours too


def document(completion: Completion, exact: bool) -> dict[str, Any]:
    """The JSON document of one completion.

    Args:
        completion: what was decoded.
        exact: whether every token is the target's own choice.
    """
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "prompt_tokens": completion.prompt_tokens,
        "completion_tokens": completion.completion_tokens,
        "finish_reason": completion.finish_reason,
        "rounds": completion.rounds,
        "acceptance_length": completion.acceptance_length,
        "accepted_per_position": list(completion.accepted_per_position),
        "drafts_mean": completion.drafts_mean,
        "parked": completion.parked,
        "cached_tokens": completion.cached_tokens,
        "ttft_s": completion.ttft_s,
        "decode_s": completion.decode_s,
        "tokens_per_s": completion.tokens_per_s,
        "exact": exact,
    }


def print_json(data: Mapping[str, Any]) -> None:
    """Print one JSON document on stdout."""
    print(json.dumps(data, ensure_ascii=False, indent=2))


def print_piece(piece: Piece, mark: bool) -> None:
    """Print what a round added, at once.

    Args:
        piece: of a stream.
        mark: show accepted drafts in green and underlined.
    """
    for text, drafted in piece.spans if mark else ((piece.text, False),):
        sys.stdout.write(f"{_DRAFTED}{text}{_PLAIN_AGAIN}" if drafted else text)
    sys.stdout.flush()


def marks() -> bool:
    """Whether stdout is a terminal that shows marked text."""
    from rich.console import Console

    return Console().is_terminal


def summary(completion: Completion) -> str:
    """One line about speed, for stderr."""
    return (
        f"{completion.completion_tokens} tokens, {completion.tokens_per_s:.1f} tokens/s, "
        f"acceptance length {completion.acceptance_length:.2f}"
    )


def comparison_document(comparison: Comparison, exact: bool) -> dict[str, Any]:
    """The JSON document of a demo: both ways, the speed-up, whether the token ids are identical, and how many
    prompts' texts part at a tie.
    """
    return {
        "plain": _side(comparison.plain, exact=True),
        "drafted": _side(comparison.drafted, exact),
        "speedup": comparison.speedup,
        "identical": comparison.identical,
        "ties": sum(found is not None and found.is_tie for found in comparison.differences),
    }


def print_comparison(comparison: Comparison) -> None:
    """Print the demo's table on stdout."""
    from rich.console import Console
    from rich.table import Table

    from slipstream.bench import total_rate
    from slipstream.core.records import total_acceptance

    table = Table(title=f"{len(comparison.plain)} prompts, decoding only")
    for heading in ("", "tokens/s", "tokens per round", "tokens"):
        table.add_column(heading, justify="left" if not heading else "right")
    for name, side in (("plain", comparison.plain), ("drafted", comparison.drafted)):
        tokens = sum(item.completion_tokens for item in side)
        table.add_row(name, f"{total_rate(side):.1f}", f"{total_acceptance(side):.2f}", str(tokens))
    console = Console(highlight=False)
    console.print(table)
    console.print(f"speed-up: {comparison.speedup:.2f}x")
    console.print(f"same text: {_same(comparison)}")


def _same(comparison: Comparison) -> str:
    if comparison.identical:
        return "yes"
    if not comparison.same_up_to_ties:
        return "no"
    ties = [found for found in comparison.differences if found is not None]
    gap, bound = max((found.gap, found.bound) for found in ties)
    return (
        f"yes, up to {len(ties)} tie{'s' if len(ties) > 1 else ''}: two tokens equal up to rounding "
        f"(gap {gap:.2g}, rounding explains up to {bound:.2g}), and the text goes on from the other one"
    )


def check_line(request: RequestReport) -> str:
    """One prompt's comparison in a line."""
    same = "equal" if request.same_shape is None else f"DIFFERENT at token {request.same_shape.position}"
    if request.one_row is None:
        alone = "equal"
    else:
        kind = "tie" if request.one_row.is_tie else "DIFFERENT"
        if request.one_row.at_filter:
            kind = "tie at a filter's border"
        alone = (
            f"{kind} at token {request.one_row.position} "
            f"(gap {request.one_row.gap:.2g}, rounding explains up to {request.one_row.bound:.2g})"
        )
    return f"{request.tokens} tokens; same shapes: {same}; one row: {alone}"


def check_document(report: Report, prompts: Sequence[str]) -> dict[str, Any]:
    """The JSON document of a check: `exact` is its verdict, a difference is null where texts are equal."""
    return {
        "exact": report.exact,
        "ties": report.ties,
        "dtype": report.dtype,
        "block_size": report.block_size,
        "graphs": report.graphs,
        "requests": [
            {
                "prompt": prompt,
                "tokens": request.tokens,
                "acceptance_length": request.acceptance_length,
                "same_shape": _difference(request.same_shape),
                "one_row": _difference(request.one_row),
                "exact": request.exact,
            }
            for prompt, request in zip(prompts, report.requests, strict=True)
        ],
    }


def _difference(found: Difference | None) -> dict[str, Any] | None:
    if found is None:
        return None
    gap = found.gap if math.isfinite(found.gap) else None  # JSON has no infinity
    return {**asdict(found), "gap": gap, "is_tie": found.is_tie}


def print_check(report: Report) -> None:
    """Print the losslessness report on stdout."""
    total = len(report.requests)
    same = sum(request.same_shape is None for request in report.requests)
    alone = sum(request.one_row is None for request in report.requests)
    print(f"{report.dtype}, blocks of {report.block_size}, {sum(r.tokens for r in report.requests)} tokens")
    print(f"same shapes: {same} of {total} prompts equal")
    print(
        f"one row:     {alone} of {total} prompts equal, {report.ties} apart at a tie of the two best tokens"
    )
    print(report.graphs)
    print(
        "verdict:     drafting changes nothing" if report.exact else "verdict:     DRAFTING CHANGES THE TEXT"
    )


def _side(completions: Sequence[Completion], exact: bool) -> dict[str, Any]:
    from slipstream.bench import total_rate
    from slipstream.core.records import total_acceptance

    return {
        "tokens_per_s": total_rate(completions),
        "acceptance_length": total_acceptance(completions),
        "completion_tokens": sum(item.completion_tokens for item in completions),
        "rounds": sum(item.rounds for item in completions),
        "decode_s": sum(item.decode_s for item in completions),
        "completions": [document(item, exact) for item in completions],
    }
