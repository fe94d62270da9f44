"""``singletree sessions list|export|import|delete``: the saved states in a folder of ``--prefix-cache-path``."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from singletree.cli.session_commands import printable
from singletree.errors import BadConfiguration
from singletree.private_files import open_private

_ID_SHOWN = 12


def _id(path: Path) -> str:
    return path.stem.partition("-")[2]


def list_saved(folder: Path) -> None:
    """List the saved states of a folder: which can be restored with what, and which are damaged.

    Parameters
    ----------
    folder
        The folder of --prefix-cache-path.
    """
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


def export_saved(folder: Path, id: str, file: Path) -> None:
    """Copy a saved state to a file, for ``singletree sessions import`` on another machine.

    The file contains the prompt; an encrypted state stays encrypted.

    Parameters
    ----------
    folder
        The folder of --prefix-cache-path.
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


def import_saved(folder: Path, file: Path, *, model: str | None = None) -> None:
    """Take a saved state from another machine. It is refused if the model, llama.cpp or a setting differs.

    A server that runs finds it when its engine starts again.

    Parameters
    ----------
    folder
        The folder of --prefix-cache-path.
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


def delete_saved(folder: Path, *ids: str) -> None:
    """Delete saved states.

    Parameters
    ----------
    folder
        The folder of --prefix-cache-path.
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
