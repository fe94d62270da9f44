"""The inference servers at ``--engine-url``: what answers at each, and that all serve the tokenizer's model."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from singletree.engines.checkpoint import Checkpoint, read_sampling_defaults
from singletree.engines.engine import Engine, EngineInfo
from singletree.engines.lifetime import ReconnectingEngine
from singletree.engines.progress import Progress
from singletree.engines.workers import Worker
from singletree.errors import BadConfiguration, SingletreeError
from singletree.prompts.tokenizer.tokenizer import Tokenizer
from singletree.remote.engine import RemoteEngine
from singletree.remote.wire import MakeServer, Server
from singletree.server.doors import DOORS, open_door_in_thread
from singletree.server.models.model_source import (
    ModelSource,
    describe_template,
    load_checkpoint,
    resolve_checkpoint,
)
from singletree.server.settings.config import Config

_LOG = logging.getLogger(__name__)


async def find_source(config: Config, progress: Progress) -> ModelSource:
    """Connect to the servers at ``--engine-url``, and find out what kind each is unless ``--engine`` names one.

    The tokenizer is that of ``--model``, else of the model that the servers report. Its files come from this machine or
    the Hugging Face Hub: no server gives them away. vLLM's ``/tokenizer_info`` and llama-server's ``/props`` have no
    vocabulary, SGLang's ``/get_model_info`` and TensorRT-LLM's lists only names.
    """
    servers = EngineServers(config)
    info = await servers.start()
    try:
        checkpoint = await resolve_checkpoint(config, config.model or info.checkpoint or info.name, progress)
        await servers.complete(checkpoint)
    except BaseException:
        await servers.close()
        raise

    async def started(tokenizer: Tokenizer) -> tuple[Worker, ...]:
        await servers.check_vocabularies(tokenizer)
        return servers.workers

    names = tuple(dict.fromkeys((info.name, checkpoint.name, *checkpoint.aliases)))
    load = partial(load_checkpoint, checkpoint)
    return ModelSource(
        names, load, started, servers.close, servers.title, template_origin=describe_template(checkpoint)
    )


class EngineServers:
    """Connects to the servers at the URLs of ``config``, each a worker, and anew to one that comes back."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.workers = tuple(
            Worker(url, ReconnectingEngine(url, partial(self._connect, url))) for url in config.engine_url
        )
        self._titles: dict[str, str] = {}
        self._connections: dict[str, RemoteEngine] = {}
        self._first: tuple[str, EngineInfo] | None = None
        self._completion: Mapping[str, Any] | None = None
        self._checkpoint_name = ""
        self._probe: VocabularyProbe | None = None

    @property
    def title(self) -> str:
        return ", ".join(
            f"{self._titles.get(worker.name, 'no answer')} at {worker.name}" for worker in self.workers
        )

    async def start(self) -> EngineInfo:
        """Connect to all servers at once, and return what the first that answers reports.

        The workers of those that do not answer are down.

        Raises:
            BadConfiguration: a server is of a wrong kind, or two serve different models.
            EngineFailed: none answers.
        """
        results = await asyncio.gather(
            *(worker.engine.start() for worker in self.workers), return_exceptions=True
        )
        try:
            failures = []
            for worker, failure in zip(self.workers, results, strict=True):
                if isinstance(failure, BadConfiguration):
                    raise failure
                if isinstance(failure, SingletreeError):
                    worker.state = "down"
                    failures.append(failure)
                elif failure is not None:
                    raise failure
                else:
                    self._check_same(worker.name, worker.engine.info())
            if self._first is None:
                raise failures[0]
        except BaseException:
            await self.close()
            raise
        return self._first[1]

    async def complete(self, checkpoint: Checkpoint) -> None:
        """Add what the servers do not report, from the flags and from the checkpoint. Raises BadConfiguration."""
        self._checkpoint_name = checkpoint.name
        self._completion = {
            "window": self._config.context_window or checkpoint.context_window,
            "model_defaults": await asyncio.to_thread(read_sampling_defaults, checkpoint.path),
        }
        for engine in self._connections.values():
            engine.complete(**self._completion)

    async def check_vocabularies(self, tokenizer: Tokenizer) -> None:
        """Check that every server has the vocabulary of ``tokenizer``, and those that come later when they come.

        Raises BadConfiguration for one that has another. Of one that does not tell, a line is logged.
        """
        self._probe = await asyncio.to_thread(probe_vocabulary, self._checkpoint_name, tokenizer)
        connected = tuple(self._connections.items())
        checks = (self._check_vocabulary(url, engine, self._probe) for url, engine in connected)
        for failure in await asyncio.gather(*checks, return_exceptions=True):
            if failure is not None:
                raise failure

    async def close(self) -> None:
        for worker in self.workers:
            await worker.engine.close()

    async def _connect(self, url: str) -> Engine:
        config = self._config
        kind: str = config.engine
        if f"server {kind}" not in DOORS:
            detect: DetectServer = await open_door_in_thread("kind of a server")
            kind = await detect(url, config.engine_api_key)
        server = await open_server(kind)
        engine = RemoteEngine(server, url, api_key=config.engine_api_key, slots=config.slots)
        await engine.start()
        try:
            if self._completion is not None:
                # Another model at one of the URLs is found at the start by ``start``, with all of them compared.
                self._check_same(url, engine.info())
                engine.complete(**self._completion)
            if self._probe is not None:
                await self._check_vocabulary(url, engine, self._probe)
        except BaseException:
            await engine.close()
            raise
        self._titles[url], self._connections[url] = server.title, engine
        return engine

    def _check_same(self, url: str, info: EngineInfo) -> None:
        if self._first is None:
            self._first = url, info
            return
        first_url, first = self._first
        if _model_name(first) != _model_name(info):
            raise BadConfiguration(
                f"the servers at --engine-url serve different models: {_named(first)} at {first_url}, {_named(info)} "
                f"at {url}; give a table [[models]] of --config to each model"
            )

    async def _check_vocabulary(self, url: str, engine: RemoteEngine, probe: VocabularyProbe) -> None:
        name = _named(engine.info())
        try:
            token_ids = await engine.tokenize(PROBE_TEXT)
        except SingletreeError as error:
            _LOG.info(
                "it was not checked that %s at %s has the vocabulary of %s: %s",
                name,
                url,
                probe.name,
                error.message,
            )
            return
        agreement = probe.compare(token_ids)
        if agreement == "same":
            return
        difference = probe.first_difference(token_ids)
        if agreement == "different":
            raise BadConfiguration(
                f"{url} serves {name}, which has another vocabulary than the tokenizer of {probe.name}: {difference}; "
                "give the model that the server runs with --model, or the URL of a server that runs this one"
            )
        _LOG.warning(
            "%s at %s has the vocabulary of %s, but cuts text in other places (%s): the model may have been trained "
            "with other tokens than it is sent",
            name,
            url,
            probe.name,
            difference,
        )


DetectServer = Callable[[str, str | None], Awaitable[str]]
"""Finds out which kind of server answers at a URL, given its API key. Raises BadConfiguration, EngineFailed."""


async def open_server(kind: str) -> Server:
    """Return what speaks with a server of ``kind``."""
    make: MakeServer = await open_door_in_thread(f"server {kind}")
    return make()


def _model_name(info: EngineInfo) -> str:
    """Return the name by which two servers are taken to serve one model: the checkpoint's, else the served one.

    Only the last part counts: one server may have the checkpoint in a folder, the other from the hub.
    """
    name = info.checkpoint or info.name
    return name.rstrip("/").rpartition("/")[2].casefold().removesuffix(".gguf")


def _named(info: EngineInfo) -> str:
    return info.name if info.checkpoint in (None, info.name) else f"{info.name} ({info.checkpoint})"


PROBE_TEXT = """\
The vocabulary of a model turns 1234567890 and 3.14159 into numbers; don't trust it blindly.
Die Größe übertrifft die Erwartungen. El niño comió piñas. Français: « déjà vu », œuvre.
Быстрая коричневая лиса перепрыгивает через ленивую собаку. Η γρήγορη καφέ αλεπού. שלום לכולם.
السلام عليكم ورحمة الله. नमस्ते दुनिया। สวัสดีชาวโลก วันนี้อากาศดี. Tiếng Việt rất hay.
今天的天气非常好，我们一起去公园散步吧。日本語の文章をここに書きます。안녕하세요, 만나서 반갑습니다.
def main(argv: list[str]) -> int:
    for i in range(10):
\t\tprint(f"{i:>8}", end="")        # eight spaces


    return {"a": [1, 2.5e-3], "b": null} !== undefined && x >>= 2; // ∑ ∞ → 😀👍🏽"""
"""A text of which no two vocabularies have the same tokens. Many begin with the same hundred thousand tokens of English
and code: what tells those apart is the other scripts."""

_SAME_SHARE = 0.75
"""The part of the tokens of ``PROBE_TEXT`` that two servers of one vocabulary have in common at least. Of 24 published
vocabularies, those that differ only in where they cut the text share 0.9 of it; one that another goes on from, 0.6."""

Agreement = Literal["same", "cut otherwise", "different"]


@dataclass(frozen=True, slots=True)
class VocabularyProbe:
    """What a tokenizer makes of ``PROBE_TEXT``.

    Attributes:
        name: the checkpoint that the tokenizer belongs to.
        token_ids: the tokens, without special ones.
    """

    name: str
    tokenizer: Tokenizer
    token_ids: Sequence[int]

    def compare(self, token_ids: Sequence[int]) -> Agreement:
        """Return whether a server that has ``token_ids`` for ``PROBE_TEXT`` has the same vocabulary.

        Two implementations of one vocabulary may cut a text in other places (``cut otherwise``): the tokens still stand
        for the same texts.
        """
        ours, theirs = self.token_ids, _ordinary(self.tokenizer, token_ids)
        if theirs == ours:
            return "same"
        decode = self.tokenizer.decode
        shared = (Counter(ours) & Counter(theirs)).total()
        means_the_same = decode(theirs).lstrip(" ") == decode(ours).lstrip(" ")
        if means_the_same and shared >= _SAME_SHARE * max(len(ours), len(theirs)):
            return "cut otherwise"
        return "different"

    def first_difference(self, token_ids: Sequence[int]) -> str:
        """Return where ``token_ids`` leave the tokenizer's, for people to read."""
        ours, theirs = self.token_ids, _ordinary(self.tokenizer, token_ids)
        same = next(
            (at for at, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]),
            min(len(ours), len(theirs)),
        )
        before = self.tokenizer.decode(ours[max(0, same - 3) : same])
        place = f"behind {before!r}" if before else "at the beginning of a text"
        return f"{place} it has token {_at(theirs, same)}, the tokenizer {_at(ours, same)}"


def probe_vocabulary(name: str, tokenizer: Tokenizer) -> VocabularyProbe:
    """Encode ``PROBE_TEXT``. Takes as long as the tokenizer takes to load, if that was put off."""
    return VocabularyProbe(name, tokenizer, _ordinary(tokenizer, tokenizer.encode(PROBE_TEXT)))


def _ordinary(tokenizer: Tokenizer, token_ids: Sequence[int]) -> list[int]:
    """Leave out special tokens: some servers add the one that begins a prompt although they are told not to."""
    special = {tokenizer.added_tokens[text] for text in tokenizer.special_tokens}
    return [id for id in token_ids if id not in special]


def _at(token_ids: Sequence[int], place: int) -> str:
    return str(token_ids[place]) if place < len(token_ids) else "none"
