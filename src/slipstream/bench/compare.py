"""The same prompts decoded plainly and with drafts, in one process, one after the other.

A quick look for `slipstream demo`, not a benchmark: one pass per prompt, no confidence interval.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from slipstream.api import Prompt, Session
from slipstream.core.options import SamplingOptions
from slipstream.core.records import Completion, Piece
from slipstream.decode.lossless import Difference

Observer = Callable[[int, bool, Piece], None]
"""Called with (number of the prompt, whether drafts are on, piece) while the text appears."""

DEMO_PROMPTS: Final = (
    "Explain in simple words why the sky is blue.",
    "List ten things to pack for a weekend of hiking, each with a short reason.",
    "I'm planning a birthday party for a friend. Can you help me with some ideas?",
    "What are some good habits for staying healthy?",
)
WARM_UP_TOKENS: Final = 16


@dataclass(frozen=True)
class Comparison:
    """What both ways of decoding gave for the same prompts.

    Attributes:
        plain: completions without drafts, in the order of the prompts.
        drafted: completions with drafts.
        differences: where the texts of a prompt part; None where they are equal.
    """

    plain: tuple[Completion, ...]
    drafted: tuple[Completion, ...]
    differences: tuple[Difference | None, ...]

    @property
    def identical(self) -> bool:
        """Whether every prompt got the same token ids both ways."""
        return not any(self.differences)

    @property
    def same_up_to_ties(self) -> bool:
        """Whether texts part only where two tokens are equal up to rounding, if at all."""
        return all(difference is None or difference.is_tie for difference in self.differences)

    @property
    def speedup(self) -> float:
        """Drafted over plain decode-only rate; 0.0 where nothing was decoded."""
        plain = total_rate(self.plain)
        return total_rate(self.drafted) / plain if plain else 0.0


def compare(
    session: Session,
    prompts: Sequence[Prompt],
    sampling: SamplingOptions,
    *,
    raw: bool = False,
    observer: Observer | None = None,
) -> Comparison:
    """Decode every prompt plainly, then with drafts, after a warm-up of both.

    Args:
        session: with a drafter.
        prompts: to answer, at least one.
        sampling: the same for both ways.
        raw: continue texts as they are, without the chat template.
        observer: sees every piece as it appears.
    """
    for draft in (False, True):  # neither side may pay for first-call costs alone
        session.generate(prompts[0], sampling.at_most(WARM_UP_TOKENS), raw=raw, draft=draft)
    done: dict[bool, list[Completion]] = {False: [], True: []}
    for number, prompt in enumerate(prompts):
        for draft in (False, True):
            stream = session.stream(prompt, sampling, raw=raw, draft=draft)
            for piece in stream:
                if observer is not None:
                    observer(number, draft, piece)
            done[draft].append(stream.completion)
    differences = [
        session.difference(prompt, sampling, drafted, plain, raw=raw)
        for prompt, plain, drafted in zip(prompts, done[False], done[True], strict=True)
    ]
    return Comparison(tuple(done[False]), tuple(done[True]), tuple(differences))


def total_rate(completions: Sequence[Completion]) -> float:
    """Tokens per second of decoding, each completion's first token left out; 0.0 without time."""
    seconds = sum(item.decode_s for item in completions)
    return sum(item.completion_tokens - 1 for item in completions) / seconds if seconds > 0 else 0.0
