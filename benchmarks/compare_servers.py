"""One real vLLM whose sampler plays scripts, and the servers that stand in front of it: the rows of ``make compare``.

Every row uses the same engine process: vLLM's own API server is a part of it, singletree and Dynamo send it token ids,
LiteLLM sends it requests of Chat Completions. llama.cpp's server is an engine of its own, with rows of its own. What a
prompt costs is read from the engine's own counters.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import peers, servers
from benchmarks.servers import Running
from benchmarks.template_models import Scripted
from clients.served import SAMPLER, Play
from clients.served_engines import SGLANG_PLAYER
from engines import real_sglang, real_vllm, scripted_llama
from engines.scripted_llama import ScriptedLlama
from engines.scripted_turns import LOG, SCRIPTS

NAMES = ("local-model", "claude-opus-4-8")
"""Names of the model: its own, and one under which Claude Code writes its countdown of tokens."""

TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
"""The shape of a model of one small layer: fields of its configuration."""

LITELLM = "1.110.2"
WINDOW = 131_072
_READY_SECONDS = 600.0
_PARSERS = {"qwen3_coder": "qwen3_coder", "hermes": "hermes", "qwen3": "hermes"}
"""By family: vLLM's parser of calls, as the recipe of the model names it."""


@dataclass(frozen=True, slots=True)
class Counted:
    """Prompt tokens that the engine has looked up in its cache so far, and those that it found there."""

    prompt: int
    cached: int


class Engine:
    """vLLM, running; ``kind`` is singletree's name of it.

    Args:
        url: of its API server.
        calls: vLLM's and Dynamo's name of the parser of the model's calls.
        scripts: folder of what its sampler plays.
        log: file with a line of JSON for each generation.
    """

    kind = "vllm"
    counters = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
    reset = "reset_prefix_cache"

    def __init__(self, url: str, model: Path, calls: str, scripts: Path, log: Path) -> None:
        self.url, self.model, self.calls = url, model, calls
        self.scripts = scripts
        self._log = log

    def counted(self) -> Counted:
        """Read its counters."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            found = re.findall(r"^(\S+)\{.*\} (\S+)$", answer.read().decode(), re.MULTILINE)
        sums = (sum(float(value) for name, value in found if name == counter) for counter in self.counters)
        return Counted(*map(int, sums))

    def forget(self, name: str = NAMES[0]) -> None:
        """Empty its prefix cache and its log; an engine that has but one name takes this one."""
        urllib.request.urlopen(f"{self.url}/{self.reset}", b"", timeout=60).close()
        self._log.unlink(missing_ok=True)

    def plays(self) -> list[Play]:
        """Return the generations since ``forget``, oldest first."""
        lines = self._log.read_text(encoding="utf-8").splitlines() if self._log.exists() else []
        return [Play(**{field: record[field] for field in Play._fields}) for record in map(json.loads, lines)]


class Watch:
    """Reads the counters of an engine again and again while a session runs: one step a request, as they come one
    after another.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self.steps: list[Counted] = []

    def __enter__(self) -> Watch:
        self._last = self._engine.counted()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(1.0)  # vLLM publishes its counters once a step of the engine.
        self._ended.set()
        self._thread.join()

    def _read(self) -> None:
        while not self._ended.wait(0.02):
            now = self._engine.counted()
            if now != self._last:
                self.steps.append(Counted(now.prompt - self._last.prompt, now.cached - self._last.cached))
                self._last = now


class Host(NamedTuple):
    """Where vLLM runs, and on what.

    Attributes:
        command: starts ``vllm serve``.
        environment: of that process.
        shape: fields of the configuration of a model with made-up weights.
        flags: further ones of ``vllm serve``.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    shape: Mapping[str, Any]
    flags: Sequence[str] = ()


def cpu() -> Host:
    """Install vLLM's build for the CPU where it is missing, and return it with a shape of one small layer."""
    venv, _ = real_vllm.install_in_process()
    environment = real_vllm.environment() | {"PYTHONPATH": real_vllm.PYTHONPATH}
    return Host([str(venv / "bin" / "vllm"), "serve"], environment, TINY)


_REFUSAL = "{{- raise_exception('System message must be at the beginning.') }}"


def opened(model: Scripted) -> Scripted:
    """Return the model with a chat template that takes a ``system`` message anywhere, as users are advised."""
    folder = model.folder.with_name(f"{model.folder.name}-open")
    if not folder.exists():
        shutil.copytree(model.folder, folder)
        file = folder / "tokenizer_config.json"
        settings = json.loads(file.read_text(encoding="utf-8"))
        turn = r"{{- '<|im_start|>system\n' + content + '<|im_end|>\n' }}"
        settings["chat_template"] = settings["chat_template"].replace(_REFUSAL, turn)
        file.write_text(json.dumps(settings), encoding="utf-8")
    return model._replace(folder=folder)


def _configure(model: Scripted, shape: Mapping[str, Any]) -> None:
    known = json.loads((peers.QWEN3 / "config.json").read_text(encoding="utf-8"))
    (model.folder / "config.json").write_text(json.dumps(known | dict(shape)), encoding="utf-8")


@contextmanager
def engine(model: Scripted, host: Host, scripts: Path) -> Iterator[Engine]:
    """Start vLLM on a model with made-up weights, whose sampler plays the scripts of a folder."""
    calls = _PARSERS[model.name]
    _configure(model, host.shape)
    port = real_vllm.free_port()
    command = [*host.command, str(model.folder), "--served-model-name", *NAMES]
    command += ["--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(WINDOW)]
    command += ["--load-format", "dummy", "--enforce-eager", "--max-num-seqs", "8", "--enable-scale-out"]
    command += ["--enable-prompt-tokens-details", "--logits-processors", SAMPLER]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", calls]
    # With a parser of reasoning, vLLM applies the grammars of a request only behind it, unless this is set.
    command += ["--reasoning-parser", "qwen3"]
    command += ["--structured-outputs-config", json.dumps({"enable_in_reasoning": True}), *host.flags]
    with tempfile.TemporaryDirectory(prefix="singletree-compare-") as folder:
        log = Path(folder) / "plays.jsonl"
        variables = {**host.environment, SCRIPTS: str(scripts), LOG: str(log)}
        variables["VLLM_SERVER_DEV_MODE"] = "1"  # for /reset_prefix_cache
        with servers.running("vLLM", port, command, variables, _READY_SECONDS) as server:
            yield Engine(server.url, model.folder, calls, scripts, log)


class _Llama(Engine):
    kind = "llama-server"

    def __init__(self, running: ScriptedLlama, model: Path, scripts: Path) -> None:
        super().__init__(running.url, model, "", scripts, running.log)
        self._running = running

    def counted(self) -> Counted:
        return Counted(*self._running.counted())

    def forget(self, name: str = NAMES[0]) -> None:
        self._running.start(name)


@contextmanager
def llama_engine(model: Scripted, shape: str, settings: Mapping[str, Any], scripts: Path) -> Iterator[Engine]:
    """Start llama.cpp's server on a model of that shape, with settings beside its defaults."""
    with tempfile.TemporaryDirectory(prefix="singletree-compare-") as place:
        running = ScriptedLlama(model.folder, shape, WINDOW, settings, scripts, Path(place))
        try:
            running.start(NAMES[0])
            yield _Llama(running, model.folder, scripts)
        finally:
            running.stop()


class _SGLang(Engine):
    kind = "sglang"
    counters = ("sglang:prompt_tokens_total", "sglang:cached_tokens_total")
    reset = "flush_cache"

    def __init__(self, start: Callable[[str], str], model: Path, scripts: Path, log: Path) -> None:
        self._start, self._name = start, NAMES[0]
        super().__init__(start(self._name), model, "", scripts, log)

    def forget(self, name: str = NAMES[0]) -> None:
        if name != self._name:
            self._name = name
            self._start(name)
        super().forget()


@contextmanager
def sglang_engine(model: Scripted, scripts: Path) -> Iterator[Engine]:
    """Start SGLang on a model with made-up weights, which plays the scripts of a folder."""
    _configure(model, {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"})
    flags = ["--load-format", "dummy", "--context-length", str(WINDOW), "--max-total-tokens", str(WINDOW)]
    flags += ["--enable-metrics", "--tool-call-parser", _PARSERS[model.name], "--reasoning-parser", "qwen3"]
    real_sglang.sglang_program()  # with what singletree needs, of which the player of the scripts is a part
    port = real_vllm.free_port()
    with tempfile.TemporaryDirectory(prefix="singletree-compare-") as folder, ExitStack() as running:
        log = Path(folder) / "plays.jsonl"
        variables = {**SGLANG_PLAYER, SCRIPTS: str(scripts), LOG: str(log)}

        def start(name: str) -> str:
            running.close()
            own = [*flags, "--served-model-name", name]
            server = real_sglang.running_sglang(*own, port=port, folder=model.folder, variables=variables)
            return running.enter_context(server).url

        yield _SGLang(start, model.folder, scripts, log)


_KEY = "one key: each singletree of a run reads the turns that another one generated"


def _singletree(engine: Engine) -> AbstractContextManager[Running]:
    flags = ("--engine-url", engine.url, "--engine", engine.kind, "--model", str(engine.model))
    names = ("--model-name", NAMES[0], "--model-name", NAMES[1])
    key = ("--capsule-key", _KEY)
    return servers.singletree(flags=(*flags, *names, *key), patience=_READY_SECONDS)


@contextmanager
def litellm(engine: str, model: str, names: Sequence[str]) -> Iterator[Running]:
    """LiteLLM's proxy, with ``model`` of the vLLM at the URL ``engine`` under ``names``."""
    port = real_vllm.free_port()
    parameters = {"model": f"hosted_vllm/{model}", "api_base": f"{engine}/v1", "api_key": "none"}
    models = [{"model_name": name, "litellm_params": parameters} for name in names]
    with tempfile.TemporaryDirectory(prefix="singletree-compare-") as folder:
        settings = Path(folder) / "config.yaml"
        settings.write_text(json.dumps({"model_list": models}), encoding="utf-8")
        command = [str(_LITELLM / "bin" / "litellm"), "--config", str(settings), "--port", str(port)]
        command += ["--host", "127.0.0.1", "--telemetry", "False"]
        environment = os.environ | _LITELLM_SETTINGS
        with servers.running("LiteLLM", port, command, environment, _READY_SECONDS) as server:
            yield server


def _dynamo(engine: Engine) -> AbstractContextManager[Running]:
    settings = {"WORKER_ENGINE": engine.url, "WORKER_CALLS": engine.calls}
    return servers.dynamo("Dynamo", model=engine.model, names=NAMES, settings=settings)


_LITELLM_SETTINGS = {
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",  # it listens on loopback alone
}
_LITELLM = peers.HOME.parent / f"litellm-{LITELLM}"
# What its extra "proxy" declares and a proxy without a database needs; two packages that the extra pins are not on
# every index.
_PROXY_NEEDS = """
apscheduler backoff backports-zstd boto3 cryptography expression fastapi fastapi-sso granian gunicorn httpx2
litellm-proxy-extras mcp orjson pyjwt pynacl python-multipart pyyaml rich restrictedpython rq semver soundfile starlette
tomlkit uvicorn uvloop websockets<16
""".split()  # noqa: SIM905


def _install_litellm() -> None:
    if not (_LITELLM / ".ready").exists():
        print(f"Installing LiteLLM {LITELLM} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(_LITELLM)], check=True)
        real_vllm.pip(_LITELLM, "install", f"litellm=={LITELLM}", *_PROXY_NEEDS)
        (_LITELLM / ".ready").touch()


FrontEnd = Callable[[Engine], AbstractContextManager[Running]]


class Row(NamedTuple):
    """A row of the tables.

    Attributes:
        front: what is started in front of the engine, which a harness is given.
        engine: flags of vLLM, or settings of llama.cpp's server, which then has a process of its own.
        opens: whether the chat template takes a ``system`` message anywhere.
        settings: variables of the harness.
        refuses: what its server answers with status 400, as fields with a dot between a field and one inside it, or the
            type of a block in a list: recorded requests are sent without it.
    """

    front: FrontEnd
    engine: Mapping[str, Any] = {}
    opens: bool = False
    settings: Mapping[str, str] = {}
    refuses: Sequence[str] = ()


_ENCRYPTED = ("input.encrypted_content",)
_COUNTDOWN_OFF = {"CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off"}
ROWS: Mapping[str, Row] = {
    "singletree": Row(_singletree),
    "vLLM": Row(nullcontext, refuses=_ENCRYPTED),
    "LiteLLM": Row(lambda engine: litellm(engine.url, NAMES[0], NAMES)),
    "Dynamo": Row(_dynamo),
    "vLLM, countdown off": Row(nullcontext, settings=_COUNTDOWN_OFF),
    "vLLM, open template": Row(nullcontext, opens=True, refuses=_ENCRYPTED),
}
# Claude Code writes "updates" there, and leaves it out once a server has refused it. The blocks are what singletree has
# a client carry, as _ENCRYPTED is on Responses: no other server would have given it.
_REFUSED_BY_SGLANG = ("thinking.display", "messages.content.redacted_thinking")
SGLANG_ROWS: Mapping[str, Row] = {
    "singletree": Row(_singletree),
    "SGLang": Row(nullcontext, refuses=_REFUSED_BY_SGLANG),
    "SGLang, open template": Row(nullcontext, opens=True, refuses=_REFUSED_BY_SGLANG),
}
LLAMA_ROWS: Mapping[str, Row] = {
    "singletree": Row(_singletree),
    "llama.cpp": Row(nullcontext),
    "llama.cpp, open template": Row(nullcontext, opens=True),
    "llama.cpp, open template, countdown off": Row(nullcontext, opens=True, settings=_COUNTDOWN_OFF),
    "llama.cpp, open template, --swa-full": Row(nullcontext, {"swa_full": True}, opens=True),
    "llama.cpp, open template, --cache-reuse 256": Row(nullcontext, {"n_cache_reuse": 256}, opens=True),
}
"""Rows on vLLM, SGLang and llama.cpp: the servers as they come, and the workarounds that their users are given."""


def versions() -> Mapping[str, str]:
    """Return the version of each server that is not singletree."""
    return {
        "vLLM": real_vllm.VLLM,
        "LiteLLM": LITELLM,
        "Dynamo": peers.DYNAMO_VERSION,
        "SGLang": real_sglang.SGLANG,
        "llama.cpp": scripted_llama.VERSION,
    }


def missing(wanted: Sequence[str]) -> list[str]:
    """Install what ``wanted`` servers need; return the names of those that could not be installed."""
    absent = []
    for name, install in (("LiteLLM", _install_litellm), ("Dynamo", peers.install_dynamo)):
        try:
            if name in wanted:
                install()
        except (SystemExit, OSError, subprocess.SubprocessError):
            absent.append(name)
    return absent
