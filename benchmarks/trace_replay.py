"""Send requests of the recorded shape to a server: a load test from real agent traffic, without its texts.

    python -m benchmarks.trace_replay trace.jsonl --base-url http://127.0.0.1:8000

The files are those of ``singletree serve --trace-path``, or NVIDIA Dynamo's in the same form.

The prompts have the recorded lengths and share the recorded prefixes: each block of a prompt becomes words that its
hash alone decides. A request is sent when all requests of its session that were over before it are answered, and the
recorded time since the last of them has passed. So sub-agents start after the turn that called them, side by side as
they did, and the turn that takes their results waits for all of them, however fast the server is. A session and those
that it started count as one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from benchmarks.trace_records import Replay, TraceRecord, read_records
from singletree.checking.streams import Decoder
from singletree.errors import BadConfiguration
from singletree.remote.http_client import HttpTransport
from singletree.remote.transport import ConnectionLost, Pieces, read_answer

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


def has_shape(record: TraceRecord) -> bool:
    """Tell whether ``record`` is a request that can be sent again."""
    return record.request is not None and record.request.replay is not None


def session_headers(record: TraceRecord) -> dict[str, str]:
    """Return the headers that name the conversation of a request, and the session that started it."""
    agent, request = record.agent, record.request
    is_subagent = request is not None and request.singletree.is_subagent
    parent = agent.parent_session_id or (agent.session_id if is_subagent else "")
    named = {"x-session-id": record.lane, "x-parent-session-id": parent}
    return {name: quote(value, safe="/#:@ ") for name, value in named.items() if value}


def session_families(records: Sequence[TraceRecord]) -> list[list[TraceRecord]]:
    """Return the requests of ``records`` that have a shape, those of a session and of all that it started in one list,
    by their start.
    """
    parents = {record.agent.session_id: record.agent.parent_session_id for record in records}
    families: dict[str, list[TraceRecord]] = defaultdict(list)
    for record in records:
        if has_shape(record):
            top, seen = record.agent.session_id, set[str]()
            # Sessions that name each other as parents end the search, too.
            while (parent := parents.get(top)) and top not in seen:
                seen.add(top)
                top = parent
            families[min(seen) if top in seen else top].append(record)
    return [sorted(family, key=lambda record: record.started) for family in families.values()]


class ReplayOrder:
    """Lets each request of a session wait for those that were over before it began.

    Args:
        records: the requests.
    """

    def __init__(self, records: Sequence[TraceRecord]) -> None:
        by_end = sorted(records, key=lambda record: record.ended)
        self._ends = [record.ended for record in by_end]
        self._places = {id(record): place for place, record in enumerate(by_end)}
        self._is_over = [False] * len(by_end)
        self._over = 0  # How many are over without a gap, in the order of their recorded ends.
        self._waiting: dict[int, asyncio.Event] = {}

    async def turn_of(self, record: TraceRecord) -> float | None:
        """Wait for the requests before ``record``.

        Returns:
            When the last of them ended in the record, in unix milliseconds; None if there is none.
        """
        before = bisect_right(self._ends, record.started)
        # A request that took no time is not before itself.
        before = min(before, self._places[id(record)])
        if before > self._over:
            await self._waiting.setdefault(before, asyncio.Event()).wait()
        return self._ends[before - 1] if before else None

    def end(self, record: TraceRecord) -> None:
        """Let those go on that wait for ``record`` alone."""
        self._is_over[self._places[id(record)]] = True
        while self._over < len(self._is_over) and self._is_over[self._over]:
            self._over += 1
            if (waiting := self._waiting.pop(self._over, None)) is not None:
                waiting.set()


class Replayer:
    """Replays records against one server.

    Args:
        url: the server, without ``/v1``.
        model: the model's name; empty for the one that the server lists first.
        key: its API key; empty for none.
        speed: 2 halves all gaps; infinity leaves them out.
    """

    def __init__(self, url: str, model: str = "", key: str = "", speed: float = 1.0) -> None:
        self._url, self._model, self._key, self._speed = url, model, key, speed

    async def run(self, records: Sequence[TraceRecord]) -> list[Sent]:
        """Send all requests of ``records`` that have a shape, and return what came, in the order of the answers.

        Raises:
            BadConfiguration: no record has a shape, or no server answers.
        """
        families = session_families(records)
        if not families:
            raise BadConfiguration(
                "no record has the shape of its prompt (request.replay); there is nothing to send"
            )
        begin = min(family[0].started for family in families)
        sent: list[Sent] = []
        http = HttpTransport(self._url, api_key=self._key)
        await http.open()
        try:
            self._model = self._model or await self._first_model(http)
            async with asyncio.TaskGroup() as group:
                for family in families:
                    order = ReplayOrder(family)
                    for record in family:
                        group.create_task(self._send_in_order(http, order, record, begin, sent))
        finally:
            await http.close()
        return sent

    async def _first_model(self, http: HttpTransport) -> str:
        try:
            _, answer = await http.get("/v1/models")
            return str(json.loads(answer)["data"][0]["id"])
        except (ConnectionLost, ValueError, LookupError, TypeError) as error:
            raise BadConfiguration(
                f"{self._url} lists no model ({error}); start a server, or give --model"
            ) from None

    async def _send_in_order(
        self, http: HttpTransport, order: ReplayOrder, record: TraceRecord, begin: float, sent: list[Sent]
    ) -> None:
        before = await order.turn_of(record)
        since = begin if before is None else before
        await asyncio.sleep(max(0.0, record.started - since) / 1000 / self._speed)
        try:
            sent.append(await self._send(http, record))
        finally:
            order.end(record)

    async def _send(self, http: HttpTransport, record: TraceRecord) -> Sent:
        request = record.request
        assert request is not None
        assert request.replay is not None
        tokens = max(1, request.output_tokens // request.singletree.choices)
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": prompt_text(request.replay)}],
            "max_tokens": tokens,
            "min_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"n": request.singletree.choices} if request.singletree.choices > 1 else {}),
        }
        began, first, usage, decoder = time.perf_counter(), None, _NO_USAGE, Decoder()

        def ended(error: str = "") -> Sent:
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            counts = (0, 0, 0) if error else (usage["prompt_tokens"], cached, usage["completion_tokens"])
            prompt, had, completion = counts
            return Sent(first, time.perf_counter() - began, prompt, had, completion, error)

        headers = session_headers(record)
        try:
            with closing(http.post("/v1/chat/completions", json.dumps(body).encode(), headers)) as answer:
                await answer.begin()
                if answer.status != 200:
                    reason = (await read_answer(answer, _MAX_ERROR_BYTES)).decode(errors="replace")
                    return ended(f"status {answer.status}: {reason[:200]}")
                async for piece in Pieces(answer):
                    for event in decoder.feed(piece):
                        chunk = {} if event.data == "[DONE]" else json.loads(event.data)
                        if chunk.get("error"):
                            return ended(str(chunk["error"])[:200])
                        if first is None and any(_has_text(choice) for choice in chunk.get("choices") or ()):
                            first = time.perf_counter() - began
                        usage = chunk.get("usage") or usage
        except (ConnectionLost, ValueError, AttributeError) as error:
            return ended(f"{type(error).__name__}: {error}")
        return ended()


_MAX_ERROR_BYTES = 2**16
_NO_USAGE: Mapping[str, Any] = {"prompt_tokens": 0, "completion_tokens": 0}


def _has_text(choice: Mapping[str, Any]) -> bool:
    return any(value for name, value in (choice.get("delta") or {}).items() if name != "role")


def summary(sent: Sequence[Sent], records: Sequence[TraceRecord]) -> dict[str, Any]:
    """Return the latencies and the cached share of ``sent``, beside those that ``records`` have. Times in seconds."""
    good = [each for each in sent if not each.error]
    requests = [record.request for record in records if record.request is not None]
    errors = Counter(each.error for each in sent if each.error)
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


def main() -> None:
    """Send the requests, and print latencies and the cached share beside the recorded ones."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trace_replay", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, help="records, also compressed with gzip")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--model", default="", help="its name; by default the first that the server lists")
    parser.add_argument("--api-key", default="", help="for the server")
    parser.add_argument(
        "--speed", type=float, default=1.0, help="by which the gaps are shorter than recorded"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    records = read_records(options.files)
    root = options.base_url.rstrip("/").removesuffix("/v1")
    replayer = Replayer(root, options.model, options.api_key, options.speed)
    found = summary(asyncio.run(replayer.run(records)), records)
    print(json.dumps(found) if options.json else "\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    recorded = found["recorded"]
    return [
        f"requests         {found['requests']}, of which failed {sum(found['errors'].values())}",
        *(f"                 {count} times {error}" for error, count in found["errors"].items()),
        f"first token      {_times(found['first_token_seconds'])}",
        f"  as recorded    {_times(recorded['first_token_seconds'])}",
        f"between tokens   {_times(found['between_tokens_seconds'])}",
        f"prompt tokens    {found['prompt_tokens']:,} (recorded {recorded['prompt_tokens']:,})",
        f"cached           {found['cached_share']} (recorded {recorded['cached_share']})",
        f"generated        {found['completion_tokens']:,}",
    ]


def _times(found: dict[str, float] | None) -> str:
    return "-" if found is None else ", ".join(f"{name} {value:.3f} s" for name, value in found.items())


if __name__ == "__main__":
    main()
