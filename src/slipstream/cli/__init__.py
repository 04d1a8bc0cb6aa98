"""The `slipstream` command: one file per command, no decoding logic."""

from __future__ import annotations

from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with its status.

    Args:
        argv: arguments after the program's name; None takes the process's own.
    """
    from slipstream.cli.app import run

    raise SystemExit(run(argv))
