"""Requests of the commands to a running singletree server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPException
from typing import Annotated, Any
from urllib.parse import quote, urlsplit

from cyclopts import Parameter

from singletree.cli.flag_values import Secret
from singletree.errors import BadConfiguration
from singletree.server.sessions import PATH

DEFAULT_URL = "http://127.0.0.1:8000"

_SECONDS = 5


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RunningServer:
    """The running server that a command asks."""

    base_url: Annotated[str, Parameter(name=["--base-url", "--url"], env_var="SINGLETREE_BASE_URL")] = (
        DEFAULT_URL
    )
    """URL of the server."""

    api_key: Secret = ""
    """API key for the server, or @FILE."""

    @property
    def root(self) -> str:
        """The URL without ``/v1``."""
        return self.base_url.rstrip("/").removesuffix("/v1")

    def fetch(self, path: str, body: bytes | None = None, *, seconds: float = _SECONDS) -> dict[str, Any]:
        """Get the JSON object at ``path``, or the one that answers ``body``, within ``seconds``.

        Raises:
            BadConfiguration: no server answers there, or its answer is an error or not a JSON object.
        """
        try:
            value = json.loads(self.fetch_bytes(path, body, seconds=seconds))
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise BadConfiguration(
                f"{self.root} does not answer {path} with a JSON object; is it singletree?"
            )
        return value

    def fetch_session(self, session: str, below: str = "") -> dict[str, Any]:
        """Get the report of a session, or what is ``below`` it. Raises BadConfiguration as ``fetch`` does."""
        return self.fetch(session_path(session) + below)

    def post(self, path: str, body: dict[str, Any], *, seconds: float = _SECONDS) -> dict[str, Any]:
        """Send a JSON object to ``path``, and return the one that answers. Raises BadConfiguration as ``fetch``."""
        return self.fetch(path, json.dumps(body).encode(), seconds=seconds)

    def fetch_bytes(self, path: str, body: bytes | None = None, *, seconds: float) -> bytes:
        """Get what is at ``path``, or what answers ``body``. Raises BadConfiguration as ``fetch``, for any content."""
        url = self.root
        if not _is_url(url):
            raise BadConfiguration(f"--base-url {url!r} is not a URL; give one such as {DEFAULT_URL}")
        request = urllib.request.Request(f"{url}{path}", body, {"Authorization": f"Bearer {self.api_key}"})
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                data: bytes = answer.read()
                return data
        except urllib.error.HTTPError as error:
            raise BadConfiguration(f"{url} answers with status {error.code}; {_cure(error)}") from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            reason = getattr(reason, "strerror", None) or reason
            raise BadConfiguration(
                f"no server at {url} ({reason}); start one with `singletree serve`"
            ) from None
        except (HTTPException, ValueError):
            raise BadConfiguration(f"{url} does not answer {path} as HTTP; is it singletree?") from None

    def print_lines(self, lines: Iterator[str]) -> None:
        """Print ``lines`` that are made of an answer. Raises BadConfiguration for an answer of another form."""
        try:
            text = "\n".join(lines)
        except (KeyError, TypeError, ValueError, OverflowError, OSError):
            raise BadConfiguration(
                f"cannot read the answer of {self.base_url}, which may run another version of singletree; "
                "--json prints the answer as it is"
            ) from None
        print(text)


def session_path(session: str) -> str:
    """Return the path of the report of a session."""
    return f"{PATH}/{quote(session, safe='/')}"


def _cure(error: urllib.error.HTTPError) -> str:
    """Return the server's own error message where it has our format, else a hint."""
    if error.code == 401:
        return "give --api-key"
    try:
        return str(json.load(error)["error"]["message"])
    except (OSError, HTTPException, ValueError, KeyError, TypeError):
        return "is it singletree?"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False
