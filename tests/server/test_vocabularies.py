"""A server at --engine-url that has another vocabulary than the tokenizer is refused at the start."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from engines.vllm_memory import MemoryAnswer
from engines.wire_servers import DIALECTS, DialectTransport, remote_engine
from prompts.tiny_vocabulary import write_directory
from singletree.engines.checkpoint import Checkpoint
from singletree.engines.progress import no_progress
from singletree.errors import BadConfiguration
from singletree.model_files import resolve as weights
from singletree.prompts.tokenizer.tokenizer import Tokenizer, load_tokenizer
from singletree.remote import detection
from singletree.remote import engine as remote
from singletree.remote import servers as engine_servers
from singletree.remote.engine import RemoteEngine
from singletree.remote.servers import PROBE_TEXT, probe_vocabulary
from singletree.remote.transport import ConnectionLost
from singletree.server.models import model_source
from singletree.server.settings.config import Config
from singletree.testing import byte_model

CHECKPOINT = Checkpoint("org/ours", Path("/nowhere"), 4096, ())
TOKENIZING = ("vllm-completions", "sglang-incremental", "llama-server")
Tokenize = Callable[[Mapping[str, Any]], MemoryAnswer]


class Tokenizing(DialectTransport):
    """A server of one dialect that also answers ``/tokenize``."""

    def __init__(self, name: str, tokenize: Tokenize) -> None:
        super().__init__(DIALECTS[name])
        pages = {**self.dialect.pages, "/server_info": {"version": "1", "model_path": "org/theirs"}}
        if "/props" not in pages:
            served = {"id": "served", "root": "org/theirs", "max_model_len": 512, "owned_by": "x"}
            pages["/v1/models"] = {"data": [served]}
        self.dialect = replace(self.dialect, pages=pages)
        self.tokenize = tokenize
        self.questions: list[dict[str, Any]] = []

    def post(self, path: str, body: bytes, headers: Mapping[str, str] = {}) -> Any:
        if path != "/tokenize":
            return super().post(path, body, headers)
        self.questions.append(json.loads(body))
        return self.tokenize(self.questions[-1])


class Network:
    """Servers of one dialect at all URLs, which tokenize with ``tokenize``."""

    def __init__(self) -> None:
        self.dialect = TOKENIZING[0]
        self.tokenize: Tokenize = tokenizes_with(byte_model.byte_tokenizer())
        self.transports: list[Tokenizing] = []

    async def detect(self, url: str, key: str | None) -> Any:
        """See ``detect_server``."""
        return DIALECTS[self.dialect].server()

    async def open(self, kind: Any) -> Any:
        """See ``open_server``; ``detect`` finds the server itself."""
        return kind

    def engine(self, server: Any, url: str, **settings: Any) -> RemoteEngine:
        """See ``RemoteEngine``."""
        self.transports.append(Tokenizing(self.dialect, self.tokenize))
        return remote_engine(self.transports[-1])


def answers(status: int, body: bytes) -> Tokenize:
    return lambda asked: MemoryAnswer(status, [body, b""])


def tokenizes_with(tokenizer: Tokenizer, *before: int) -> Tokenize:
    """Answer with the tokens of ``tokenizer``, behind the tokens ``before``."""

    def tokenize(asked: Mapping[str, Any]) -> MemoryAnswer:
        text = asked.get("prompt", asked.get("content"))
        ids = [*before, *tokenizer.encode(text)]
        return MemoryAnswer(200, [json.dumps({"count": len(ids), "tokens": ids}).encode(), b""])

    return tokenize


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Network:
    made = Network()
    caplog.set_level(logging.INFO, "singletree")
    monkeypatch.setattr(detection, "detect_server", made.detect)
    monkeypatch.setattr(engine_servers, "open_server", made.open)
    monkeypatch.setattr(engine_servers, "RemoteEngine", made.engine)
    monkeypatch.setattr(weights, "resolve", lambda model, **_: CHECKPOINT)
    return made


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A tokenizer with other tokens than the byte model's, and with merges in all scripts."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([PROBE_TEXT] * 3, trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    write_directory(folder, made)
    return load_tokenizer(folder)


async def start(tokenizer: Tokenizer) -> Any:
    """Load the model of --engine-url as ``serve`` does, and return its worker."""
    source = await model_source.find_model_source(Config(engine_url=("http://a",)), no_progress)
    try:
        [worker] = await source.start_workers(tokenizer)
    except BaseException:
        await source.close()
        raise
    return worker


@pytest.mark.parametrize("dialect", TOKENIZING)
async def test_the_same_vocabulary_starts(
    network: Network, dialect: str, caplog: pytest.LogCaptureFixture
) -> None:
    network.dialect = dialect
    worker = await start(byte_model.byte_tokenizer())
    [question] = network.transports[0].questions
    if dialect == "llama-server":
        assert question == {"content": PROBE_TEXT, "add_special": False, "parse_special": True}
    else:
        assert question == {"model": "served", "prompt": PROBE_TEXT, "add_special_tokens": False}
    assert "vocabulary" not in caplog.text
    await worker.engine.close()


async def test_a_token_that_the_server_puts_before_the_text_is_none_of_it(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    ours = byte_model.byte_tokenizer()
    network.tokenize = tokenizes_with(ours, ours.added_tokens["<|im_start|>"])
    worker = await start(ours)
    assert "vocabulary" not in caplog.text
    await worker.engine.close()


@pytest.mark.parametrize("dialect", TOKENIZING)
async def test_another_vocabulary_is_refused_with_both_names(
    network: Network, dialect: str, other: Tokenizer
) -> None:
    network.dialect = dialect
    network.tokenize = tokenizes_with(other)
    ours = byte_model.byte_tokenizer()
    with pytest.raises(BadConfiguration) as caught:
        await start(ours)
    theirs = "/m/m.gguf" if dialect == "llama-server" else "org/theirs"
    pairs = zip(other.encode(PROBE_TEXT), ours.encode(PROBE_TEXT), strict=False)
    there, here = next(pair for pair in pairs if pair[0] != pair[1])
    first = f"token {there}, the tokenizer {here};"
    for word in ("http://a", theirs, "org/ours", first, "--model"):
        assert word in caught.value.message
    assert network.transports[0].closed


def loses(asked: Mapping[str, Any]) -> MemoryAnswer:
    return MemoryAnswer.failing(ConnectionLost("it broke"))


@pytest.mark.parametrize(
    ("tokenize", "reason"),
    [
        *((answers(status, b"{}"), f"HTTP {status}") for status in (400, 401, 403, 404, 405, 500, 501)),
        (answers(200, b"<html>"), "without token ids"),
        (answers(200, b'{"tokens": [-1]}'), "without token ids"),
        (answers(200, b'{"tokens": [4294967296]}'), "without token ids"),
        (answers(200, b'{"tokens": [{"id": 1, "piece": "x"}]}'), "without token ids"),
        (answers(200, b"[" * 65536), "without token ids"),
        (lambda asked: MemoryAnswer(200, []), "did not answer within"),
        (loses, "it broke"),
    ],
)
async def test_a_server_that_reports_nothing_starts_with_a_line(
    network: Network,
    tokenize: Tokenize,
    reason: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_QUESTION_SECONDS", 0.01)
    network.tokenize = tokenize
    worker = await start(byte_model.byte_tokenizer())
    [line] = [record.message for record in caplog.records if "vocabulary" in record.message]
    for word in ("not checked", "served (org/theirs)", "http://a", "org/ours", reason):
        assert word in line
    await worker.engine.close()


async def test_a_kind_of_server_that_does_not_tokenize_is_not_asked(
    network: Network, caplog: pytest.LogCaptureFixture
) -> None:
    network.dialect = "tensorrt-llm"
    worker = await start(byte_model.byte_tokenizer())
    assert network.transports[0].questions == []
    assert "TensorRT-LLM has no endpoint that tokenizes" in caplog.text
    await worker.engine.close()


async def test_a_server_that_comes_back_with_another_vocabulary_stays_out(
    network: Network, other: Tokenizer
) -> None:
    worker = await start(byte_model.byte_tokenizer())
    network.tokenize = tokenizes_with(other)
    with pytest.raises(BadConfiguration, match="another vocabulary"):
        await worker.engine.revive()
    assert [transport.closed for transport in network.transports] == [0, 1]
    await worker.engine.close()


def halves(tokenizer: Tokenizer, token_id: int) -> list[int]:
    """The characters of a token, each as its own token; the token itself where it is a part of a character."""
    text = tokenizer.decode([token_id])
    apart = [id for character in text for id in tokenizer.encode(character)]
    return apart if tokenizer.decode(apart) == text and "\ufffd" not in text else [token_id]


def test_an_implementation_that_cuts_a_few_words_otherwise(other: Tokenizer) -> None:
    probe = probe_vocabulary("m", other)
    ids = list(probe.token_ids)
    few = [part for at, id in enumerate(ids) for part in (halves(other, id) if at % 20 == 0 else [id])]
    assert few != ids
    assert probe.compare(few) == "cut otherwise"


def test_a_vocabulary_of_which_ours_is_a_continuation_is_another(other: Tokenizer) -> None:
    probe = probe_vocabulary("m", other)
    letters = [id for character in PROBE_TEXT for id in other.encode(character)]
    assert other.decode(letters) == PROBE_TEXT
    assert probe.compare(letters) == "different"
