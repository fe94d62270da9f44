"""What a Completions stream may look like."""

from __future__ import annotations

import json
from typing import Any

from singletree.checking.streams import Decoder

HEAD = ("id", "object", "created", "model")
FIELDS = {"index", "text", "logprobs", "finish_reason"}
REPORTED = {"prompt_token_ids", "token_ids"}


class Grammar:
    """Reads a stream whole. ``texts`` and ``ids`` are each choice's."""

    def __init__(self, stream: bytes) -> None:
        self.texts: dict[int, str] = {}
        self.ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[dict[str, Any]]] = {}
        self.ended: dict[int, str] = {}
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        events = Decoder().feed(stream)
        assert all(event.event == "" for event in events)
        *chunks, last = [event.data for event in events]
        assert last == "[DONE]"
        heads = set()
        for chunk in map(json.loads, chunks):
            assert self.error is None
            assert self.usage is None
            if "error" in chunk:
                self.error = chunk["error"]
                continue
            heads.add(tuple(chunk[name] for name in HEAD))
            assert chunk["object"] == "text_completion"
            if not chunk["choices"]:
                self.usage = chunk["usage"]
            for choice in chunk["choices"]:
                self._choice(choice)
        assert len(heads) <= 1
        assert self.error or self.ended.keys() == self.texts.keys()

    def _choice(self, choice: dict[str, Any]) -> None:
        assert FIELDS <= choice.keys() <= FIELDS | REPORTED
        index = choice["index"]
        assert index not in self.ended
        self.texts[index] = self.texts.get(index, "") + choice["text"]
        self.ids.setdefault(index, []).extend(choice.get("token_ids", ()))
        if choice["logprobs"]:
            self.logprobs.setdefault(index, []).append(choice["logprobs"])
        if choice["finish_reason"]:
            self.ended[index] = choice["finish_reason"]
