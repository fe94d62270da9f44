"""A session as one HTML file: the page, its style and the answers of the API, with nothing loaded from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from singletree.errors import RouteNotFound
from singletree.protocols.wire import dump

FORMAT = 1
_FOLDER = files("singletree.server.inspect") / "page"
_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "svg": "image/svg+xml",
    "png": "image/png",
    "woff2": "font/woff2",
}

PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
"""The content security policy of the page: what it loads comes from the server that served it."""

_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def page_file(name: str) -> tuple[bytes, str]:
    """Return a file of the page and its media type. Raises RouteNotFound where there is none of this name."""
    media_type = _MEDIA_TYPES.get(name.rpartition(".")[2])
    if media_type is not None and "/" not in name and "\\" not in name and not name.startswith("."):
        file = _FOLDER / name
        if file.is_file():
            return file.read_bytes(), media_type
    raise RouteNotFound(f"the inspector has no file {name[:128]!a}")


def export_html(session: str, answers: Mapping[str, Any], *, with_texts: bool) -> bytes:
    """Return the page with the answers that it would get.

    Args:
        session: the session's id.
        answers: the answers of the API, by their paths.
        with_texts: whether they contain texts.
    """
    script, style = (page_file(name)[0].decode() for name in ("inspector.js", "inspector.css"))
    data = {
        "version": FORMAT,
        "made_at": round(time.time(), 3),
        "with_texts": with_texts,
        "session": session,
        "answers": answers,
    }
    policy = (
        f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>Session {session}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="app"></div>\n'
        f'<script type="application/json" id="singletree-export">{embed_json(data)}</script>\n'
        f'<script type="module">{script}</script>\n</body>\n</html>\n'
    ).encode()


def embed_json(value: Any) -> str:
    """Return ``value`` as JSON that no text in it can end: a browser finds no tag in it."""
    return dump(value).decode().translate(_ESCAPES)


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
