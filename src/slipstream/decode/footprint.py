"""What a round holds at its peak: logits and what is made of them, by what requests ask for.

Arithmetic: nothing is allocated or measured here. States, keys and values are counted elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.core.records import Request

#: Peaks of single steps beside the logits that they are given, in float32 tensors of the size of logits, as
#: PyTorch's own operations allocate (tests/decode/test_footprint.py). Noise is made of 64-bit numbers.
_DRAW, _PENALISE, _REJECT, _GUIDE, _REPORT, _LEAST = 7.25, 9.0, 5.0, 1.5, 1.25, 0.5


@dataclass(frozen=True)
class Demands:
    """What the rows of a round may ask for, as far as it takes memory.

    Attributes:
        draws: from all tokens, so that all of them need noise; compiled kernels take less.
        penalises: repeated tokens.
        guides: tokens by grammars.
        changes: the logits, by bias, penalties, a ban on ends or a grammar.
        reports: log-probabilities.
    """

    draws: bool
    penalises: bool
    guides: bool
    changes: bool
    reports: bool

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Demands:
        """Those of some requests together."""
        options = [request.sampling for request in requests]
        penalises = any(o.has_penalties for o in options)
        guides = any(request.grammar is not None for request in requests)
        return cls(
            any(o.temperature > 0 and not o.top_k for o in options),
            penalises,
            guides,
            penalises or guides or any(o.logit_bias or o.min_tokens for o in options),
            any(request.logprobs is not None for request in requests),
        )

    def round_bytes(self, rows: int, block_size: int, vocab_size: int, acceptor: str) -> int:
        """Most bytes that a round holds at once: logits of drafts and target, and its largest step.

        Args:
            rows: B.
            block_size: T.
            vocab_size: V.
            acceptor: `match` or `reject`.
        """
        steps = (
            *(self.draws * _DRAW, self.penalises * _PENALISE, self.guides * _GUIDE),
            *((acceptor == "reject") * _REJECT, self.reports * _REPORT, _LEAST),
        )
        tensors = 1 + self.changes + max(steps)
        return int(rows * vocab_size * 4 * (block_size - 1 + block_size * tensors))


#: Requests that nobody knows yet.
ANYTHING = Demands(True, True, True, True, True)
