"""A logits processor for a real vLLM: the scheduler, the model and the prefix cache work, and a script is sampled.

vLLM loads it into the process of its workers: ``--logits-processors engines.scripted_sampler:ScriptedSampler``. A
prompt chooses its script by the same markers as on the scripted engine (``ScriptChooser``), and what is generated goes
to a log in the scripted engine's form. ``SCRIPTS`` and ``LOG`` are environment variables with the paths of both.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import LogitsProcessor

from singletree.errors import InvalidRequest
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.testing.scripts import Script, ScriptBook, ScriptChooser

SCRIPTS = "SINGLETREE_SAMPLER_SCRIPTS"
LOG = "SINGLETREE_SAMPLER_LOG"
_END = "<|im_end|>"
_DEFAULT = Script("Hello there.")


@dataclass(slots=True)
class _Playing:
    """One generation: what it samples, and the list of what it has sampled, which vLLM extends."""

    script: str
    prompt: list[int]
    tokens: tuple[int, ...]
    sampled: list[int]
    logged: bool = False


class ScriptedSampler(LogitsProcessor):  # type: ignore[misc]
    """Leave one token possible in each step: the script's next one, and at last the end token."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        self._tokenizer = Tokenizer(read_directory(Path(vllm_config.model_config.tokenizer)))
        encode, decode = self._tokenizer.encode, self._tokenizer.decode
        book = ScriptBook(Path(os.environ[SCRIPTS]), encode)
        self._chooser = ScriptChooser(book, _DEFAULT, encode, decode)
        self._end = self._tokenizer.added_tokens[_END]
        self._log = Path(os.environ[LOG])
        self._playing: dict[int, _Playing] = {}

    def is_argmax_invariant(self) -> bool:
        """Return False: it decides what greedy sampling finds."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Take over which generations are in the batch, and in which row."""
        process_dict_updates(self._playing, batch_update, self._begin)

    def apply(self, logits: Any) -> Any:
        """Exclude all tokens but one in each row of ``logits``."""
        for row, playing in self._playing.items():
            at = len(playing.sampled)
            token = playing.tokens[at] if at < len(playing.tokens) else self._end
            logits[row] = float("-inf")
            logits[row, token] = 0.0
            if at == len(playing.tokens) - 1 and not playing.logged:
                self._write(playing)
        return logits

    def _begin(self, params: Any, prompt: list[int] | None, sampled: list[int]) -> _Playing:
        try:
            name, script = self._chooser.choose(prompt or [])
        except InvalidRequest as error:  # An exception would end vLLM; as text, the test that reads it fails.
            name, script = "", Script(tokens=tuple(self._tokenizer.encode(error.message)))
        return _Playing(name, prompt or [], (*script.tokens, self._end), sampled)

    def _write(self, playing: _Playing) -> None:
        playing.logged = True
        record = {
            "script": playing.script,
            "prompt": self._tokenizer.decode(playing.prompt),
            "prompt_token_ids": playing.prompt,
            "token_ids": playing.tokens,
            "finish": "stop",
        }
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
