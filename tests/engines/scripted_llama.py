"""llama.cpp's own server with a sampler that plays scripts: slots, cache, templates and parsers are its own.

It is the server inside xllamacpp, with all its routes: no package index has a ``llama-server`` that runs on every
processor. The models have made-up weights and the states that llama.cpp keeps: keys of all tokens, keys of a window,
or a state that can only go back to a checkpoint. A prompt chooses its script as on the scripted engine.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socketserver
import subprocess
import sys
import threading
import urllib.request
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xllamacpp

from engines import real_vllm, tiny_shapes
from engines.scripted_turns import END, ScriptedTurns
from singletree.prompts.tokenizer.tokenizer import Tokenizer

VERSION = f"b{xllamacpp.__version__.rpartition('.')[2]}"
_SLIDING = {"attention.sliding_window": 512}
_COUNTER = re.compile(
    r"^llamacpp:(prompt_tokens|prompt_tokens_cached|requests)_(?:total|processing) (\S+)$", re.MULTILINE
)
SERVE = """
import json, signal, sys, xllamacpp
params = xllamacpp.CommonParams()
for name, value in json.loads(sys.argv[1]).items():
    holder = params
    *path, name = name.split(".")
    for each in path:
        holder = getattr(holder, each)
    setattr(holder, name, {value} if name == "model_alias" else value)
server = xllamacpp.Server(params)
signal.pause()
"""


def _sampler(folder: Path) -> Path:
    """Return the library with the sampler, compiled from its source."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("the sampler for llama.cpp needs a C++ compiler, and there is none on the PATH")
    source, library = Path(__file__).with_name("llama_sampler.cpp"), folder / "sampler.so"
    command = [compiler, "-std=c++17", "-O2", "-shared", "-fPIC", str(source), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library


def write_model(folder: Path, tokenizer: Tokenizer, shape: str, window: int, file: Path) -> None:
    """Write a model of that shape with the vocabulary of ``folder``, of a tokenizer as Qwen's."""
    definition = json.loads((folder / "tokenizer.json").read_bytes())
    texts = {id: (text, 1) for text, id in definition["model"]["vocab"].items()}
    texts |= {
        each["id"]: (each["content"], 3 if each["special"] else 4) for each in definition["added_tokens"]
    }
    tokens = [texts.get(id, (f"[PAD{id}]", 5)) for id in range(max(texts) + 1)]
    vocabulary = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [text for text, _ in tokens],
        "tokenizer.ggml.token_type": [kind for _, kind in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in definition["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": tokenizer.added_tokens[END],
        "tokenizer.ggml.add_bos_token": False,
    }
    more = {"context_length": window, **(_SLIDING if shape == "sliding" else {})}
    tiny_shapes.write_model(file, shape, vocabulary, more)


class Player(socketserver.ThreadingUnixStreamServer):
    """Answers the token ids of a prompt with those that follow it, and is told when they were all sampled.

    Args:
        folder: for its socket and for the library with the sampler, which asks it.
    """

    daemon_threads = True

    def __init__(self, folder: Path, turns: ScriptedTurns) -> None:
        self.turns = turns
        super().__init__(str(folder / "play"), _Asked)
        self.variables = {
            "LD_PRELOAD": str(_sampler(folder)),
            "LLAMA_SAMPLER_LIBRARY": str(Path(xllamacpp.__file__).with_name("xllamacpp.abi3.so")),
            "LLAMA_SAMPLER_SOCKET": str(folder / "play"),
        }
        """The environment of a process that loads llama.cpp."""
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Asked(socketserver.StreamRequestHandler):
    server: Player

    def handle(self) -> None:
        ended, count = array("i", self.rfile.read(8))
        playing = self.server.turns.begin(array("i", self.rfile.read(4 * count)))
        if ended:
            self.server.turns.write(playing)
        self.wfile.write(array("i", [len(playing.tokens), *playing.tokens]).tobytes())


class ScriptedLlama:
    """llama.cpp's server, which plays ``scripts``.

    Args:
        model: folder of the tokenizer and the chat template.
        shape: of the model, one of ``tiny_shapes.SHAPES``.
        settings: fields of ``xllamacpp.CommonParams`` beside the defaults of ``llama-server``.
        folder: for the model and the logs; ``log`` has the generations since the start.
    """

    def __init__(
        self, model: Path, shape: str, window: int, settings: Mapping[str, Any], scripts: Path, folder: Path
    ) -> None:
        self._folder, self._port = folder, real_vllm.free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self.log = folder / "plays.jsonl"
        turns = ScriptedTurns(model, scripts, self.log)
        self._player = Player(folder, turns)
        self._process: subprocess.Popen[bytes] | None = None
        self._counted = (0, 0)
        write_model(model, turns.tokenizer, shape, window, folder / "model.gguf")
        self._settings: dict[str, Any] = {
            "model.path": str(folder / "model.gguf"),
            "chat_template": json.loads((model / "tokenizer_config.json").read_bytes())["chat_template"],
            "use_jinja": True,
            "n_ctx": window,
            "n_parallel": 4,
            "kv_unified": True,
            "cpuparams.n_threads": 1,
            "cpuparams_batch.n_threads": 1,
            "endpoint_metrics": True,
            "hostnames": ["127.0.0.1"],
            "port": self._port,
            **settings,
        }

    def start(self, name: str) -> None:
        """Start it as ``name``, or start it again: nothing else empties its cache in memory."""
        self.stop()
        command = [sys.executable, "-c", SERVE, json.dumps({**self._settings, "model_alias": name})]
        log = self._folder / "llama-server.log"
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=out,
                env=os.environ | self._player.variables,
                start_new_session=True,
            )
        real_vllm.wait_until_ready(self.url, self._process, log, "llama.cpp")
        self.log.unlink(missing_ok=True)

    def stop(self) -> None:
        """End it."""
        if self._process is not None:
            real_vllm.stop_server(self._process)
            self._process = None

    def counted(self) -> tuple[int, int]:
        """Return the prompt tokens of all requests so far, and those that were in its cache: its own counters.

        While a request is answered, as before it: what was cached is counted before the rest is read.
        """
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            found = {name: int(float(value)) for name, value in _COUNTER.findall(answer.read().decode())}
        if not found["requests"]:
            cached = found["prompt_tokens_cached"]
            self._counted = (found["prompt_tokens"] + cached, cached)
        return self._counted
