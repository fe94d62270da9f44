"""A client of the tests on Ray: it streams Chat Completions, and notices an answer that breaks off."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ray_cluster.real_ray import RayCluster

MODEL = "SmolLM2-135M-Instruct"
ANSWER_SECONDS = 180


_NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()  # noqa: SIM905


def dictated(number: int) -> str:
    """Return a text for ``forced_to``; each number has another one.

    It is long: a client that waits for others while it reads does not stop the engine, which may be ready by then.
    """
    return " ".join(_NUMBERS[(number + 5 * step) % len(_NUMBERS)] for step in range(160)) + "."


def forced_to(text: str) -> dict[str, Any]:
    """Return the fields of a request by which a grammar forces its answer to be ``text``.

    The answer is the same whatever else the engine generates at the same time.
    """
    return {"structured_outputs": {"regex": text.replace(".", r"\.")}, "max_tokens": 400}


class BrokenAnswer(Exception):
    """The connection broke, or the server refused for now: a harness repeats the request."""


@dataclass(frozen=True)
class Answer:
    """A whole answer: its text, the number of its tokens, and why it ended."""

    text: str
    tokens: int
    finish: str
    model: str


def ask(
    cluster: RayCluster,
    messages: Sequence[dict[str, str]],
    on_text: Callable[[int], None] | None = None,
    *,
    session: str = "",
    **more: Any,
) -> Answer:
    """Stream an answer and return all of it.

    Args:
        messages: the conversation.
        on_text: called after each piece of text, with the number of pieces so far.
        session: names the session; empty for none.
        more: further fields of the request.

    Raises:
        BrokenAnswer: the answer has no end.
        urllib.error.HTTPError: the request was refused for good.
    """
    body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
    body |= {"max_tokens": 80, "messages": list(messages)} | more
    headers = {"content-type": "application/json"} | ({"x-singletree-session": session} if session else {})
    request = urllib.request.Request(f"{cluster.url}/v1/chat/completions", json.dumps(body).encode(), headers)
    events: list[dict[str, Any]] = []
    pieces: list[str] = []
    finish, is_whole = "", False
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
            for line in answer:
                is_whole = is_whole or line.startswith(b"data: [DONE]")
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise BrokenAnswer(str(event))
                events.append(event)
                for choice in event["choices"]:
                    finish = choice["finish_reason"] or finish
                    if piece := choice["delta"].get("content"):
                        pieces.append(piece)
                        if on_text is not None:
                            on_text(len(pieces))
    except urllib.error.HTTPError as error:
        if error.code < 500:
            raise
        raise BrokenAnswer(f"{error}: {error.read()[:300]!r}") from error
    except (OSError, http.client.HTTPException) as error:
        raise BrokenAnswer(repr(error)) from error
    if not is_whole:
        raise BrokenAnswer(f"the answer breaks off after {len(pieces)} pieces")
    return Answer("".join(pieces), events[-1]["usage"]["completion_tokens"], finish, events[-1]["model"])
