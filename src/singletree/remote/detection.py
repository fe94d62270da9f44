"""Finds out which inference server answers at a URL, and refuses those that take only text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from singletree.errors import BadConfiguration, EngineFailed
from singletree.remote.http_client import HttpTransport
from singletree.remote.transport import ConnectionLost, Transport, check_key, decode_as, root_url
from singletree.remote.wire import MODELS, GetPage, check_status, decode_models

_TITLE = "an inference server"
_READ_SECONDS = 30.0

KINDS = ("vllm", "sglang", "tensorrt-llm", "llama-server")
"""The kinds of server that take and return token ids."""


@dataclass(frozen=True, slots=True)
class TextServer:
    """A server that takes only text. Its template and tokenizer decide the prompt, so that no prefix is exact.

    Attributes:
        cure: how to serve the same model so that singletree can use it.
    """

    title: str
    cure: str


_SAME_FILE = (
    "serve the same GGUF file with `singletree serve --model FILE.gguf`, or with `llama-server -m FILE.gguf` and "
    "--engine-url"
)
_OWN_MODEL = "serve an open model with vLLM, SGLang, TensorRT-LLM or llama-server, and give its URL"

TEXT_SERVERS: Mapping[str, TextServer] = {
    "ollama": TextServer("Ollama", f"{_SAME_FILE} (`ollama show MODEL --modelfile` names the file)"),
    "lm-studio": TextServer("LM Studio", f"{_SAME_FILE} (its models are in ~/.lmstudio/models)"),
    "hosted": TextServer("a hosted API", _OWN_MODEL),
}
"""The kinds of server that are refused, by name."""

OWNERS: Mapping[str, str] = {
    "vllm": "vllm",
    "sglang": "sglang",
    "tensorrt_llm": "tensorrt-llm",
    "llamacpp": "llama-server",
    "library": "ollama",
    "organization_owner": "lm-studio",
    "openai": "hosted",
    "openai-internal": "hosted",
    "system": "hosted",
}
"""``owned_by`` in a server's model list -> the kind of server."""

HOSTS: Mapping[str, str] = {
    "api.openai.com": "OpenAI",
    "api.anthropic.com": "Anthropic",
    "generativelanguage.googleapis.com": "Gemini",
    "openrouter.ai": "OpenRouter",
    "api.mistral.ai": "Mistral",
    "api.groq.com": "Groq",
    "api.together.xyz": "Together",
    "api.fireworks.ai": "Fireworks",
    "api.deepseek.com": "DeepSeek",
}
"""Hosts of APIs that take only text: they are refused without a request."""


@dataclass(frozen=True, slots=True)
class PageSign:
    """A page that only one kind of server has: a JSON object with the fields ``fields``."""

    kind: str
    path: str
    fields: frozenset[str]


SIGNS = (
    PageSign("sglang", "/model_info", frozenset({"model_path", "is_generation"})),
    PageSign("sglang", "/get_model_info", frozenset({"model_path", "is_generation"})),
    PageSign("llama-server", "/props", frozenset({"default_generation_settings"})),
    PageSign("ollama", "/api/version", frozenset({"version"})),
    PageSign("lm-studio", "/api/v0/models", frozenset({"data"})),
)
"""What tells servers apart whose model list does not, as behind a gateway; the first that fits decides."""


async def detect_server(url: str, api_key: str | None = None, *, transport: Transport | None = None) -> str:
    """Return the kind of server that answers at ``url``, one of ``KINDS``.

    Args:
        url: address of the server; ``/v1`` at the end is accepted.

    Raises:
        EngineFailed: no server answers, or it is not ready.
        BadConfiguration: it refuses the key, accepts only text, or is of an unknown kind.
    """
    root = root_url(url, _TITLE)
    check_key(api_key)
    host = urlsplit(root).hostname or ""
    if host in HOSTS:
        raise BadConfiguration(_refusal(root, TextServer(f"the API of {HOSTS[host]}", _OWN_MODEL)))
    chosen = transport or HttpTransport(root, api_key=api_key, read_timeout=_READ_SECONDS)
    await chosen.open()
    try:
        kind = await _kind(root, _pages_of(root, chosen))
    finally:
        await chosen.close()
    if kind in TEXT_SERVERS:
        raise BadConfiguration(_refusal(root, TEXT_SERVERS[kind]))
    return kind


def _refusal(url: str, server: TextServer) -> str:
    return (
        f"{url} is {server.title}, which takes only text: it renders and tokenizes prompts itself, so that turns "
        f"cannot be sent back by their own tokens and prefix breaks cannot be found; {server.cure}"
    )


def _pages_of(url: str, transport: Transport) -> GetPage:
    async def get(path: str) -> tuple[int, bytes]:
        try:
            return await transport.get(path)
        except ConnectionLost as lost:
            raise EngineFailed(
                f"no answer from {url}: {lost}; start the server, or correct --engine-url"
            ) from lost

    return get


async def _kind(url: str, get: GetPage) -> str:
    status, body = await get(MODELS)
    check_status(url, status, "the server")
    models = decode_models(body) if status == 200 else []
    for model in models:
        if (kind := OWNERS.get(model.owned_by or "")) is not None:
            return kind
    for sign in SIGNS:
        status, page = await get(sign.path)
        if status == 200 and sign.fields <= (decode_as(dict[str, Any], page) or {}).keys():
            return sign.kind
    if any(model.max_model_len for model in models):
        return "vllm"  # the probe at start-up refuses it if it is not
    known = ", ".join(KINDS)
    found = f"{MODELS} lists {models[0].id!r}" if models else f"{MODELS} lists no models"
    raise BadConfiguration(
        f"{url} is no inference server that is known to take token ids ({found}); give the URL of one of {known}, and "
        "its kind with --engine if a gateway hides it"
    )
