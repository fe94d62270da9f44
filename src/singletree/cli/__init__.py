"""The command line. What a command needs is imported when it runs."""

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
    "serve": ("singletree.cli.serving:app", "Serve a model to harnesses."),
    "launch": ("singletree.cli.launch:app", "Start a harness against a running server."),
    "catalog": (
        "singletree.cli.catalog:catalog",
        "Write what Codex is told of the models, checked by Codex.",
    ),
    "parse": ("singletree.cli.looking:parse", "Read raw model text as parts and events."),
    "render": ("singletree.cli.looking:render", "Print the prompt of a request, as text and token ids."),
    "families": ("singletree.cli.family_commands:app", "List the model families, or draft a new one."),
    "explain": ("singletree.cli.explain:explain", "Say where the prompts of a session broke, and why."),
    "doctor": ("singletree.cli.doctor:doctor", "Say what is known of a model, and what will not work."),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command; ``arguments`` without the program's name, None for those of the process.

    Exits with 0, with 2 for a command that is not one, and with 1 for what went wrong on the way.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # What a model writes may hold what the terminal's encoding has not.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        from cyclopts.exceptions import CycloptsError
    except ImportError:
        _complain("the command line is not installed: pip install 'singletree[serve]'", 1)
    try:
        app()(
            sys.argv[1:] if arguments is None else list(arguments),
            print_error=False,
            exit_on_error=False,
            result_action="return_value",
        )
    except CycloptsError as error:
        _complain(f"{str(error).strip()} See --help.", 2)
    except SingletreeError as error:
        _complain(error.message, 1)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # Whoever read the output has enough (`singletree families | head`).
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the interpreter's last flush)


def app() -> App:
    """The whole command line; each command is imported when it is called."""
    from cyclopts import App

    made = App(name="singletree", help="Serves open models to agent harnesses.", version=__version__)
    for name, (target, help) in _COMMANDS.items():
        made.command(target, name=name, help=help)
    return made


def _complain(message: str, status: int) -> None:
    print(f"singletree: {message}", file=sys.stderr)
    sys.exit(status)
