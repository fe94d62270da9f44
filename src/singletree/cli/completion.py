"""``singletree completion``: print the script with which a shell completes commands, flags and their values."""

from __future__ import annotations

import re
from typing import Literal

Shell = Literal["bash", "zsh", "fish"]


def completion(shell: Shell) -> None:
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
    from singletree.cli import app

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
    """Return the name of the function that completes."""
    [name] = re.findall(r"^(\w+)\(\) \{$", script, re.MULTILINE)
    return str(name)
