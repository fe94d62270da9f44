"""``singletree inspect``: open the inspector of a running server, or save one of its sessions as a file."""

from __future__ import annotations

import sys
import webbrowser
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from cyclopts import Parameter

from singletree.cli.running_server import RunningServer
from singletree.errors import BadConfiguration
from singletree.private_files import create_private

_PAGE = "/inspect"
_EXPORT_SECONDS = 120


def inspect(
    session: str | None = None,
    *,
    server: RunningServer = RunningServer(),  # noqa: B008 (frozen)
    open: bool = True,
    export: str | None = None,
    output: Annotated[Path | None, Parameter(name=["-o", "--output"])] = None,
    without_texts: Annotated[bool, Parameter(negative="")] = False,
) -> None:
    """Open the page that shows what the agents of a running server do. The server needs --inspect.

    Parameters
    ----------
    session
        The session to show, by its id or by its name in the server's log; the list of sessions by default.
    open
        Open a browser; the URL is printed in any case.
    export
        Save this session as one HTML file instead.
    output
        The file; SESSION.html by default.
    without_texts
        Leave prompts, answers and requests out of the file.
    """
    # Says how to start the server where the inspector is off.
    state = server.fetch(f"{_PAGE}/api/server")
    if export is not None:
        _export(server, export, output, without_texts=without_texts)
        return
    if output is not None or without_texts:
        raise BadConfiguration("--output and --without-texts belong to --export SESSION; give that as well")
    place = "/sessions" if session is None else f"/sessions/{_session_id(session)}"
    url = f"{server.root}{_PAGE}#{place}"
    print(url)
    if not state.get("content"):
        print("texts are not kept; start the server with --inspect-content to see them", file=sys.stderr)
    if server.api_key:
        # It is not put into the URL: the command line of a browser can be read by others.
        print("the page asks for the API key", file=sys.stderr)
    if open:
        _open(url)


def _session_id(session: str) -> str:
    from singletree.inspector.turn_record import known_session_id

    return known_session_id(session)


def _open(url: str) -> None:
    try:
        webbrowser.get()
    except webbrowser.Error:
        return
    webbrowser.open(url)


def _export(server: RunningServer, session: str, output: Path | None, *, without_texts: bool) -> None:
    texts = "0" if without_texts else "1"
    path = f"{_PAGE}/api/export?session={quote(session, safe='')}&texts={texts}"
    document = server.fetch_bytes(path, seconds=_EXPORT_SECONDS)
    file = output or Path(f"singletree-{_session_id(session)}.html")
    create_private(file)
    file.write_bytes(document)
    print(f"{file} ({len(document):,} bytes)")
