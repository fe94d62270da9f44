"""What ``singletree`` without arguments prints: the next command for this machine."""

from __future__ import annotations

import shutil
from importlib.util import find_spec

from singletree import __version__
from singletree.cli.launch import HARNESSES
from singletree.cli.running_server import DEFAULT_URL, RunningServer
from singletree.errors import BadConfiguration

_LINE = "  {:<44}{}"


def print_first_screen() -> None:
    """Print what singletree is, and the commands that can come next: those that this machine can run."""
    print(f"singletree {__version__} serves open models to agent harnesses.\n")
    running = _running_models()
    if find_spec("starlette") is None:
        _line("pip install 'singletree[all]'", "install the server: this is the library alone")
    elif running:
        print(f"  A server answers at {DEFAULT_URL}, with {', '.join(running)}.\n")
    else:
        if find_spec("xllamacpp") is None:
            _line("pip install 'singletree[all]'", "install the embedded engine, too")
        else:
            _line("singletree serve", f"serve a small model at {DEFAULT_URL}, fetched once")
            _line("singletree serve --model MODEL", "serve a GGUF file or a model of the Hugging Face Hub")
        _line("singletree serve --engine-url URL", "serve what a vLLM, SGLang or llama-server runs")
    installed = [each.program for each in HARNESSES if shutil.which(each.program)]
    for program in installed:
        _line(f"singletree launch {program}", "start this harness on the server, in your folder")
    if not installed:
        names = ", ".join(each.program for each in HARNESSES)
        _line("singletree launch HARNESS", f"start one of {names}; none is installed here")
    if running:
        _line("singletree tail", "show what the server does")
    _line("singletree check URL", "find what any endpoint gets wrong for agents")
    _line("singletree doctor --machine", "show which engines and models fit this machine")
    _line("singletree --help", "list all commands")


def _line(command: str, meaning: str) -> None:
    print(_LINE.format(command, meaning))


def _running_models() -> list[str]:
    """Return the models of the server at the default address; empty if none answers, or not one of ours."""
    try:
        models = RunningServer().fetch("/v1/models").get("data", [])
    except BadConfiguration:
        return []
    return [str(each["id"]) for each in models if isinstance(each, dict) and "calls_tools" in each]
