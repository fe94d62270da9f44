"""Make the page of routes from the route table."""

from __future__ import annotations

from singletree.inspector.routes import INSPECT_ROUTES
from singletree.server.http.route_table import ROUTES
from singletree.server.http.service import SCOPES
from singletree.server.turn.protocol import PROTOCOLS
from singletree.training.routes import CAPTURE_ROUTES

_HEAD = """\
# Routes

Every route of the server, made from `src/singletree/server/http/route_table.py`. `/openapi.json` describes them for
programs. Errors have the form of the protocol; on routes without one, that of the client: Anthropic's where a request
has `anthropic-version`, else OpenAI's. Routes of an API are also below `/anthropic`, `/openai`, `/api/v1` and
`/v1/v1`, which base URLs of other servers bring, and with `--capture` below `/sessions/NAME`.
With `--key-file` a key needs the right for its routes ([rights](security.md#names-rights-and-rates-in-a-file-of-keys)).
`POST /v1/responses/compact` answers with what is left of the conversation, and a summary that the model writes.

| route | what it does | protocol | who may use it |
| --- | --- | --- | --- |
"""


def page() -> str:
    """Return the text of routes.md."""
    rows = [row.loaded() for row in (*ROUTES, *INSPECT_ROUTES, *CAPTURE_ROUTES)]
    return _HEAD + "".join(
        f"| `{row.method} {row.path}` | {row.summary} | {_protocol(row.path)} | {SCOPES[row.scope].meaning} |\n"
        for row in rows
    )


def _protocol(path: str) -> str:
    return next(
        (e.name for start, e in PROTOCOLS.items() if path == start or path.startswith(f"{start}/")), ""
    )
