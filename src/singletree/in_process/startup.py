"""How an engine is started inside this process: its package, its arguments, its log, and why it does not start.

vLLM and SGLang load the model in child processes. When that fails, the exception in this process names no cause; the
cause is in the log of the child. So both engines write their log to a file, which is read here.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import logging.config
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from singletree.engines.devices import ENGINE_PACKAGES, find_gpus, installed_version, usable_memory
from singletree.engines.progress import Progress, looking, no_progress
from singletree.errors import BadConfiguration, EngineFailed
from singletree.model_files.saved_cache import digest_weights, oldest_beyond, open_folder

_LAST_LINES = 3
_DECISIVE = (".json", ".py", ".safetensors", ".bin", ".pt")  # files that change what is computed
_EVENTS = "--kv-events-config"
_FOLDER = re.compile(rf"({'|'.join(ENGINE_PACKAGES)})-.+-[0-9a-f]{{16}}")
_MEMORY_SHARE = 4  # At most this part of the memory holds what is on its way to the disk: 1/4.
_RAISED = re.compile(r"^.*?\b((?:[A-Z]\w*)?(?:Error|Exception): .+)$", re.MULTILINE)

AgentArguments = tuple[tuple[tuple[str, ...], str], ...]
"""Arguments that agents need, each a flag with its value, and why."""


@dataclass(frozen=True, slots=True)
class SavedCache:
    """Where an engine saves its KV cache.

    Attributes:
        folder: a folder for files of these weights, this version of the engine and these arguments alone.
        limit: largest size of the files, in bytes.
        memory: how much of the machine's memory the cache may take on the way to the disk, in bytes.
    """

    folder: Path
    limit: int
    memory: int

    def trim(self) -> None:
        """Remove the oldest files beyond the limit, those of other weights and versions included. Blocks."""
        for path in oldest_beyond(_files(self.folder.parent), self.limit):
            with contextlib.suppress(OSError):
                path.unlink()


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What to start.

    Attributes:
        model: folder or hub id of the checkpoint.
        context_window: largest prompt and completion together, in tokens; None for the model's own.
        slots: how many generations run at once; None for the engine's default.
        arguments: further arguments of the engine's own server, as the user gave them.
        saved: where its KV cache is saved; None for nowhere.
    """

    model: str
    context_window: int | None = None
    slots: int | None = None
    arguments: tuple[str, ...] = ()
    saved: SavedCache | None = None


def agent_arguments(given: Sequence[str], wanted: AgentArguments) -> list[tuple[tuple[str, ...], str]]:
    """Return those of ``wanted`` that no argument in ``given`` sets otherwise."""
    return [(words, why) for words, why in wanted if not _is_set(words[0], given)]


def engine_arguments(settings: EngineSettings, names: EnginePackage) -> list[str]:
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
    if settings.saved is not None:
        for flag, *value in names.saved(settings.saved):
            if _is_set(flag, settings.arguments):
                raise BadConfiguration(f"--prefix-cache-path sets {flag} by itself: leave one of both out")
            words += (flag, *value)
    return [*words, *settings.arguments]


def find_saved_cache(
    root: Path, limit: int, model: Path, engine: str, arguments: Sequence[str], window: int | None = None
) -> SavedCache:
    """Open the folder of ``--prefix-cache-path``, and return the part of it that an engine may use. Blocks.

    An engine names its files by token ids and by the name of the model. So whatever else decides what is in them
    makes another folder: the weights, the version of the engine, its arguments, the window (LongRoPE), and the GPUs and
    the layout that was set, by which vLLM orders the bytes of a block. Ray sets other ports for KV events each time.

    Raises BadConfiguration if the folder cannot be used.
    """
    open_folder(root)
    try:
        files = [path for path in sorted(model.iterdir()) if path.suffix in _DECISIVE and path.is_file()]
        weights = digest_weights(files)
    except OSError as error:
        raise BadConfiguration(f"--prefix-cache-path: {error.filename or model}: {error.strerror}") from error
    given = [word for before, word in pairwise(("", *arguments)) if _EVENTS not in (before, word)]
    layouts = sorted(each for each in os.environ.items() if each[0].endswith("KV_CACHE_LAYOUT"))
    key = repr((weights, engine, given, window, sorted({gpu.name for gpu in find_gpus()}), layouts))
    folder = root / f"{engine}-{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    open_folder(folder)
    found = SavedCache(folder, limit, min(limit, usable_memory() // _MEMORY_SHARE))
    found.trim()
    return found


def _files(root: Path) -> Iterator[Path]:
    """Yield blocks, half-written ones included, in folders of ``find_saved_cache``: all else is the user's."""
    for where, folders, names in os.walk(root):
        if where == str(root):
            folders[:] = filter(_FOLDER.fullmatch, folders)
        else:
            yield from (Path(where, name) for name in names if name.endswith((".bin", ".tmp")))


def _name(argument: str) -> str:
    """Return the name of an argument's setting: without a value, ``no-`` and underscores."""
    return argument.partition("=")[0].removeprefix("--").removeprefix("no-").replace("_", "-")


def _is_set(flag: str, given: Sequence[str]) -> bool:
    own, names = _name(flag), {_name(each) for each in given if each.startswith("--")}
    return own in names | {name.partition(".")[0] for name in names} or own.partition(".")[0] in names


StartupStep = tuple[str, str]
"""A step of the start: a regular expression for a line of the log that it begins with, and what the user reads."""


@dataclass(frozen=True, slots=True)
class StartupLimit:
    """A limit at which the start may end.

    Attributes:
        pattern: regular expression for the engine's own message.
        problem: which limit was hit; ``{name}`` stands for a named group of ``pattern``.
        cure: what to change, likewise.
    """

    pattern: str
    problem: str
    cure: str


@dataclass(frozen=True, slots=True)
class EnginePackage:
    """A package that runs a model inside this process.

    Attributes:
        title: its name, for people.
        name: its name for ``--engine``, which is that of its logger and of the extra that installs it, too.
        distributions: those that have it.
        oldest: the oldest version that has the interface used here.
        command: runs it as a server elsewhere.
        log_settings: the environment variable that names a file with settings for Python's ``dictConfig``.
        model, context_window, slots: its flags for the checkpoint, the window and the number of generations.
        refused: flags that its arguments may not have, and what to give instead.
        agent: what agents need.
        saved: makes the arguments that let it save its KV cache, each a flag with its value.
        steps: what it logs while it starts.
        limits: the limits at which its start ends, by its own messages.
        start: starts it with a command line; blocks.
        environment: variables for it, where the user sets none.
    """

    title: str
    name: str
    distributions: tuple[str, ...]
    oldest: tuple[int, ...]
    command: str
    log_settings: str
    model: str
    context_window: str
    slots: str
    refused: Mapping[str, str]
    agent: AgentArguments
    saved: Callable[[SavedCache], tuple[tuple[str, ...], ...]]
    steps: Sequence[StartupStep]
    limits: Sequence[StartupLimit]
    start: Callable[[Sequence[str]], Any]
    environment: Mapping[str, str] = field(default_factory=dict)

    def version(self) -> str:
        """Return the installed version. Raises BadConfiguration when it is missing or too old."""
        cure = (
            f"pip install 'singletree[{self.name}]', or run `{self.command}` elsewhere and give its address with "
            "--engine-url"
        )
        version = installed_version(self.distributions)
        if version is None:
            raise BadConfiguration(f"--engine {self.name}: {self.title} is not installed here: {cure}")
        if tuple(int(part) for part in re.findall(r"\d+", version)[: len(self.oldest)]) < self.oldest:
            wanted = ".".join(map(str, self.oldest))
            raise BadConfiguration(
                f"--engine {self.name}: {self.title} {version} is installed, {wanted} or newer is needed: {cure}"
            )
        return version

    def load(self, settings: EngineSettings, progress: Progress = no_progress) -> Any:
        """Return what ``start`` makes of the engine's arguments. Blocks for as long as the model takes to load.

        The engine's log goes to a file; the console gets its warnings. With ``log_settings`` the user decides, and a
        failure is explained by its exception alone.

        Raises:
            BadConfiguration: the package is not installed or too old, or refuses an argument.
            EngineFailed: it did not start; the message has the limit and the cure.
        """
        self.version()
        for name, value in self.environment.items():
            os.environ.setdefault(name, value)
        log = log_to_file(self.name, self.log_settings)
        with contextlib.nullcontext() if log is None else follow_steps(log, self.steps, progress):
            try:
                return self.start(engine_arguments(settings, self))
            except BadConfiguration:
                raise
            except Exception as error:
                text = "" if log is None else read_log(log)
                where = "" if log is None else f" (its log: {log})"
                reason = explain_failure(f"{text}\n{type(error).__name__}: {error}\n", self.limits)
                raise EngineFailed(f"{self.title} did not start: {reason}{where}") from error

    def parser(
        self, base: type[argparse.ArgumentParser], arguments: Sequence[str]
    ) -> argparse.ArgumentParser:
        """Return a parser of the class ``base`` that refuses ``arguments`` with BadConfiguration."""
        title = self.title

        class Parser(base):  # type: ignore[misc, valid-type]
            def error(self, message: str) -> None:
                raise BadConfiguration(f"{title} refuses its arguments ({' '.join(arguments)}): {message}")

        return Parser(prog=self.name, add_help=False)


def explain_failure(log: str, limits: Sequence[StartupLimit]) -> str:
    """Return which of ``limits`` the engine hit and what to change; else the last errors of its log.

    Args:
        limits: the known ones; the first that matches counts.
    """
    for limit in limits:
        if found := re.search(limit.pattern, log, re.DOTALL):
            given = {name: value or "" for name, value in found.groupdict().items()}
            return f"{limit.problem.format(**given)}; {limit.cure.format(**given)}"
    raised = list(dict.fromkeys(match[1].strip()[:300] for match in _RAISED.finditer(log)))
    return "; ".join(raised[-_LAST_LINES:]) or "its log names no cause"


def follow_steps(
    path: Path, steps: Sequence[StartupStep], progress: Progress
) -> AbstractContextManager[None]:
    """Report each of ``steps`` once, when its line appears in the log at ``path``, until the context ends."""
    remaining, position = list(steps), 0

    def look() -> None:
        nonlocal position
        lines, position = _complete_lines(path, position)
        for line in lines:
            for step in [each for each in remaining if re.search(each[0], line)]:
                remaining.remove(step)
                progress(step[1], 0, None)

    return looking(look, "engine start")


def _complete_lines(path: Path, position: int) -> tuple[list[str], int]:
    """Return the whole lines after byte ``position``, and the position behind them."""
    try:
        with path.open("rb") as file:
            file.seek(position)
            data = file.read()
    except OSError:
        return [], position
    whole = data[: data.rfind(b"\n") + 1]
    return whole.decode("utf-8", "replace").splitlines(), position + len(whole)


def log_to_file(package: str, variable: str) -> Path | None:
    """Make the processes of an engine log to a new file, and return it; None if the user has set up its log.

    Args:
        package: the package, which is also the name of its logger.
        variable: the environment variable that names a file with settings for Python's ``dictConfig``.
    """
    prefix = f"singletree-{package}-"
    given = os.environ.get(variable)
    if given and not Path(given).parent.name.startswith(prefix):
        return None
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    log, settings = folder / f"{package}.log", folder / "logging.json"
    line = {"format": "%(asctime)s %(levelname)s %(process)d %(message)s"}
    handler = {"class": "logging.FileHandler", "filename": str(log), "formatter": "line", "level": "INFO"}
    wanted = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": line},
        "handlers": {"file": handler},
        "loggers": {package: {"handlers": ["file"], "level": "INFO", "propagate": False}},
    }
    settings.write_text(json.dumps(wanted), encoding="utf-8")
    os.environ[variable] = str(settings)
    # SGLang logs before it reads the settings: all its arguments, as one line of thousands of characters.
    logging.config.dictConfig(wanted)
    return log


def read_log(path: Path) -> str:
    """Return the text of the log at ``path``; empty when there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
