"""Progress in the terminal; lines now and then where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from slipstream.train.loop import Progress as Step

_QUIET_S = 20.0


class TrainingBar:
    """A bar with loss, acceptance length, tokens/s and time left.

    Args:
        stream: where to.
    """

    def __init__(self, stream: TextIO) -> None:
        self._console = Console(file=stream)
        columns = (BarColumn(bar_width=24), TextColumn("{task.percentage:>3.0f}% {task.description}"))
        self._bar = Progress(*columns, console=self._console, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("", total=1.0, visible=False)
        self._told = time.monotonic()

    def __enter__(self) -> TrainingBar:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def observe(self, step: Step) -> None:
        """Show a step."""
        left = (
            time.strftime("%H:%M:%S", time.gmtime(step.seconds_left)) if step.seconds_left < 8e4 else "long"
        )
        line = (
            f"step {step.step}, loss {step.loss:.3f}, acceptance length {step.acceptance_length:.2f}, "
            f"{step.tokens_per_second:.0f} tokens/s, {left} left"
        )
        self._bar.update(self._task, completed=min(step.share, 1.0), description=line, visible=True)
        forecast = step.forecast
        if forecast is not None:
            rates = " ".join(f"{rate:.2f}" for rate in forecast.hit_rate)
            decoded = "" if forecast.decoded is None else f", decoded {forecast.decoded:.2f}"
            line += f"; held out {forecast.acceptance_length:.3f}{decoded} (hit rate by slot {rates})"
        quiet = self._console.is_terminal or time.monotonic() - self._told < _QUIET_S
        if forecast is not None or not quiet:
            self._told = time.monotonic()
            self._console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def counting(stream: TextIO) -> Iterator[Callable[[int, int, str], None]]:
    """A bar for work that is counted: called with what is done, all, and what comes next.

    Without a terminal a line now and then.
    """
    console = Console(file=stream)
    columns = (BarColumn(bar_width=24), TextColumn("{task.completed}/{task.total} {task.description}"))
    with Progress(*columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, visible=False)
        told = time.monotonic()

        def show(done: int, total: int, what: str) -> None:
            nonlocal told
            bar.update(task, completed=done, total=total, description=what, visible=True)
            if not console.is_terminal and time.monotonic() - told > _QUIET_S:
                told = time.monotonic()
                console.print(f"{done}/{total} {what}", highlight=False, soft_wrap=True)

        yield show
