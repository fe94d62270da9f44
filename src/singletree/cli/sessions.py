"""``singletree sessions``: fork, move and compare sessions; list, export, import and delete saved states."""

from __future__ import annotations

import shlex
import shutil
import textwrap
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from singletree.cli.flag_values import AsJson, SavedFolder
from singletree.cli.inspect import print_value
from singletree.cli.running_server import RunningServer, session_path
from singletree.cli.session_commands import printable
from singletree.errors import BadConfiguration
from singletree.private_files import open_private

_MOVES = "/v1/singletree/moves"
_TURN_SECONDS = 600
_LEAST_WIDTH = 30


def fork_to_model(
    session: str,
    *,
    model: str,
    at: int | None = None,
    from_now: Annotated[bool, Parameter(negative="")] = False,
    server: RunningServer = RunningServer(),  # noqa: B008 (frozen)
    json: AsJson = False,
) -> None:
    """Let another model go on with a session: show its answer at one turn, or let it answer from now on.

    Parameters
    ----------
    session
        The session's id, as `singletree explain` lists it.
    model
        The model that goes on.
    at
        Number of the turn that it generates anew, from 1; by default the last one. The session does not change.
    from_now
        Let it answer the next requests of the session, and of its sub-agents. The harness need not know.
    """
    if from_now:
        if at is not None:
            raise BadConfiguration("give --at or --from-now: a session moves at its next request only")
        value = server.post(_MOVES, {"session": session, "to": model})
        text = f"{model} answers the requests of session {session} from now on"
    else:
        at = len(server.fetch_session(session, "/turns")["data"]) if at is None else at
        value = server.post(
            f"{session_path(session)}/fork", {"model": model, "at": at}, seconds=_TURN_SECONDS
        )
        hint = f"singletree sessions compare {shlex.quote(session)} {shlex.quote(f'{session}@{at}:{model}')}"
        text = "\n".join([*_answer(value), hint])
    print_value(value) if json else print(text)


def drain_model(
    model: str,
    *,
    to: str | None = None,
    server: RunningServer = RunningServer(),  # noqa: B008 (frozen)
) -> None:
    """Let another model answer all requests for one; without --to, let the model answer again.

    Parameters
    ----------
    model
        The model that gets no more requests. Turns that it is generating go on to their end.
    to
        The model that answers in its place.
    """
    server.post(_MOVES, {"from": model, "to": to})
    print(f"{to or model} answers the requests for {model} from now on")


def compare_sessions(
    one: str,
    two: str,
    *,
    server: RunningServer = RunningServer(),  # noqa: B008 (frozen)
    json: AsJson = False,
) -> None:
    """Show two sessions side by side: tokens, prefill and seconds, and the words and calls of each turn.

    Parameters
    ----------
    one, two
        The ids of the sessions; a fork has the id SESSION@TURN:MODEL.
    """
    sides = [_fetch(server, session) for session in (one, two)]
    if json:
        print_value([{"session": side.session, "turns": side.turns} for side in sides])
        return
    width = max(_LEAST_WIDTH, (shutil.get_terminal_size().columns - 3) // 2)
    for row in _rows(*sides):
        for left, right in zip_longest(*(_wrapped(cell, width) for cell in row), fillvalue=""):
            print(f"{left:{width}} | {right}".rstrip())


class Side(NamedTuple):
    """One of two sessions. ``steps`` are those of the conversation that ``turns`` are of, oldest first."""

    session: dict[str, Any]
    turns: dict[str, Any]
    steps: Sequence[dict[str, Any]]

    def step(self, turn: int) -> dict[str, Any] | None:
        """Return the step of the turn with this number, from 1; None where it is no longer kept."""
        at = turn - 1 - (len(self.turns["data"]) - len(self.steps))
        return self.steps[at] if 0 <= at < len(self.steps) else None


def _fetch(server: RunningServer, session: str) -> Side:
    turns, whole = server.fetch_session(session, "/turns"), server.fetch_session(session)
    steps: list[dict[str, Any]] = []
    for step in whole["steps"]:
        if step["line"] == turns["line"]:
            # A request that goes back, as a fork that is made again, takes the place of what was after it.
            while steps and steps[-1]["prompt_tokens"] >= step["prompt_tokens"]:
                steps.pop()
            steps.append(step)
    return Side(whole, turns, steps)


def _answer(value: dict[str, Any]) -> Iterator[str]:
    choice = value["choices"][0]
    message = choice["message"]
    yield from _written(
        message.get("reasoning_content") or "",
        message.get("content") or "",
        [call["function"] for call in message.get("tool_calls") or ()],
    )
    used = value["usage"]
    yield f"[{value['model']}: {used['prompt_tokens']} prompt tokens, {used['completion_tokens']} generated]"


def _written(reasoning: str, text: str, calls: Sequence[dict[str, str]]) -> Iterator[str]:
    if reasoning.strip():
        yield f"({_printable(reasoning)})"
    if text.strip():
        yield _printable(text)
    for call in calls:
        yield _printable(f"{call['name']} {call['arguments']}")


def _printable(text: str) -> str:
    return "\n".join(map(printable, text.strip().split("\n")))


def _rows(one: Side, two: Side) -> Iterator[tuple[str, str]]:
    yield _printable(one.session["id"]), _printable(two.session["id"])
    yield _sums(one), _sums(two)
    for number, turns in enumerate(zip_longest(one.turns["data"], two.turns["data"]), 1):
        yield "", ""
        if turns[0] == turns[1] and not (one.step(number) and two.step(number)):
            yield f"turn {number}: the same", "the same"
        else:
            left, right = (_turn(side, number, turn) for side, turn in zip((one, two), turns, strict=True))
            yield left, right


def _sums(side: Side) -> str:
    totals = {
        name: sum(step[name] or 0 for step in side.steps)
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "seconds")
    }
    return (
        f"{_printable(side.turns['model'])}: turns {len(side.turns['data'])}, requests {len(side.steps)}; "
        f"{totals['prompt_tokens'] - totals['cached_tokens']} tokens of prefill, {totals['cached_tokens']} cached, "
        f"{totals['generated_tokens']} generated, {totals['seconds']:.1f} s"
    )


def _turn(side: Side, number: int, turn: dict[str, Any] | None) -> str:
    if turn is None:
        return ""
    step = side.step(number)
    spent = ""
    if step is not None:
        # What the engine did not report as cached, it had to read.
        prefilled = step["prompt_tokens"] - (step["cached_tokens"] or 0)
        read = f"{prefilled} of {step['prompt_tokens']} tokens of prefill"
        spent = f": {read}, {step['generated_tokens']} generated, {step['seconds'] or 0:.1f} s"
    return "\n".join([f"turn {number}{spent}", *_written(turn["reasoning"], turn["text"], turn["calls"])])


def _wrapped(text: str, width: int) -> list[str]:
    return [line for part in text.split("\n") for line in textwrap.wrap(part, width) or [""]]


_ID_SHOWN = 12


def _id(path: Path) -> str:
    return path.stem.partition("-")[2]


def list_saved(folder: SavedFolder) -> None:
    """List the saved states of a folder: which can be restored with what, and which are damaged."""
    from singletree.llamacpp.prefix_files import list_states

    states = list_states(_checked(folder))
    print(f"{'id':{_ID_SHOWN}}  {'tokens':>7}  {'MB':>7}  {'last used':16}  {'key':16}  model")
    for path, file in states:
        status = path.stat()
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(status.st_mtime))
        tokens, model = ("", file) if isinstance(file, str) else (file.about.tokens, file.about.origin.name)
        if not isinstance(file, str):
            model += f", llama.cpp {file.about.origin.build}" + (", encrypted" if file.about.seal else "")
        # A file from another machine says itself what its model is called.
        key, model = path.stem.partition("-")[0], printable(model)
        print(f"{_id(path)[:_ID_SHOWN]}  {tokens:>7}  {status.st_size / 1e6:7.1f}  {used}  {key}  {model}")


def export_saved(folder: SavedFolder, id: str, file: Path) -> None:
    """Copy a saved state to a file, for ``singletree sessions import`` on another machine.

    The file contains the prompt; an encrypted state stays encrypted.

    Parameters
    ----------
    id
        The id of the state, or its beginning.
    file
        The file to write, which must not exist.
    """
    from singletree.llamacpp.state_files import StateFile

    path = _find(folder, id)
    with _explained(path), path.open("rb") as source:
        StateFile(source).check()
        source.seek(0)
        with _explained(file), open(file, "xb", opener=open_private) as target:
            shutil.copyfileobj(source, target)


def import_saved(folder: SavedFolder, file: Path, *, model: str | None = None) -> None:
    """Take a saved state from another machine. It is refused if the model, llama.cpp or a setting differs.

    A server that runs finds it when its engine starts again.

    Parameters
    ----------
    file
        What ``singletree sessions export`` wrote.
    model
        The model that goes on with it, as for ``singletree serve``.
    """
    import xllamacpp

    from singletree.engines.checkpoint import DEFAULT_MODEL
    from singletree.llamacpp.prefix_files import import_state
    from singletree.llamacpp.state_files import read_state_origin
    from singletree.llamacpp.worker import state_settings
    from singletree.model_files.resolve import resolve
    from singletree.model_files.saved_cache import open_folder

    weights = resolve(model or DEFAULT_MODEL, gguf=True).path
    settings = state_settings(xllamacpp.CommonParams())
    open_folder(folder)
    with _explained(file):
        path = import_state(folder, file, read_state_origin(weights, xllamacpp.__version__, settings))
    print(_id(path))


def delete_saved(folder: SavedFolder, *ids: str) -> None:
    """Delete saved states.

    Parameters
    ----------
    ids
        The ids of the states, or their beginnings.
    """
    if not ids:
        raise BadConfiguration(f"no id is given; `singletree sessions list {folder}` shows them")
    for path in [_find(folder, id) for id in ids]:
        path.unlink(missing_ok=True)


def _find(folder: Path, id: str) -> Path:
    from singletree.llamacpp.prefix_files import list_states

    found = [path for path, _ in list_states(_checked(folder)) if id and _id(path).startswith(id)]
    if len(found) != 1:
        raise BadConfiguration(
            f"{len(found)} saved states in {folder} begin with {id!r}; `singletree sessions list {folder}` shows them"
        )
    return found[0]


def _checked(folder: Path) -> Path:
    if not folder.is_dir():
        raise BadConfiguration(f"{folder} is no folder; give that of --prefix-cache-path")
    return folder


@contextmanager
def _explained(file: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise BadConfiguration(f"{file} cannot be used: {error}") from None
