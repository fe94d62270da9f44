"""Send requests of the recorded shape to a server: a load test from real agent traffic, without its texts.

The prompts have the recorded lengths and share the recorded prefixes: each block of a prompt becomes words that its
hash alone decides. A session sends a request when the one before is answered and the recorded time between them has
passed.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from singletree.cli.trace_records import Replay, TraceRecord
from singletree.errors import BadConfiguration

_WORDS = (
    "the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "he",
    "his", "but", "at", "are", "this", "have", "from", "or", "had", "an", "they", "which", "one", "you", "were", "her",
    "all", "she", "there", "would", "their", "we", "him", "been", "has", "when", "who", "will", "more", "no", "if",
    "out", "so", "what", "up", "its", "about", "into", "than", "them", "can", "only", "other", "new", "some", "time",
)  # fmt: skip
"""Words that are one token each in the vocabularies of most models, with the space before them."""


@dataclass(frozen=True, slots=True)
class Sent:
    """One request that was answered. Times are in seconds; ``first`` is None if no token came."""

    first: float | None
    took: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    error: str = ""


def prompt_text(replay: Replay) -> str:
    """Return a text of about as many tokens as the recorded prompt. Prompts share its beginning as the recorded did."""
    left, texts = replay.input_length, []
    for hash_ in replay.input_sequence_hashes:
        count = min(left, replay.trace_block_size)
        left -= count
        texts.append(" ".join(random.Random(hash_).choices(_WORDS, k=count)))
    return " ".join(texts)


class Replayer:
    """Replays records against one server.

    Args:
        url: the server, without ``/v1``.
        model: the model's name; empty for the one that the server lists first.
        key: its API key; empty for none.
        speed: 2 halves all gaps; infinity leaves them out.
    """

    def __init__(self, url: str, model: str = "", key: str = "", speed: float = 1.0) -> None:
        self._url, self._model, self._speed = url, model, speed
        self._headers = {"authorization": f"Bearer {key}"} if key else {}

    async def run(self, records: Sequence[TraceRecord]) -> list[Sent]:
        """Send all requests of ``records`` that have a shape, and return what came, in the order of the answers.

        Raises:
            BadConfiguration: no record has a shape, or no server answers.
        """
        lanes: dict[tuple[str, str], list[TraceRecord]] = defaultdict(list)
        for record in records:
            if record.request is not None and record.request.replay is not None:
                lanes[record.agent.session_id, record.lane].append(record)
        if not lanes:
            raise BadConfiguration(
                "no record has the shape of its prompt (request.replay); there is nothing to send"
            )
        begin = min(lane[0].started for lane in lanes.values())
        sent: list[Sent] = []
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout, connector=connector) as http:
            self._model = self._model or await self._first_model(http)
            async with asyncio.TaskGroup() as group:
                for lane in lanes.values():
                    group.create_task(self._send_lane(http, lane, begin, sent))
        return sent

    async def _first_model(self, http: aiohttp.ClientSession) -> str:
        try:
            async with http.get(f"{self._url}/v1/models") as answer:
                return str((await answer.json())["data"][0]["id"])
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            raise BadConfiguration(
                f"{self._url} lists no model ({error}); start a server, or give --model"
            ) from None

    async def _send_lane(
        self, http: aiohttp.ClientSession, lane: Sequence[TraceRecord], begin: float, sent: list[Sent]
    ) -> None:
        before = begin
        for record in lane:
            await asyncio.sleep(max(0.0, record.started - before) / 1000 / self._speed)
            sent.append(await self._send(http, record))
            before = record.ended

    async def _send(self, http: aiohttp.ClientSession, record: TraceRecord) -> Sent:
        request = record.request
        assert request is not None
        assert request.replay is not None
        tokens = max(1, request.output_tokens)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt_text(request.replay)}],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began, first, usage = time.perf_counter(), None, _NO_USAGE
        headers = {"x-session-id": record.agent.session_id} if record.agent.session_id else {}
        try:
            async with http.post(f"{self._url}/v1/chat/completions", json=body, headers=headers) as answer:
                if answer.status != 200:
                    error = f"status {answer.status}: {(await answer.text())[:200]}"
                    return Sent(None, time.perf_counter() - began, 0, 0, 0, error)
                async for line in answer.content:
                    chunk = _chunk(line)
                    if chunk.get("error"):
                        return Sent(first, time.perf_counter() - began, 0, 0, 0, str(chunk["error"])[:200])
                    if first is None and any(_has_text(choice) for choice in chunk.get("choices") or ()):
                        first = time.perf_counter() - began
                    usage = chunk.get("usage") or usage
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Sent(first, time.perf_counter() - began, 0, 0, 0, f"{type(error).__name__}: {error}")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        took = time.perf_counter() - began
        return Sent(first, took, usage["prompt_tokens"], cached, usage["completion_tokens"])


_NO_USAGE: Mapping[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0}


def _chunk(line: bytes) -> Mapping[str, Any]:
    if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
        return {}
    value = json.loads(line[5:])
    return value if isinstance(value, dict) else {}


def _has_text(choice: Mapping[str, Any]) -> bool:
    return any(value for name, value in (choice.get("delta") or {}).items() if name != "role")


def summary(sent: Sequence[Sent], records: Sequence[TraceRecord]) -> dict[str, Any]:
    """Return the latencies and the cached share of ``sent``, beside those that ``records`` have. Times in seconds."""
    good = [each for each in sent if not each.error]
    requests = [record.request for record in records if record.request is not None]
    errors: dict[str, int] = defaultdict(int)
    for each in sent:
        if each.error:
            errors[each.error] += 1
    read = sum(each.prompt_tokens for each in good)
    recorded = sum(request.input_tokens or 0 for request in requests)
    return {
        "requests": len(sent),
        "errors": dict(errors),
        "first_token_seconds": _quantiles([each.first for each in good if each.first is not None]),
        "between_tokens_seconds": _quantiles(
            [
                (each.took - each.first) / (each.completion_tokens - 1)
                for each in good
                if each.first is not None and each.completion_tokens > 1
            ]
        ),
        "prompt_tokens": read,
        "completion_tokens": sum(each.completion_tokens for each in good),
        "cached_share": _share(sum(each.cached_tokens for each in good), read),
        "recorded": {
            "first_token_seconds": _quantiles(
                [request.ttft_ms / 1000 for request in requests if request.ttft_ms is not None]
            ),
            "prompt_tokens": recorded,
            "cached_share": _share(sum(request.cached_tokens or 0 for request in requests), recorded),
        },
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _quantiles(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"p50": round(cuts[49], 4), "p90": round(cuts[89], 4), "p99": round(cuts[98], 4)}
