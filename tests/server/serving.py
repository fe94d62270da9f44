"""A whole server in memory: the scripted engine, a model whose every byte is a token, and a client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from singletree import families
from singletree.prompts.template.chat_template import load_chat_template
from singletree.server.http.app import App
from singletree.server.http.service import Service
from singletree.server.models.catalog import Catalog
from singletree.server.models.model import Model
from singletree.server.settings.config import Config
from singletree.server.telemetry import Tracing
from singletree.testing import byte_model
from singletree.testing.scripted_engine import ScriptedEngine
from singletree.testing.scripts import Script

from .memory import Client

TOKENIZER = byte_model.byte_tokenizer()
TEMPLATE = load_chat_template(TOKENIZER)
MODEL = "org/test-model"
SWITCHABLE = byte_model.CHAT_TEMPLATE.replace(
    "<|im_start|>assistant\n{% endif %}",
    "<|im_start|>assistant\n{{ '<think>\\n\\n</think>\\n\\n' if enable_thinking is false }}{% endif %}",
)
"""Switches reasoning off as Qwen3's template does."""


class Served(NamedTuple):
    """A running server."""

    client: Client
    engine: ScriptedEngine
    service: Service
    model: Model


def model(engine: Any, **settings: Any) -> Model:
    """A model on ``engine``."""
    given = {
        "names": (MODEL, "alias"),
        "tokenizer": TOKENIZER,
        "template": TEMPLATE,
        "family": families.get("qwen3"),
        "why": "",
        "engine": engine,
        "context_window": 8192,
        "max_output_tokens": None,
        "created": 1_700_000_000,
    }
    return Model(**(given | settings))


def template_settings(source: str) -> dict[str, Any]:
    """The settings of a model with the chat template ``source``."""
    template = load_chat_template(TOKENIZER, source)
    return {"template": template, "layout": template.layout(TOKENIZER)}


@asynccontextmanager
async def serving(
    scripts: Mapping[str, str | Script] | None = None,
    *,
    config: Config | None = None,
    engine: Any = None,
    **settings: Any,
) -> AsyncIterator[Served]:
    """A server until the context ends; tasks left behind are a failure. ``settings`` are the model's."""
    playing = engine or ScriptedEngine(
        TOKENIZER.encode, TOKENIZER.decode, scripts, end_token_id=TOKENIZER.added_tokens["<|im_end|>"]
    )
    await playing.start()
    served = model(playing, **settings)
    service = Service(config or Config(), Catalog([served]), Tracing())
    tasks = asyncio.all_tasks()
    try:
        yield Served(Client(App(service)), playing, service, served)
        for _ in range(10):  # SDKs leave generators to the collector, which closes them in tasks of its own
            await asyncio.sleep(0)
        left = asyncio.all_tasks() - tasks
        if left:  # An engine waits until its process has freed a slot: that ends by itself.
            _, left = await asyncio.wait(left, timeout=10)
        assert not left, f"tasks are left: {left}"
    finally:
        await playing.close()


def body(path: str, prompt: str, **more: Any) -> dict[str, Any]:
    """A request of the protocol that lives at ``path``."""
    prompt_fields = (
        {"input": prompt} if path == "/v1/responses" else {"messages": [{"role": "user", "content": prompt}]}
    )
    limit = {"max_tokens": 1000} if path == "/v1/messages" else {}
    return {"model": MODEL, **prompt_fields, **limit, **more}
