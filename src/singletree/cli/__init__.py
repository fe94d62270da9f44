"""The command line. Each command imports what it needs when it runs.

Nothing that takes time is imported here: only inside ``main`` does Ctrl-C end in silence.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cyclopts import App

_COMMANDS = {
    "serve": ("singletree.cli.serve:app", "Serve a model to agent harnesses."),
    "service": ("singletree.cli.service:app", "Keep a server running for this user."),
    "launch": ("singletree.cli.launch:app", "Start a harness against a running server."),
    "catalog": (
        "singletree.cli.launch:catalog",
        "Write the model catalog for Codex, checked by the installed Codex.",
    ),
    "parse": ("singletree.cli.inspect:parse", "Parse raw model output into parts and events."),
    "render": ("singletree.cli.inspect:render", "Print the prompt of a request as text and token ids."),
    "families": ("singletree.cli.inspect:app", "List the model families, or draft a new one."),
    "explain": (
        "singletree.cli.session_commands:explain",
        "Show where a session broke the prefix cache, and why.",
    ),
    "inspect": ("singletree.cli.session_commands:inspect", "Open the page that shows what the agents do."),
    "tail": ("singletree.cli.session_commands:tail", "Print each request of a running server as it ends."),
    "traces": ("singletree.cli.traces:app", "Check captured sessions, and write them for trainers."),
    "key": ("singletree.key_files:key", "Make an API key for the file of --key-file."),
    "completion": (
        "singletree.cli:completion",
        "Print the script with which a shell completes commands and flags.",
    ),
    "check": (
        "singletree.cli.check:check_endpoint",
        "Check any endpoint that serves agents, and print a score card.",
    ),
    "doctor": ("singletree.cli.doctor:doctor", "Check a model: what was detected, and what will not work."),
}

_SESSION_COMMANDS = {
    "cost": ("singletree.cli.session_commands:cost", "Show what sessions cost, and by whose fault."),
    "fork": ("singletree.cli.sessions:fork_to_model", "Let another model go on with a session."),
    "compare": ("singletree.cli.sessions:compare_sessions", "Show two sessions side by side."),
    "drain": ("singletree.cli.sessions:drain_model", "Let another model answer all requests for one."),
    "list": ("singletree.cli.sessions:list_saved", "List the saved states of a folder."),
    "export": ("singletree.cli.sessions:export_saved", "Copy a saved state, for another machine."),
    "import": ("singletree.cli.sessions:import_saved", "Take a saved state from another machine."),
    "delete": ("singletree.cli.sessions:delete_saved", "Delete saved states."),
}

_INTERRUPTED = 130  # the exit status that shells give a program that Ctrl-C has ended


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command and exit: status 0 on success, 1 on an error, 2 on a wrong command line, 130 on Ctrl-C.

    Args:
        arguments: without the program's name; None for those of the process.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Model output may contain characters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run(arguments)
    except KeyboardInterrupt:
        # Threads that download would hold up the end of the interpreter until they are through.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(_INTERRUPTED)


def _run(arguments: Sequence[str] | None) -> None:
    import shlex

    from cyclopts.exceptions import CycloptsError, UnusedCliTokensError

    from singletree.errors import SingletreeError

    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if not words:
            from singletree.cli.first_screen import print_first_screen

            print_first_screen()
            return
        app()(words, print_error=False, exit_on_error=False, result_action="return_value")
    except UnusedCliTokensError as error:
        _fail(f"too many arguments: {shlex.join(error.unused_tokens or ())}; see --help", 2)
    except CycloptsError as error:
        _fail(f"{str(error).strip()} See --help.", 2)
    except SingletreeError as error:
        _fail(error.message, 1)
    except ImportError as error:
        if (package := _missing_package(error)) is None:
            raise
        _fail(f"this command needs the package {package}: pip install 'singletree[all]'", 1)
    except BrokenPipeError:
        # The reader closed the pipe, as `singletree families | head` does.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (for the interpreter's last flush)
    except OSError as error:
        if error.filename is None and error.errno != errno.ENOSPC:
            raise
        _fail(f"{error.filename or 'the output'}: {error.strerror}; give a path that can be used", 1)


def app() -> App:
    """Build the command line; each command is imported when it is called."""
    from cyclopts import App

    from singletree import __version__

    cli = App(name="singletree", help="Serve open models to agent harnesses.", version=__version__)
    sessions = App(name="sessions", help="Show what sessions cost; fork, move, compare and save them.")
    for group, commands in ((cli, _COMMANDS), (sessions, _SESSION_COMMANDS)):
        for name, (target, help) in commands.items():
            group.command(target, name=name, help=help)
    cli.command(sessions)
    return cli


def completion(shell: Literal["bash", "zsh", "fish"]) -> None:
    """Print the completion script for a shell.

    Save it where the shell looks for it:

    bash: singletree completion bash > ~/.local/share/bash-completion/completions/singletree

    zsh: singletree completion zsh > a folder of $fpath, as _singletree

    fish: singletree completion fish > ~/.config/fish/completions/singletree.fish

    Parameters
    ----------
    shell
        The shell that reads it.
    """
    script = app().generate_completion(shell=shell)
    print(script + _ZSH_END.format(function=_zsh_function(script)) if shell == "zsh" else script, end="")


_ZSH_END = """
if [[ "$funcstack[1]" == "_singletree" ]]; then
  {function} "$@"
else
  compdef {function} singletree
fi
"""
"""cyclopts defines a function, and neither calls it, as a file of $fpath has to, nor names it to ``compdef``."""


def _zsh_function(script: str) -> str:
    import re

    [name] = re.findall(r"^(\w+)\(\) \{$", script, re.MULTILINE)
    return str(name)


def _missing_package(error: BaseException | None) -> str | None:
    """Return the package of others whose absence ``error`` came from; None if it has another reason."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("singletree"):
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return None


def _fail(message: str, status: int) -> None:
    print(f"singletree: {message}", file=sys.stderr)
    sys.exit(status)
