"""What is behind doors: features, and parts of the core that few requests need, each loaded when it is asked for.

A door is entered by one name, whose type the core owns; of a kind of inference server, ``remote`` owns it. To add a
feature behind a door, add an entry to ``DOORS``; nothing else in the core knows where the feature is.
`docs/architecture.md` lists the doors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from threading import Thread
from types import ModuleType
from typing import Any

from singletree.errors import BadConfiguration


@dataclass(frozen=True, slots=True)
class Door:
    """Where a feature is entered: ``entry`` is ``module:value``, or the module alone; its type is ``interface``.

    ``setting`` asks for it; ``extra`` is the extra of the installation that has its packages, or empty.
    """

    entry: str
    interface: str
    setting: str
    extra: str = ""


_ENGINE = "server.models.model_source.LocalEngine"
_SERVER = "remote.wire.MakeServer"
_ROUTES = "server.http.service.LaterOperation"
_PROTOCOL = "server.turn.protocol.WireProtocol"

DOORS: Mapping[str, Door] = {
    "engine llamacpp": Door("llamacpp.source:LOCAL_ENGINE", _ENGINE, "--engine llamacpp", "llamacpp"),
    "engine vllm": Door("in_process.source:VLLM", _ENGINE, "--engine vllm", "vllm"),
    "engine sglang": Door("in_process.source:SGLANG", _ENGINE, "--engine sglang", "sglang"),
    "engine scripted": Door("testing.byte_model:LOCAL_ENGINE", _ENGINE, "--engine scripted"),
    "engine URLs": Door(
        "remote.servers:find_source", "server.models.model_source.FindSource", "--engine-url"
    ),
    "server vllm": Door("remote.vllm.server:VllmServer", _SERVER, "--engine-url of a vLLM"),
    "server sglang": Door("remote.sglang:SglangServer", _SERVER, "--engine-url of an SGLang"),
    "server tensorrt-llm": Door(
        "remote.tensorrt_llm:TensorRtServer", _SERVER, "--engine-url of a TensorRT-LLM"
    ),
    "server llama-server": Door(
        "llamacpp.llama_server:LlamaServer", _SERVER, "--engine-url of a llama-server"
    ),
    "kind of a server": Door(
        "remote.detection:detect_server", "remote.servers.DetectServer", "--engine-url without --engine"
    ),
    "model files": Door(
        "model_files.resolve:resolve",
        "engines.checkpoint.FindCheckpoint",
        "a model, or the tokenizer of one at --engine-url",
    ),
    "choice of an engine": Door(
        "model_files.engine_choice:choose_engine", "server.models.model_source.ChooseEngine", "--engine auto"
    ),
    "router": Door(
        "routing.pool:make_pool",
        "engines.workers.MakePool",
        "several engines, and turns that go on after a failure",
    ),
    "router kv": Door(
        "routing.kv_policy:make_kv_pool", "engines.workers.MakePool", "--router-mode kv", "routing"
    ),
    "constraints": Door(
        "constraints.build:build_constraints",
        "server.turn.constraints.BuildConstraints",
        "tool_choice, strict tools and response formats",
    ),
    "grammar matchers": Door(
        "constraints.grammar_matchers:make_matchers",
        "server.models.model.MakeMatchers",
        "a turn under a grammar whose engine failed",
    ),
    "prefix breaks": Door(
        "prefix_breaks.causes:explain_break",
        "server.sessions.divergence.ExplainBreak",
        "a prompt that does not continue its session",
    ),
    "turn stores": Door(
        "turn_stores.stored_memory:open_memory",
        "server.models.model.OpenMemory",
        "--turn-memory-path, --turn-memory-url, --workers",
    ),
    "records": Door(
        "records.request_records:open_records", "server.http.run.OpenRecords", "--trace-path, --otel"
    ),
    "protocol messages": Door("protocols.messages", _PROTOCOL, "a request of Messages"),
    "protocol chat": Door("protocols.chat", _PROTOCOL, "a request of Chat Completions"),
    "protocol responses": Door("protocols.responses", _PROTOCOL, "a request of Responses"),
    "protocol compact": Door("protocols.responses.compact", _PROTOCOL, "a compaction"),
    "protocol completions": Door("raw_tokens.completions", _PROTOCOL, "a prompt as text"),
    "protocol generate": Door("raw_tokens.generate", _PROTOCOL, "a prompt as token ids"),
    "raw tokens": Door("raw_tokens.routes", _ROUTES, "a request with a prompt as text or token ids"),
    "description of the API": Door("openapi", _ROUTES, "a request for /openapi.json"),
    "stored responses": Door(
        "stored_responses.store:open_store",
        "server.answers.observer.OpenStore",
        "--store: a response that is stored or continued",
    ),
    "requests of Responses": Door(
        "server.http.response_requests:read_response",
        "server.http.service.ReadResponse",
        "a request of Responses",
    ),
    "compaction": Door(
        "server.http.response_requests:with_compaction",
        "server.turn.generation.WithCompaction",
        "a request for a summary of its conversation",
    ),
    "background responses": Door(
        "stored_responses.background_jobs:start_job",
        "server.http.service.StartJob",
        "a response that is generated in the background",
    ),
    "side events": Door(
        "server.answers.dispatch:DispatchEncoder",
        "server.answers.choices.MakeDispatch",
        "--enable-streaming-tool-dispatch, --enable-streaming-reasoning-dispatch, and their headers",
    ),
    "responses of a connection": Door(
        "stored_responses.store:ConnectionResponses", "server.answers.observer.OpenConnection", "--websockets"
    ),
    "websockets": Door(
        "websockets.session:answer_socket",
        "server.http.service.AnswerSocket",
        "--websockets: a client that opens one",
    ),
    "connections of websockets": Door(
        "websockets.connection:WebSockets", "server.http.http_server.MakeWebSockets", "--websockets"
    ),
    "routes of stored responses": Door(
        "stored_responses.routes", _ROUTES, "a request for a stored response or a conversation"
    ),
    "key file": Door("key_files:KeyFile", "server.settings.api_keys.OpenKeyFile", "--key-file"),
    "session forks": Door(
        "session_forks", _ROUTES, "a request that forks or moves a session, or reads its turns"
    ),
    "media": Door(
        "media.reader:open_media", "server.answers.observer.OpenMedia", "a request with pictures or documents"
    ),
    "budgets": Door(
        "budgets:Budgets",
        "server.http.service.OpenBudgets",
        "--session-budget, --subagent-budget, --key-budget, x-singletree-budget",
    ),
    "foresight": Door(
        "foresight:Foresight",
        "server.answers.observer.Foresees",
        "an engine that reads outlooks, the hint speculative_prefill",
    ),
    "inspector": Door("inspector.routes:DOOR", "server.http.service.RoutedDoor", "--inspect"),
    "capture": Door("training.routes:DOOR", "server.http.service.RoutedDoor", "--capture"),
    "weights": Door("training.weights:WeightsEngine", "server.models.model.WatchWeights", "--capture"),
    "response template": Door(
        "drafting.response_template:family_of_template",
        "server.models.chat_format.FamilyOfTemplate",
        "a checkpoint with a response_template",
    ),
}

_OPENED: dict[str, tuple[ModuleType, str]] = {}


def open_door(feature: str) -> Any:
    """Load ``feature``, a key of ``DOORS``, unless it is loaded, and return the value by which it is entered.

    Raises BadConfiguration where the feature, or a package that it needs, is not installed.
    """
    if feature not in _OPENED:
        door = DOORS[feature]
        path, _, name = door.entry.partition(":")
        try:
            _OPENED[feature] = import_module(f"singletree.{path}"), name
        except ModuleNotFoundError as error:
            package = "singletree" + (f"[{door.extra}]" if door.extra else "")
            raise BadConfiguration(
                f"{door.setting}: {error.name} is not installed; pip install '{package}'"
            ) from None
    module, name = _OPENED[feature]
    return getattr(module, name) if name else module


def is_open(feature: str) -> bool:
    """Return whether ``feature`` is loaded, so that ``open_door`` returns at once."""
    return feature in _OPENED


async def open_door_in_thread(feature: str) -> Any:
    """Return what ``open_door`` returns; load ``feature`` in a thread, so that other requests go on meanwhile.

    For what a request asks for. What is loaded already is returned at once. Raises BadConfiguration as ``open_door``.
    """
    if is_open(feature):
        return open_door(feature)
    return await asyncio.to_thread(open_door, feature)


def load_early(feature: str) -> None:
    """Begin to load ``feature`` in a thread, where ``open_door`` will be called in a moment."""
    if not is_open(feature):
        Thread(target=open_door, args=(feature,), daemon=True).start()
