"""From a profile of acceptance to a length and back.

A profile gives, for slot k, how often draft k is kept when all before it were. The length is what a round
emits on average: 1 + p1 + p1 p2 + ... (Leviathan et al., arXiv 2211.17192, section 3.1, a rate per slot).
"""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.core.errors import InputError


def length(profile: Sequence[float]) -> float:
    """Tokens per round, the target's own included."""
    total = reach = 1.0
    for share in profile:
        reach *= share
        total += reach
    return total


def geometric(acceptance_length: float, drafts: int) -> tuple[float, ...]:
    """The profile with one rate for all slots that has this length.

    Args:
        acceptance_length: tokens per round with so many drafts.
        drafts: K.

    Raises:
        InputError: no profile of so many drafts has this length.
    """
    if not 1 <= acceptance_length <= drafts + 1:
        raise InputError(
            f"{drafts} drafts give an acceptance length from 1 to {drafts + 1}, not {acceptance_length:g}"
        )
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if length([middle] * drafts) < acceptance_length else (low, middle)
    return (high,) * drafts


def check_profile(profile: Sequence[float]) -> tuple[float, ...]:
    """A profile as given, if it is one.

    Raises:
        InputError: a value is no share, or there is none.
    """
    if not profile or not all(0 <= share <= 1 for share in profile):
        raise InputError("an acceptance profile is a list of shares from 0 to 1, one per draft")
    return tuple(profile)
