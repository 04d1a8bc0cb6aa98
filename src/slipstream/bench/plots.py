"""The pictures of a report as SVG for inside a page: text stays text, and takes the page's colours.

Colours of text and grid are written as values that nobody would choose, and replaced by the page's own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from slipstream.bench.metrics import Interval, Load, Matched, Position
from slipstream.core.errors import MissingExtraError

_TEXT, _GRID = "#010203", "#040506"
#: Readable on white and on near-black; told apart without colour by their order in every plot.
COLOURS: Final = ("#8a8f98", "#2f80ed", "#e08700", "#1fa971", "#d6409f", "#8b5cf6", "#0ea5b7")
_MARKERS = "osD^vPX"
#: A share of fewer says nothing.
LEAST_TRIES: Final = 20
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _TEXT,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": _GRID,
    "grid.linewidth": 0.6,
    "text.color": _TEXT,
    "xtick.color": _TEXT,
    "ytick.color": _TEXT,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 5,
}


def speedups(rows: Mapping[str, Mapping[str, Interval]], reference: str, colours: Mapping[str, str]) -> str:
    """Speed-ups with intervals: by workload, one point per system.

    Args:
        rows: workload to system to interval.
        reference: name of the system at 1.
        colours: by system.
    """
    systems = list(dict.fromkeys(system for row in rows.values() for system in row))
    height = 0.9 + len(rows) * (0.22 + 0.2 * len(systems))
    with _figure("speedups", 9.2, height) as (axes, finish):
        step = 0.8 / max(len(systems), 1)
        for number, system in enumerate(systems):
            found = [(place, row[system]) for place, row in enumerate(rows.values()) if system in row]
            y = [place + (number - (len(systems) - 1) / 2) * step * 0.8 for place, _ in found]
            x = [one.value for _, one in found]
            spread = [[one.value - one.low for _, one in found], [one.high - one.value for _, one in found]]
            style = {"fmt": _MARKERS[number % len(_MARKERS)], "capsize": 3, "label": system}
            axes.errorbar(x, y, xerr=spread, color=colours[system], **style)
            for place, (_, one) in zip(y, found, strict=True):
                words = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
                axes.annotate(f"{one.value:.2f}", (one.high, place), **words)
        axes.axvline(1, color=_TEXT, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(rows)), list(rows))
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.set_xlim(0, 1.08 * max(one.high for row in rows.values() for one in row.values()))
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(f"times as fast as {reference}, decoding only, with 95 % intervals")
        _legend(axes)
    return finish()


def positions(systems: Mapping[str, Sequence[Position]], colours: Mapping[str, str]) -> str:
    """Acceptance by position: kept of those looked at (solid), and of all drafts made (dotted).

    Positions that were looked at too rarely have no solid point.
    """
    with _figure("positions", 4.6, 3.2) as (axes, finish):
        for number, (system, found) in enumerate(systems.items()):
            often = [one for one in found if one.tried >= LEAST_TRIES]
            x, y = [one.number for one in often], [one.conditional for one in often]
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(x, y, marker=marker, color=colours[system], label=system)
            x = [one.number for one in found]
            axes.plot(x, [one.survived for one in found], linestyle=":", color=colours[system])
        most = max((one.number for found in systems.values() for one in found), default=1)
        axes.set_xticks(range(1, most + 1, max(1, most // 8)))
        axes.set_ylim(0, 1.02)
        axes.set_xlabel("position of the draft")
        axes.set_ylabel("share kept")
        _legend(axes)
    return finish()


def runs(systems: Mapping[str, Mapping[int, int]], colours: Mapping[str, str]) -> str:
    """Histogram of accepted runs: share of rounds that kept so many drafts."""
    with _figure("runs", 4.6, 3.2) as (axes, finish):
        width = 0.84 / max(len(systems), 1)
        for number, (system, counts) in enumerate(systems.items()):
            rounds = sum(counts.values())
            x = [length + (number - (len(systems) - 1) / 2) * width for length in counts]
            heights = [count / rounds for count in counts.values()]
            axes.bar(x, heights, width * 0.92, color=colours[system], label=system)
        most = max((length for counts in systems.values() for length in counts), default=0)
        axes.set_xticks(range(0, most + 1, max(1, most // 8)))
        axes.grid(axis="x", visible=False)
        axes.set_xlabel("drafts kept in a round")
        axes.set_ylabel("share of rounds")
        _legend(axes)
    return finish()


def curves(systems: Mapping[str, Sequence[Load]], colours: Mapping[str, str]) -> str:
    """Tokens/s in all against tokens/s of each user; a point is a load, named by its users."""
    with _figure("curves", 4.6, 3.4) as (axes, finish):
        for number, (system, loads) in enumerate(systems.items()):
            x, y = [load.interactivity for load in loads], [load.throughput for load in loads]
            marker = _MARKERS[number % len(_MARKERS)]
            axes.plot(x, y, marker=marker, color=colours[system], label=system)
            for load in loads:
                point = (load.interactivity, load.throughput)
                axes.annotate(
                    str(load.concurrency), point, xytext=(5, 4), textcoords="offset points", fontsize=8
                )
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.margins(0.08)
        axes.set_xlabel("tokens/s that each user sees (interactivity)")
        axes.set_ylabel("tokens/s in all")
        _legend(axes)
    return finish()


def ratios(systems: Mapping[str, Sequence[Matched]], reference: str, colours: Mapping[str, str]) -> str:
    """Ratio of throughputs at every interactivity that both were measured at."""
    with _figure("ratios", 4.6, 3.4) as (axes, finish):
        for system, found in systems.items():
            x, y = [one.interactivity for one in found], [one.ratio for one in found]
            axes.plot(x, y, color=colours[system], label=system, marker="o" if len(x) == 1 else None)
        axes.axhline(1, color=_TEXT, linewidth=1, linestyle="--")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("tokens/s that each user sees")
        axes.set_ylabel(f"throughput over {reference}")
        _legend(axes)
    return finish()


def splits(systems: Mapping[str, tuple[float, float]]) -> str:
    """Where the time goes: shares of drafting and of verifying; the rest is neither."""
    with _figure("splits", 9.2, 0.9 + 0.38 * len(systems)) as (axes, finish):
        names = list(systems)
        draft = [share for share, _ in systems.values()]
        verify = [share for _, share in systems.values()]
        rest = [max(1 - one - other, 0.0) for one, other in systems.values()]
        left = [0.0] * len(names)
        parts = ((draft, "draft", COLOURS[2]), (verify, "verify", COLOURS[1]), (rest, "other", COLOURS[0]))
        for shares, label, colour in parts:
            axes.barh(names, shares, 0.6, left=left, color=colour, label=label)
            for name, share, start in zip(names, shares, left, strict=True):
                if share > 0.06:
                    place = {"ha": "center", "va": "center", "fontsize": 8, "color": "#ffffff"}
                    axes.text(start + share / 2, name, f"{share:.0%}", **place)
            left = [start + share for start, share in zip(left, shares, strict=True)]
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        axes.grid(visible=False)
        axes.set_xlabel("share of the time between first and last token")
        _legend(axes)
    return finish()


def _legend(axes: Any) -> None:
    """Above the plot, where it hides nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=4, fontsize=9, borderaxespad=0.2)


@contextmanager
def _figure(name: str, width: float, height: float) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Axes, and what makes SVG of them after the block.

    Raises:
        MissingExtraError: there is no matplotlib.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError("matplotlib", "bench") from error
    drawn: list[str] = []
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(width, height), layout="constrained")
        yield figure.add_subplot(), lambda: drawn[0]
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        drawn.append(_embedded(buffer.getvalue(), name))


def _embedded(svg: str, name: str) -> str:
    """An SVG file made part of a page: without its head, with ids of its own and the page's colours."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r"url\(#", f"url(#{name}-", svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = re.sub(r"font: (\d+)px [^;\"]*", r"font: \1px system-ui, sans-serif", svg)
    svg = re.sub(r'<svg ([^>]*?)width="[^"]*"', r'<svg \1class="plot" role="img"', svg, count=1)
    svg = re.sub(r'<svg ([^>]*?) height="[^"]*"', r"<svg \1", svg, count=1)
    return svg.replace(_TEXT, "currentColor").replace(_GRID, "var(--line)")
