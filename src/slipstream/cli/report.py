"""`slipstream report`: results of a benchmark as a page and a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from slipstream.cli.session import say


def report(
    results: Path,
    *,
    out: Annotated[Path | None, Parameter(alias="-o")] = None,
    markdown: Path | None = None,
    against: Path | None = None,
    force: bool = False,
    as_json: Annotated[bool, Parameter(name="--json")] = False,
) -> int:
    """Make one self-contained HTML page of a file of results, and a Markdown table if asked.

    Args:
        results: JSONL file that slipstream bench wrote.
        out: HTML file; the name of the results with .html if not given.
        markdown: Markdown file.
        against: results to compare with, system by system.
        force: overwrite existing files.
        as_json: print the summary as one JSON document.
    """
    from slipstream.bench.records import read_results
    from slipstream.bench.report import write_report
    from slipstream.bench.summary import document
    from slipstream.cli.show import print_json

    page = out or results.with_suffix(".html")
    other = read_results(against) if against is not None else None
    summary = write_report(read_results(results), page, markdown, other, force)
    say(f"{page}" + (f" and {markdown}" if markdown is not None else ""))
    if as_json:
        print_json({"out": str(page), **document(summary)})
    else:
        print(summary.verdict)
    return 0
