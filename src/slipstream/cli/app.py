"""The command line as a whole: which commands there are, and how errors leave the program."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

from cyclopts import App, CycloptsError, Parameter
from cyclopts.config import Toml

from slipstream import __version__
from slipstream.cli.bench import bench
from slipstream.cli.chat import chat
from slipstream.cli.check import check
from slipstream.cli.data import data
from slipstream.cli.demo import demo
from slipstream.cli.export import export
from slipstream.cli.generate import generate
from slipstream.cli.import_ import import_
from slipstream.cli.inspect import inspect
from slipstream.cli.plan import plan
from slipstream.cli.report import report
from slipstream.cli.serve import serve
from slipstream.cli.synthesize import synthesize
from slipstream.cli.train import train
from slipstream.core.errors import InputError, SlipstreamError

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE: Final = 141  # 128 + SIGPIPE


def build_app() -> App:
    """The application with all its commands."""
    app = App(
        name="slipstream",
        help="Decode a Hugging Face language model several tokens per pass, without changing what it says.",
        help_format="markdown",
        version=__version__,
        default_parameter=Parameter(negative=()),
        suppress_keyboard_interrupt=False,
    )
    for command in (demo, generate, chat, serve, check, synthesize, data, train, bench, report, plan):
        app.command(command)
    app.command(export)
    app.command(import_, name="import")
    app.command(inspect)
    app.meta.default(_launcher(app))
    app.meta.suppress_keyboard_interrupt = False
    return app


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line.

    Args:
        argv: arguments after the program's name; None takes the process's own.

    Returns:
        Exit status: 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C, 141 when stdout lost its reader.
    """
    tokens = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in tokens
    try:
        status = build_app().meta(
            tokens, exit_on_error=False, print_error=False, result_action="return_value"
        )
        sys.stdout.flush()
    except CycloptsError as error:
        return _fail(f"{error} Try --help.", USAGE, debug)
    except SlipstreamError as error:
        return _fail(str(error), FAILED, debug)
    except BrokenPipeError:
        # What is left in the buffer has no reader; the interpreter would complain about it while closing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED, debug)
    except Exception as error:
        return _fail(f"internal error, please report it: {type(error).__name__}: {error}", FAILED, debug)
    return status if isinstance(status, int) else 0


def _launcher(app: App) -> Any:
    def launcher(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        config: Path | None = None,
        debug: bool = False,
    ) -> Any:
        """Run a command.

        Args:
            tokens: the command and its arguments.
            config: TOML file with a table per command, such as `[generate]`; flags win over it.
            debug: show the trace of an error.
        """
        if config is not None:
            if not config.is_file():
                raise InputError(f"the configuration file {config} does not exist")
            app.config = (Toml(config),)
        return app(tokens, exit_on_error=False, print_error=False, result_action="return_value")

    return launcher


def _fail(message: str, status: int, debug: bool) -> int:
    if debug:
        import traceback

        traceback.print_exc()
    print(f"slipstream: {' '.join(message.split())}", file=sys.stderr)
    return status
