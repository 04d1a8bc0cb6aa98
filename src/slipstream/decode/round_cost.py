"""What a round takes, by rows and drafts: measured while decoding, kept between runs.

Times are learned per number of rows (exact while one more row matters much, see `bucket`) and of drafts.
Between two that were timed the cost lies on a line; of rows that were not timed at all only bounds are known.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import platformdirs
import torch

from slipstream.core.errors import InputError
from slipstream.core.files import replacing
from slipstream.model import Drafter
from slipstream.target import Target

#: Weight of a new time; a time that is far above what was seen counts as so many times that.
_NEW_TIME, _OUTLIER = 0.15, 1.5
#: A time that is lower by so much was free of what first times hold, and replaces the earlier one.
_LOWER = 0.7
#: Times are written again when one of them is new, or has moved by so much.
_MOVED = 0.2


@dataclass
class RoundCosts:
    """Seconds of rounds.

    Attributes:
        path: a JSON file that the times are kept in; None keeps them nowhere.
        seconds: by (rows, drafts), rows rounded up by `bucket`.
    """

    path: Path | None = None
    seconds: dict[tuple[int, int], float] = field(default_factory=dict)
    _told: set[tuple[int, int]] = field(default_factory=set)
    _once: set[tuple[int, int]] = field(default_factory=set)
    _written: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read what an earlier run has kept; a file that cannot be read is as good as none."""
        if self.path is None:
            return
        try:
            kept = json.loads(self.path.read_text(encoding="utf-8"))
            times = {(int(rows), int(drafts)): float(took) for rows, drafts, took in kept["seconds"]}
        except (OSError, ValueError, KeyError, TypeError):
            return
        if all(took > 0 for took in times.values()):
            self.seconds, self._told, self._written = dict(times), set(times), dict(times)

    def note(self, rows: int, drafts: int, seconds: float) -> None:
        """A round took so long."""
        key = bucket(rows), drafts
        before = self.seconds.get(key)
        if before is None or key in self._told:
            # Another run may have shared its cores: what is seen here counts more.
            self._told.discard(key)
            self._once.add(key)
            self.seconds[key] = seconds
            return
        self._once.discard(key)
        weight = _NEW_TIME if seconds > before * _LOWER else 1.0
        self.seconds[key] = before + weight * (min(seconds, before * _OUTLIER) - before)

    def keep(self) -> None:
        """Write the times down if they say anything new; where that cannot be done they are not kept."""
        if self.path is None or not any(self._moved(key) for key in self.seconds):
            return
        rows = [[rows, drafts, round(took, 6)] for (rows, drafts), took in sorted(self.seconds.items())]
        try:
            with replacing(self.path, force=True) as file:
                file.write(json.dumps({"seconds": rows}) + "\n")
        except InputError:
            self.path = None
            return
        self._written = dict(self.seconds)

    def seen(self, rows: int, drafts: int) -> float | None:
        """Seconds of a round, if one was timed; no more than rounds of more rows and drafts take."""
        rows = bucket(rows)
        return self._capped(rows, drafts) if (rows, drafts) in self.seconds else None

    def sure(self, rows: int, drafts: int) -> bool:
        """Whether such a round was timed more than once: a first time also holds what happens only once."""
        key = bucket(rows), drafts
        return key in self.seconds and key not in self._once

    def least(self, rows: int, drafts: int) -> float | None:
        """Seconds that a round takes at least, by those of other sizes; None if nothing is known.

        A round of no more rows and drafts takes no longer, and a row adds at most its share of a round.
        """
        rows = bucket(rows)
        bounds = [
            took * min(1.0, rows / other)
            for (other, size), took in self.seconds.items()
            if size == drafts or (size < drafts and other <= rows)
        ]
        return max(bounds, default=None)

    def estimate(self, rows: int, sizes: Sequence[int]) -> list[float]:
        """Seconds of rounds with so many drafts, as well as they are known; 1.0 where nothing is.

        Sizes that were timed with other rows only count as their bound; between two sizes the cost lies on
        the line from one to the other.
        """
        rows, timed = bucket(rows), dict[int, float]()
        for (other, size), took in self.seconds.items():
            timed[size] = max(timed.get(size, 0.0), took * min(1.0, rows / other))
        timed |= {size: self._capped(rows, size) for other, size in self.seconds if other == rows}
        # Nothing is no short block: a line must not start there.
        known = sorted(size for size in timed if size)
        drafted = [timed[size] for size in known]
        return [
            timed[size]
            if size in timed
            else float(np.interp(size, known, drafted))
            if size and known
            else 1.0
            for size in sizes
        ]

    def _capped(self, rows: int, drafts: int) -> float:
        """The time of a round, or that of a larger one that took less."""
        return min(took for (other, size), took in self.seconds.items() if other >= rows and size >= drafts)

    def _moved(self, key: tuple[int, int]) -> bool:
        written = self._written.get(key)
        return written is None or abs(self.seconds[key] / written - 1) > _MOVED


def kept_costs(target: Target, drafter: Drafter | None) -> RoundCosts:
    """Costs of the same target and drafter on the same machine, in the cache folder of the user."""
    device = target.device
    shapes = (target.info, str(target.dtype), drafter.config if drafter is not None else None)
    place = (
        torch.cuda.get_device_name(device) if device.type == "cuda" else (platform.node(), os.cpu_count()),
        torch.get_num_threads(),
        target.kernels is not None,
    )
    told = repr((torch.__version__, shapes, str(device), place))
    name = hashlib.sha256(told.encode()).hexdigest()[:20]
    return RoundCosts(platformdirs.user_cache_path("slipstream") / "rounds" / f"{name}.json")


def bucket(rows: int) -> int:
    """Rows whose rounds are taken to cost the same: exact while one more row matters much."""
    if rows <= 8:
        return rows
    return -(-rows // 4) * 4 if rows <= 32 else 1 << (rows - 1).bit_length()
