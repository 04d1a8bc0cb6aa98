"""First words of user turns, so that a target's own questions are of many kinds.

Left to itself a small model asks short questions of its favourite kind. Given "Summarize the following text:"
or a line of code, it writes the text or the code itself and then answers. The words here are of our own
writing, and none of them is a prompt of the bundled workloads.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from functools import cache

from slipstream.data.bundled import packaged

# An end of a sentence or of a line, with closing quotes and brackets.
_ENDS = re.compile(r"[.!?。！？][\"'”’)\]]*(?=\s|$)|\n")


@dataclass(frozen=True)
class Opening:
    """A user turn that the target writes the middle of.

    Attributes:
        kind: such as `code` or `summarise`.
        begin: its first words, without a space after them: most tokenizers join it to the next word.
        end: its last words, after what the target wrote.
        later: of a turn after an answer, not of a first one.
    """

    kind: str
    begin: str
    end: str = ""
    later: bool = False

    def filled(self, text: str, whole: bool) -> str | None:
        """The turn with the target's words in the middle.

        Args:
            text: what the target wrote.
            whole: it came to its end; otherwise it is cut after its last sentence or line.

        Returns:
            The turn; None where no whole sentence was written.
        """
        if not whole:
            ends = [found.end() for found in _ENDS.finditer(text)]
            text = text[: ends[-1]] if ends else ""
        if not text.strip():
            return None
        return (self.begin + (text.rstrip() if self.end else text) + self.end).strip()


@cache
def openings() -> tuple[Opening, ...]:
    """All that come with the package."""
    return tuple(Opening(**record) for record in packaged("openings"))


def draw_opening(draw: random.Random, share: float, later: bool) -> Opening | None:
    """An opening of a first or of a later turn, every kind equally often; None in the other cases.

    Args:
        draw: decides.
        share: how often there is one, 0 to 1.
        later: of a turn after an answer.
    """
    if draw.random() >= share:
        return None
    of_turn = [opening for opening in openings() if opening.later == later]
    kind = draw.choice(sorted({opening.kind for opening in of_turn}))
    return draw.choice([opening for opening in of_turn if opening.kind == kind])
