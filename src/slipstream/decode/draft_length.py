"""How many drafts a round should have, zero included: from what rounds cost and how far drafts are right.

Tokens per second of a round with K drafts are sum over rows of (1 + sum_k prod_{j<=k} p_j) / seconds(rows, K)
(Leviathan et al., arXiv 2211.17192, section 3.3, with a rate per slot and row). Both sides are learned while
decoding. The choice changes speed only: what is said does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from slipstream.decode.round_cost import RoundCosts

#: Share of a count that is kept when the next round is counted: of one request, and of all of them.
_OWN_MEMORY, _COMMON_MEMORY = 0.98, 0.995
#: Rounds that the common rates count for in a request's own.
_PRIOR = 10.0
#: A change must promise so much more.
_HYSTERESIS = 1.02
#: Not drafting counts so much more: what drafts are worth is a guess, and a wrong one must not cost.
_CAUTION = 1.03
#: Shares of the time that looks may cost: at more drafts than pay as far as is known, and at none.
_LOOK_UP, _LOOK_DOWN = 0.012, 0.002
#: Rounds that not drafting holds while the same requests decode: deciding takes a fiftieth of a short round.
_HOLD = 8
#: Tokens of a request that are counted on: it may end before its limit.
_AHEAD = 64
#: Weight of a longer time of reading what waits; a shorter one replaces it.
_NEW_READING = 0.3
#: Looks of a kind are at least so many rounds apart; in vain, they double what the next must have saved up,
#: so often at most.
_LEAST_ROUNDS, _MOST_DOUBLINGS = 16, 2.0


@dataclass
class _Rates:
    """Decayed counts per slot: how often a draft was looked at, and how often it was right."""

    tries: NDArray[np.float64]
    hits: NDArray[np.float64]

    def count(self, drafts: int, accepted: int, memory: float) -> None:
        """One round: drafts 1..accepted were right, the next one wrong, later ones unknown."""
        seen = min(drafts, accepted + 1)
        self.tries[:seen] = self.tries[:seen] * memory + 1
        self.hits[:seen] *= memory
        self.hits[:accepted] += 1


@dataclass
class _Looks:
    """What looks at another length may cost: a share of the time, saved up round by round.

    Attributes:
        share: of the time.
        saved: seconds.
        rounds: since the last look.
        vain: doublings of what a look must have saved up.
    """

    share: float
    saved: float = 0.0
    rounds: int = 0
    vain: float = 0.0

    def afford(self, cost: float) -> bool:
        """Whether a look of this cost, in seconds, is due."""
        return self.rounds > _LEAST_ROUNDS and self.saved > cost * 2**self.vain

    def take(self) -> None:
        """It is taken, in vain until it changes something."""
        self.saved, self.rounds, self.vain = 0.0, 0, min(self.vain + 1, _MOST_DOUBLINGS)


@dataclass
class DraftLength:
    """Chooses the number of drafts of every round of a batch.

    Attributes:
        most: drafts that the drafter can make (K).
        fixed: always so many; None decides by what pays.
        costs: what rounds take.
    """

    most: int
    fixed: int | None = None
    costs: RoundCosts = field(default_factory=RoundCosts)
    _own: dict[int, _Rates] = field(default_factory=dict)
    _current: int = 0
    _readings: int = 0
    _per_token: float = 0.0
    _again: bool = False
    _held: int = 0
    _held_for: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Begin with rates that make a drafter worth trying."""
        self._common = _Rates(np.ones(self.most), np.full(self.most, 0.6))
        self._current = self.most
        steps = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
        # Few, so that each is timed often.
        self.sizes = (*(size for size in steps if size < self.most), self.most)
        # Nothing is known yet: the first look comes early.
        self._up, self._down = _Looks(_LOOK_UP, vain=-1.0), _Looks(_LOOK_DOWN)

    def choose(self, requests: Sequence[int], left: Iterable[int] = (), waiting: int = 0) -> int:
        """Drafts of the next round.

        Args:
            requests: numbers of those that decode.
            left: most tokens that each may still say.
            waiting: tokens that the drafter has to read before it can draft.
        """
        if self.fixed is not None:
            return self.fixed
        if self._held and not self._again and list(requests) == self._held_for:
            self._held -= 1
            return 0
        ahead = sum(min(_AHEAD, tokens) for tokens in left)
        self._held, look = 0, self._decide(requests, ahead, waiting * self._per_token)
        if look is not None:
            return look
        if self._current == 0:
            self._held, self._held_for = _HOLD - 1, list(requests)
        return self._current

    def _decide(self, requests: Sequence[int], ahead: int, owed: float) -> int | None:
        """Choose what holds for now; drafts of the next round alone where another size is looked at.

        To draft again costs `owed` seconds first, and must save them over the tokens ahead.
        """
        rows, tokens = len(requests), self._expected(requests)
        # Somebody new may be easier to draft for; one of many changes little.
        fresh = sum(request not in self._own for request in requests)
        self._up.vain -= min(max(0.0, self._up.vain), _MOST_DOUBLINGS * (fresh / rows) ** 2)
        unseen = self._first_look(rows, tokens)
        if unseen is not None:
            return unseen
        cost = dict(zip(self.sizes, self.costs.estimate(rows, self.sizes), strict=True))
        value = {size: tokens[size] / cost[size] * (1 if size else _CAUTION) for size in self.sizes}
        best = max(value, key=value.__getitem__)
        gain = value[best] > value[self._current] * _HYSTERESIS
        if gain and (self._current or ahead * (1 / value[0] - 1 / value[best]) >= owed):
            self._current, self._up.vain = best, min(self._up.vain, 0.0)
        current = self._current
        if current == 0:
            up = max(self.sizes[1:], key=value.__getitem__)
            if self._again or self._up.afford(cost[up] - cost[0] + owed):
                self._up.take()
                return up
            return None
        # What a look takes, less what its tokens would take otherwise.
        if self._down.afford(cost[0] - tokens[0] / value[current]):
            self._down.take()
            return 0
        # How good the last drafts are is not seen while they are not made.
        if current < self.most and self._up.afford(cost[self.most] - cost[current]):
            self._up.take()
            return self.most
        return None

    def note(self, accepted: Mapping[int, int], drafts: int, seconds: float) -> None:
        """What a round came to.

        Args:
            accepted: right drafts by request.
            drafts: that each had.
            seconds: that it took.
        """
        self.costs.note(len(accepted), drafts, seconds)
        for request, count in accepted.items():
            own = self._own.get(request)
            if own is None:
                own = self._own[request] = _Rates(np.zeros(self.most), np.zeros(self.most))
            if drafts:
                own.count(drafts, count, _OWN_MEMORY)
                self._common.count(drafts, count, _COMMON_MEMORY)
        for looks in (self._up, self._down):
            looks.saved, looks.rounds = looks.saved + looks.share * seconds, looks.rounds + 1
        # Where a look was right throughout, the next round looks again.
        right = bool(drafts) and min(accepted.values(), default=0) >= min(2, drafts)
        self._again = right and self._current == 0

    def read(self, tokens: int, seconds: float) -> None:
        """The drafter has read so many tokens that waited, in so many seconds."""
        self._readings += 1
        if self._readings == 1:
            return  # a first time also holds what happens only once
        took = seconds / tokens
        self._per_token += (_NEW_READING if took > self._per_token > 0 else 1.0) * (took - self._per_token)

    def begin(self) -> None:
        """Requests are numbered anew; what earlier ones were like is no longer theirs."""
        self._own.clear()

    def forget(self, request: int) -> None:
        """A request has ended."""
        self._own.pop(request, None)

    def _first_look(self, rows: int, tokens: Sequence[float]) -> int | None:
        """A size to be timed before anything is decided; the others lie between these.

        Not drafting is timed twice: nothing else would tell that its first time was too long. A size that
        could not be the best if it cost as little as other rounds allow is left out: a large block in a large
        batch may take as long as many rounds.
        """
        best = 0.0
        for size in dict.fromkeys((0, self.most // 2, self.most)):
            if size == 0 and not self.costs.sure(rows, 0):
                return 0
            seen = self.costs.seen(rows, size)
            if seen is None:
                least = self.costs.least(rows, size)
                if not best or least is None or tokens[size] / least > best * _HYSTERESIS:
                    return size
            else:
                best = max(best, tokens[size] / seen)
        return None

    def _expected(self, requests: Sequence[int]) -> list[float]:
        """Tokens of a round of all these requests, for 0 to `most` drafts."""
        common = self._common.hits / self._common.tries
        known = [own for own in map(self._own.get, requests) if own is not None]
        tries_BK = np.array([own.tries for own in known]).reshape(-1, self.most)
        hits_BK = np.array([own.hits for own in known]).reshape(-1, self.most)
        reach_BK = np.cumprod((hits_BK + _PRIOR * common) / (tries_BK + _PRIOR), axis=1)
        strangers = len(requests) - len(known)
        drafts_K = reach_BK.sum(0) + strangers * np.cumprod(common)
        return [len(requests) + drafts for drafts in np.cumsum([0.0, *drafts_K])]
