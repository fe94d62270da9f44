"""What a real engine samples when it plays scripts: one piece for vLLM, SGLang and llama.cpp.

A prompt chooses its script by the same markers as on the scripted engine (``ScriptChooser``), and what was generated to
its end goes to a log in the scripted engine's form.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from singletree.errors import InvalidRequest
from singletree.prompts.tokenizer.huggingface import read_directory
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.testing.scripts import Script, ScriptBook, ScriptChooser

SCRIPTS, LOG = "SINGLETREE_SAMPLER_SCRIPTS", "SINGLETREE_SAMPLER_LOG"
"""Environment variables with the folder of scripts and the path of the log."""
END = "<|im_end|>"
_DEFAULT = Script("Hello there.")


@dataclass(slots=True)
class Playing:
    """One generation: its prompt, and the tokens that follow it, of which the last ends the turn."""

    script: str
    prompt: list[int]
    tokens: tuple[int, ...]
    logged: bool = False


class ScriptedTurns:
    """Chooses what follows a prompt.

    Args:
        model: folder with the files of a tokenizer as Qwen's.
        scripts: folder of scripts.
        log: gets a line of JSON for each generation that comes to its end.
    """

    def __init__(self, model: Path, scripts: Path, log: Path) -> None:
        self.tokenizer = Tokenizer(read_directory(model))
        encode, decode = self.tokenizer.encode, self.tokenizer.decode
        self._chooser = ScriptChooser(ScriptBook(scripts, encode), _DEFAULT, encode, decode)
        self._end = self.tokenizer.added_tokens[END]
        self._log = log

    @classmethod
    def of_environment(cls, model: Path) -> ScriptedTurns:
        """Return those of an engine's process, which was started with ``SCRIPTS`` and ``LOG``."""
        return cls(model, Path(os.environ[SCRIPTS]), Path(os.environ[LOG]))

    def begin(self, prompt: Sequence[int]) -> Playing:
        """Return the generation that ``prompt`` begins."""
        try:
            name, script = self._chooser.choose(prompt)
        except (
            InvalidRequest
        ) as error:  # An exception would end the engine; as text, the test that reads it fails.
            name, script = "", Script(tokens=tuple(self.tokenizer.encode(error.message)))
        return Playing(name, list(prompt), (*script.tokens, self._end))

    def next_token(self, playing: Playing, at: int) -> int:
        """Return the token after ``at`` tokens of the turn, and log the turn when that is its last one."""
        if at >= len(playing.tokens) - 1 and not playing.logged:
            self.write(playing)
        return playing.tokens[min(at, len(playing.tokens) - 1)]

    def write(self, playing: Playing) -> None:
        """Log a generation that has come to its end."""
        playing.logged = True
        record = {
            "script": playing.script,
            "prompt": self.tokenizer.decode(playing.prompt),
            "prompt_token_ids": playing.prompt,
            "token_ids": playing.tokens,
            "finish": "stop",
        }
        with self._log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
