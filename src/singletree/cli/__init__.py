"""The command line. Each command imports what it needs when it runs."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from singletree import __version__
from singletree.errors import SingletreeError

if TYPE_CHECKING:
    from cyclopts import App

_COMMANDS = {
    "serve": ("singletree.cli.serve:app", "Serve a model to agent harnesses."),
    "launch": ("singletree.cli.launch:app", "Start a harness against a running server."),
    "catalog": (
        "singletree.cli.catalog:catalog",
        "Write the model catalog for Codex, checked by the installed Codex.",
    ),
    "parse": ("singletree.cli.inspect:parse", "Parse raw model output into parts and events."),
    "render": ("singletree.cli.inspect:render", "Print the prompt of a request as text and token ids."),
    "families": ("singletree.cli.family_commands:app", "List the model families, or draft a new one."),
    "explain": ("singletree.cli.explain:explain", "Show where a session broke the prefix cache, and why."),
    "inspect": ("singletree.cli.inspector:inspect", "Open the page that shows what the agents do."),
    "tail": ("singletree.cli.live:tail", "Print each request of a running server as it ends."),
    "top": ("singletree.cli.live:top", "Watch the sessions of a running server."),
    "trace": ("singletree.cli.trace:app", "Turn recorded requests into a timeline, or send them again."),
    "completion": (
        "singletree.cli.completion:completion",
        "Print the script with which a shell completes commands and flags.",
    ),
    "doctor": ("singletree.cli.doctor:doctor", "Check a model: what was detected, and what will not work."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: status 0 on success, 1 on an error, 2 on a wrong command line.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Model output may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from cyclopts.exceptions import CycloptsError
    except ImportError:
        _fail("the command line is not installed: pip install 'singletree[serve]'", 1)
    try:
        app()(
            sys.argv[1:] if arguments is None else list(arguments),
            print_error=False,
            exit_on_error=False,
            result_action="return_value",
        )
    except CycloptsError as error:
        _fail(f"{str(error).strip()} See --help.", 2)
    except SingletreeError as error:
        _fail(error.message, 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader closed the pipe, as `singletree families | head` does.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the interpreter's last flush)


def app() -> App:
    """Build the command line; each command is imported when it is called."""
    from cyclopts import App

    cli = App(name="singletree", help="Serve open models to agent harnesses.", version=__version__)
    for name, (target, help) in _COMMANDS.items():
        cli.command(target, name=name, help=help)
    return cli


def _fail(message: str, status: int) -> None:
    print(f"singletree: {message}", file=sys.stderr)
    sys.exit(status)
