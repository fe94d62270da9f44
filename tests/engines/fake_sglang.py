"""An ``sglang.Engine`` of this process, with the signatures of SGLang 0.5.23's, for the tests of the engine in process.

``test_sglang_in_process_real.py`` runs the same checks on the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from engines.vllm_recording import END_OF_TURN
from singletree.engines.progress import Progress
from singletree.in_process.sglang_engine import InProcessSglangEngine
from singletree.in_process.startup import EngineSettings

WINDOW = 512


class FakeSglang:
    """Answers as a small model would, a token a step; ``incremental`` as its option of that name."""

    def __init__(
        self, *, incremental: bool = True, ranks: int = 1, grammar: str = "xgrammar", sees: bool = False
    ) -> None:
        self.server_args = SimpleNamespace(
            dp_size=ranks,
            enable_priority_scheduling=True,
            page_size=1,
            schedule_low_priority_values_first=True,
            grammar_backend=grammar,
            max_running_requests=4,
        )
        self.model_config = SimpleNamespace(
            get_default_sampling_params=lambda: {"top_k": 20}, is_image_understandable_model=sees
        )
        self.picture_lengths: dict[str, int] = {}
        self.context_len = WINDOW
        self.tokenizer_manager = self
        self.asked: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.shut_down = 0
        self.refusal: Exception | None = None
        self.ending: dict[str, Any] | None = None
        self.incremental = incremental
        self.ignores_stops = False
        self._known: set[tuple[int, ...]] = set()

    async def async_generate(self, **asked: Any) -> AsyncIterator[dict[str, Any]]:
        """See SGLang; ``refusal`` is raised by the stream, ``ending`` replaces its finish reason."""
        self.asked.append(asked)
        return self._outputs(asked)

    async def _outputs(self, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        if self.refusal is not None:
            raise self.refusal
        prompt, params = asked["input_ids"], asked["sampling_params"]
        cached = len(prompt) - 1 if tuple(prompt) in self._known else 0
        self._known.add(tuple(prompt))
        sent: list[int] = []
        rows: list[Any] = []
        for number in range(params["max_new_tokens"]):
            await asyncio.sleep(0.001)
            if asked["rid"] in self.aborted:
                ended = {
                    "finish_reason": {"type": "abort"},
                    "completion_tokens": len(sent),
                    "cached_tokens": cached,
                }
                yield {"output_ids": sent[-1:], "meta_info": ended}
                return
            ends = number == 30 + sum(prompt) % 30 and not params.get("ignore_eos")
            token = END_OF_TURN if ends else 100 + (sum(prompt) + 7 * number) % 1000
            sent.append(token)
            rows.append((-0.1, token, None))
            ignored = self.ignores_stops and params.get("ignore_eos")
            stops = ends or (not ignored and token in params.get("stop_token_ids", ()))
            last = stops or len(sent) == params["max_new_tokens"]
            reason = self.ending or ({"type": "stop"} if stops else {"type": "length"})
            begin = -1 if self.incremental else 0
            meta: dict[str, Any] = {
                "finish_reason": reason if last else None,
                "completion_tokens": len(sent),
                "cached_tokens": cached,
                "prompt_tokens": len(prompt),
            }
            if pictures := asked.get("image_data"):
                meta["image_tokens"] = sum(self.picture_lengths[each] for each in pictures)
                meta["prompt_tokens"] += meta["image_tokens"] - len(pictures)
            if last:
                meta["weight_versions"] = [{"version": "7", "start": 0, "end": len(sent)}]
            if asked.get("return_logprob"):
                meta["output_token_logprobs"] = rows[begin:]
                meta["output_top_logprobs"] = [
                    [(-0.1, id, None), (-1.5, id + 1, None)] for _, id, _ in rows[begin:]
                ]
                if "logprob_start_len" in asked:
                    meta["input_token_logprobs"] = [
                        (None, prompt[0], None),
                        *((-0.5, id, None) for id in prompt[1:]),
                    ]
            yield {"output_ids": sent[begin:], "meta_info": meta}
            if last:
                return

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """See SGLang."""
        self.aborted.append(rid)

    def shutdown(self) -> None:
        """See SGLang."""
        self.shut_down += 1


def fake_sglang_engine(*engines: FakeSglang) -> InProcessSglangEngine:
    """The engine over ``engines``, each for one start; a new one for each when none is given."""
    given = list(engines)

    def load(settings: EngineSettings, progress: Progress) -> FakeSglang:
        return given.pop(0) if engines else FakeSglang()

    return InProcessSglangEngine(EngineSettings("folder"), name="m", load=load)
