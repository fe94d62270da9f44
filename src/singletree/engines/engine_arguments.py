"""The arguments of an engine that runs inside the server: what agents need, and what the user gave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from singletree.errors import BadConfiguration

AgentArguments = tuple[tuple[tuple[str, ...], str], ...]
"""Arguments that agents need, each a flag with its value, and why."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What to start.

    Attributes:
        model: folder or hub id of the checkpoint.
        context_window: largest prompt and completion together, in tokens; None for the model's own.
        slots: how many generations run at once; None for the engine's default.
        arguments: further arguments of the engine's own server, as the user gave them.
    """

    model: str
    context_window: int | None = None
    slots: int | None = None
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ArgumentNames:
    """How an engine names what singletree sets.

    Attributes:
        model: its flag for the checkpoint.
        context_window: its flag for the window.
        slots: its flag for the number of generations.
        refused: flags that its arguments may not have, and what to give instead.
        agent: what agents need.
    """

    model: str
    context_window: str
    slots: str
    refused: Mapping[str, str]
    agent: AgentArguments


def agent_arguments(given: Sequence[str], wanted: AgentArguments) -> list[tuple[tuple[str, ...], str]]:
    """Return those of ``wanted`` that no argument in ``given`` sets otherwise."""
    names = {_name(each) for each in given if each.startswith("--")}
    return [(words, why) for words, why in wanted if not _is_set(words[0], names)]


def engine_arguments(settings: EngineSettings, names: ArgumentNames) -> list[str]:
    """Return the command line of the engine. Raises BadConfiguration for an argument that singletree sets itself."""
    for argument in settings.arguments:
        flag = "--" + argument.partition("=")[0].removeprefix("--").replace("_", "-")
        if argument.startswith("--") and flag in names.refused:
            raise BadConfiguration(
                f"{argument} is not for the engine's own arguments: give {names.refused[flag]}"
            )
    own = {
        names.model: settings.model,
        names.context_window: settings.context_window,
        names.slots: settings.slots,
    }
    words = [word for flag, value in own.items() if value is not None for word in (flag, str(value))]
    for wanted, _ in agent_arguments(settings.arguments, names.agent):
        words += wanted
    return [*words, *settings.arguments]


def _name(argument: str) -> str:
    """Return the name of an argument's setting: without a value, ``no-`` and underscores."""
    return argument.partition("=")[0].removeprefix("--").removeprefix("no-").replace("_", "-")


def _is_set(flag: str, names: set[str]) -> bool:
    own = _name(flag)
    return own in names or own.partition(".")[0] in names
