"""How many drafts a round should have, zero included: from what rounds cost and how far drafts are right.

Tokens per second of a round with K drafts are sum over rows of (1 + sum_k prod_{j<=k} p_j) / seconds(rows, K)
(Leviathan et al., arXiv 2211.17192, section 3.3, with a rate per slot and row). Both sides are learned while
decoding. The choice changes speed only: what is said does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

#: Share of a count that is kept when the next round is counted: of one request, and of all of them.
_OWN_MEMORY, _COMMON_MEMORY = 0.98, 0.995
#: Rounds that the common rates count for in a request's own.
_PRIOR = 10.0
#: Weight of a new time; a time that is far above what was seen counts as so many times that.
_NEW_TIME, _OUTLIER = 0.15, 1.5
#: A change must promise so much more.
_HYSTERESIS = 1.02
#: Looks at drafting while it does not pay may take so much of the time, saved up round by round, and are at
#: least so many rounds apart. Looks at not drafting may take the last share.
_PROBE_SHARE, _PROBE_LEAST, _PROBE_PLAIN = 0.015, 16, 0.002
#: Looks in vain double the distance to the next one, so often at most.
_MOST_DOUBLINGS = 2.0


@dataclass
class _Rates:
    """Decayed counts per slot: how often a draft was looked at, and how often it was right."""

    tries: list[float]
    hits: list[float]

    def count(self, drafts: int, accepted: int, memory: float) -> None:
        """One round: drafts 1..accepted were right, the next one wrong, later ones unknown."""
        for slot in range(min(drafts, accepted + 1)):
            self.tries[slot] = self.tries[slot] * memory + 1
            self.hits[slot] = self.hits[slot] * memory + (slot < accepted)


@dataclass
class DraftLength:
    """Chooses the number of drafts of every round of a batch.

    Attributes:
        most: drafts that the drafter can make (K).
        fixed: always so many; None decides by what pays.
        seconds: by (rows, drafts), many rows rounded up: what a round took.
    """

    most: int
    fixed: int | None = None
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    _own: dict[int, _Rates] = field(default_factory=dict)
    _current: int = 0
    _since: int = 0
    _deep: int = 0
    _probing: bool = False
    _vain: float = 0.0
    _saved: float = 0.0
    _drafted: float = 0.0
    _hold: int = 0
    _held_for: int = 0

    def __post_init__(self) -> None:
        """Begin with rates that make a drafter worth trying."""
        self._common = _Rates([1.0] * self.most, [0.6] * self.most)
        self._current = self.most

    @property
    def sizes(self) -> tuple[int, ...]:
        """Numbers of drafts that are considered: few, so that each is timed often."""
        steps = (0, 1, 2, 3, 5, 7, 11, 15, 23, 31)
        return (*(size for size in steps if size < self.most), self.most)

    def choose(self, requests: Sequence[int]) -> int:
        """Drafts of the next round.

        Args:
            requests: numbers of those that decode.
        """
        if self.fixed is not None:
            return self.fixed
        bucket = _bucket(len(requests))
        if self._hold and bucket == self._held_for:
            # Weighing many requests takes time itself, and one round more tells little about them.
            self._hold, self._since, self._deep = self._hold - 1, self._since + 1, self._deep + 1
            return self._current
        return self._weigh(requests, bucket)

    def _weigh(self, requests: Sequence[int], bucket: int) -> int:
        """Drafts of the next round, from what is known now."""
        # Somebody new may be easier to draft for; one of many changes little.
        fresh = sum(request not in self._own for request in requests)
        self._vain = max(0.0, self._vain - _MOST_DOUBLINGS * (fresh / bucket) ** 2)
        tokens = self._expected(requests)
        unseen = self._first_look(bucket, tokens)
        if unseen is not None:
            return unseen
        value = {size: tokens[size] / self._cost(bucket, size) for size in self.sizes}
        best = max(value, key=value.__getitem__)
        if value[best] > value[self._current] * _HYSTERESIS:
            self._current, self._since, self._vain = best, 0, 0.0
        self._since, self._deep = self._since + 1, self._deep + 1
        if self._current == 0:
            probe = max((size for size in self.sizes if size), key=value.__getitem__)
            extra = self._cost(bucket, probe) - self._cost(bucket, 0)
            affordable = self._since > _PROBE_LEAST and self._saved > extra * 2**self._vain
            if self._probing or affordable:
                self._since, self._saved, self._vain = 0, 0.0, min(self._vain + 1, _MOST_DOUBLINGS)
                return probe
            self._hold, self._held_for = len(requests) // 2, bucket
            return 0
        # One plain step more, less what it says by the way: long rounds are doubted sooner.
        lost = self._cost(bucket, 0) * (1 - value[0] / value[self._current])
        if self._since > _PROBE_LEAST and self._drafted > lost / _PROBE_PLAIN:
            self._since, self._drafted = 0, 0.0
            return 0
        # How good the last drafts are is not seen while they are not made.
        extra = self._cost(bucket, self.most) / self._cost(bucket, self._current) - 1
        if self._current < self.most and self._deep > max(_PROBE_LEAST, extra / _PROBE_SHARE):
            self._deep = 0
            return self.most
        self._hold, self._held_for = len(requests) // 2, bucket
        return self._current

    def note(self, accepted: Mapping[int, int], drafts: int, seconds: float) -> None:
        """What a round came to.

        Args:
            accepted: right drafts by request.
            drafts: that each had.
            seconds: that it took.
        """
        key = _bucket(len(accepted)), drafts
        before = self.seconds.get(key)
        if before is None:
            self.seconds[key] = seconds
        else:
            # A first time holds what only first times cost, so a lower one replaces it.
            weight = _NEW_TIME if seconds > before * 0.7 else 1.0
            self.seconds[key] = before + weight * (min(seconds, before * _OUTLIER) - before)
        for request, count in accepted.items():
            own = self._own.setdefault(request, _Rates([0.0] * self.most, [0.0] * self.most))
            own.count(drafts, count, _OWN_MEMORY)
            self._common.count(drafts, count, _COMMON_MEMORY)
        if self._current:
            self._drafted += seconds
        else:
            self._saved += _PROBE_SHARE * seconds
        # Where a probe was right throughout, the next round looks again.
        self._probing = (
            bool(drafts) and self._current == 0 and min(accepted.values(), default=0) >= min(2, drafts)
        )

    def begin(self) -> None:
        """Requests are numbered anew; what earlier ones were like is no longer theirs."""
        self._own.clear()

    def forget(self, request: int) -> None:
        """A request has ended."""
        self._own.pop(request, None)

    def _first_look(self, bucket: int, tokens: Sequence[float]) -> int | None:
        """A size to be timed before anything is decided; the others lie between these.

        A size that could not be the best if it cost as little as a smaller one, or as in a smaller batch, is
        left out: a large block in a large batch may take as long as many rounds.
        """
        best = 0.0
        for size in dict.fromkeys((0, self.most // 2, self.most)):
            seen = self.seconds.get((bucket, size))
            if seen is None:
                least = self._least_cost(bucket, size)
                if not best or least is None or tokens[size] / least > best * _HYSTERESIS:
                    return size
            else:
                best = max(best, tokens[size] / seen)
        return None

    def _least_cost(self, bucket: int, size: int) -> float | None:
        """What a round takes at least, by rounds of no more rows and drafts; None if there was none."""
        return max((t for (b, s), t in self.seconds.items() if b <= bucket and s <= size), default=None)

    def _expected(self, requests: Sequence[int]) -> list[float]:
        """Tokens of a round of all these requests, for 0 to `most` drafts."""
        common = [hits / tries for hits, tries in zip(self._common.hits, self._common.tries, strict=True)]
        tokens = [0.0] * (self.most + 1)
        for request in requests:
            own = self._own.get(request)
            reach, total = 1.0, 1.0
            tokens[0] += 1.0
            for slot in range(self.most):
                tries, hits = (own.tries[slot], own.hits[slot]) if own else (0.0, 0.0)
                reach *= (hits + _PRIOR * common[slot]) / (tries + _PRIOR)
                total += reach
                tokens[slot + 1] += total
        return tokens

    def _cost(self, bucket: int, size: int) -> float:
        """Seconds of a round; between two sizes that were timed, on the line from one to the other."""
        known = sorted(s for b, s in self.seconds if b == bucket)
        if size in known:
            return self.seconds[bucket, size]
        # Nothing is no short block: the line must not start there.
        below = max((s for s in known if 0 < s < size), default=None)
        above = min((s for s in known if s > size), default=None)
        if below is None or above is None:
            nearest = above if above is not None else below
            return self.seconds[bucket, nearest if nearest is not None else known[-1]]
        share = (size - below) / (above - below)
        low, high = self.seconds[bucket, below], self.seconds[bucket, above]
        return low + share * (high - low)


def _bucket(rows: int) -> int:
    """Rows whose rounds are taken to cost the same: exact while one more row matters much."""
    if rows <= 8:
        return rows
    return -(-rows // 4) * 4 if rows <= 32 else 1 << (rows - 1).bit_length()
