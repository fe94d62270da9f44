"""What a stream of ``/inference/v1/generate`` may look like."""

from __future__ import annotations

import json
from typing import Any

from singletree.checking.streams import Decoder

CHOICE = {
    "index", "token_ids", "logprobs", "finish_reason", "stop_reason",
    "routed_experts", "sampling_mask", "weight_versions",
}  # fmt: skip


class Grammar:
    """Reads a stream whole. ``ids``, ``logprobs`` and ``texts`` are each choice's."""

    def __init__(self, stream: bytes) -> None:
        self.ids: dict[int, list[int]] = {}
        self.logprobs: dict[int, list[dict[str, Any]]] = {}
        self.texts: dict[int, str] = {}
        self.ended: dict[int, str] = {}
        self.prompt: list[int] | None = None
        self.usage: dict[str, Any] | None = None
        self.error: dict[str, Any] | None = None
        events = Decoder().feed(stream)
        assert all(event.event == "" for event in events)
        *chunks, last = [event.data for event in events]
        assert last == "[DONE]"
        heads = set()
        for at, chunk in enumerate(map(json.loads, chunks)):
            assert self.error is None
            if "error" in chunk:
                self.error = chunk["error"]
                continue
            heads.add((chunk["request_id"], chunk["output_mode"]))
            if "prompt_token_ids" in chunk:
                assert at == 0, "in the first chunk alone"
                self.prompt = chunk["prompt_token_ids"]
            self.usage = chunk["usage"] or self.usage
            for choice in chunk["choices"]:
                self._choice(choice, text=chunk["output_mode"] == "text")
        assert len(heads) <= 1
        assert self.error or self.ended.keys() == self.ids.keys()

    def _choice(self, choice: dict[str, Any], *, text: bool) -> None:
        assert choice.keys() == (CHOICE | {"text"} if text else CHOICE)
        index = choice["index"]
        assert index not in self.ended
        self.ids.setdefault(index, []).extend(choice["token_ids"])
        if choice["logprobs"]:
            assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
            self.logprobs.setdefault(index, []).extend(choice["logprobs"]["content"])
        self.texts[index] = self.texts.get(index, "") + choice.get("text", "")
        if choice["finish_reason"]:
            self.ended[index] = choice["finish_reason"]
