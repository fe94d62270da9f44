"""A logits processor for a real vLLM: the scheduler, the model and the prefix cache work, and a script is sampled.

vLLM loads it into the process of its workers: ``--logits-processors engines.scripted_sampler:ScriptedSampler``, with
the environment variables of ``scripted_turns``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor

from engines.scripted_turns import Playing, ScriptedTurns


class ScriptedSampler(LogitsProcessor):  # type: ignore[misc]
    """Leave one token possible in each step: the script's next one, and at last the end token."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._turns = ScriptedTurns.of_environment(Path(vllm_config.model_config.tokenizer))
        # With each generation the list of what it has sampled, which vLLM extends.
        self._playing: dict[int, tuple[Playing, list[int]]] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: it decides what greedy sampling finds."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Take over which generations are in the batch, and in which row."""
        process_dict_updates(self._playing, batch_update, self._begin)

    def apply(self, logits: Any) -> Any:
        """Exclude all tokens but one in each row of ``logits``."""
        for row, (playing, sampled) in self._playing.items():
            logits[row] = float("-inf")
            logits[row, self._turns.next_token(playing, len(sampled))] = 0.0
        return logits

    def _begin(self, params: Any, prompt: list[int] | None, sampled: list[int]) -> tuple[Playing, list[int]]:
        return self._turns.begin(prompt or []), sampled
