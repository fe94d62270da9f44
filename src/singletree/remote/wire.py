"""What an engine on a running server consists of: a server that is looked up, and wires that carry generations.

And what most of them share: the model list at ``/v1/models``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from singletree.conversation import Sampling
from singletree.engines.abilities import EngineAbilities
from singletree.engines.engine import Chunk, GenerationJob, StopKind, WeightStep
from singletree.errors import BadConfiguration, EngineFailed, SingletreeError
from singletree.pictures import PromptPicture
from singletree.remote.transport import RefusalWords, convert_refusal, decode_as, decode_refusal

GetPage = Callable[[str], Awaitable[tuple[int, bytes]]]
"""Fetch a path: status and body. Raises EngineFailed when there is no answer."""


class Lookup(NamedTuple):
    """A question to the server beside a generation, whose answer is short: a POST of ``body`` to ``path``."""

    path: str
    body: bytes


TOKENIZE = "/tokenize"
"""The path at which vLLM, SGLang and llama.cpp tokenize a text."""


def ask_for_tokens(model: str, text: str) -> Lookup:
    """Return the question for the tokens of ``text`` as vLLM and SGLang understand it."""
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    return Lookup(TOKENIZE, msgspec.json.encode(body))


class WireReader(Protocol):
    """Decodes the answer to one generation, whose bytes may be cut anywhere. No I/O.

    After each ``feed`` that returned no list, answer ``lookup`` with ``resolve`` while there is one, pass the chunk
    on, then check ``failure`` (raise it after the chunk was passed on: generated tokens stay valid) and ``done``.
    """

    @property
    def failure(self) -> SingletreeError | None:
        """The error that the answer reports or contains."""

    @property
    def done(self) -> bool:
        """Whether nothing follows: the last chunk was returned, or ``failure`` is set."""

    @property
    def cut(self) -> bool:
        """Whether the server still generates although ``done``: the connection has to be closed."""

    @property
    def lookup(self) -> Lookup | None:
        """What to ask the server before the next ``feed``."""

    def feed(self, data: bytes) -> list[int] | Chunk | None:
        """Return what ``data`` completed.

        That is a list of tokens where there is nothing else, as nearly always; it may be empty. A chunk has more than
        tokens. None: there is no chunk yet, but maybe ``lookup`` or ``failure``.
        """

    def resolve(self, status: int, body: bytes) -> Chunk | None:
        """Take the answer to ``lookup`` and return what ``feed`` could not."""

    def close(self, unfinished: SingletreeError | StopKind | None = None) -> Chunk | None:
        """Return the last chunk at the end of the answer, or None with ``failure`` set.

        ``unfinished`` is the outcome if the server has sent no finish reason; None stands for the failure that the
        answer ended too early.
        """


class Wire:
    """One endpoint for generations: how requests and answers look. No I/O.

    A wire says how it encodes and reads. For the rest this class has what most do: the server keeps nothing of a
    request, answers in time, and takes no pictures.

    Attributes:
        words: the endpoint, and what refusals look like there.
        abilities: what the endpoint can do.
        takes_sessions: whether the server describes a field for the names of sessions, which older ones lack.
    """

    words: RefusalWords
    abilities: EngineAbilities
    takes_sessions = False

    @property
    def path(self) -> str:
        return self.words.path

    def encode(self, job: GenerationJob, *, max_tokens: int) -> bytes:
        """Encode the request; ``max_tokens`` replaces the one of ``job.sampling``. Raises InvalidRequest."""
        raise NotImplementedError

    def reader(self, job: GenerationJob, *, max_tokens: int) -> WireReader:
        raise NotImplementedError

    def accepts(self, job: GenerationJob) -> bool:
        """Return whether this endpoint can serve the job; the next wire of the server is asked otherwise."""
        return True

    def headers(self, job: GenerationJob) -> Mapping[str, str]:
        """Return what the request needs as headers beside its body."""
        return {}

    def refusal(self, status: int, body: bytes, job: GenerationJob, retry_after: str) -> SingletreeError:
        """Return the error for an answer whose ``status`` is not 200; ``retry_after`` is the header of that name."""
        prompt_tokens = len(job.prompt_token_ids)
        return convert_refusal(self.words, status, decode_refusal(body), prompt_tokens, retry_after)

    def accepted(self, job: GenerationJob) -> None:
        """Note that the server has taken the request: what it keeps of it need not be sent again."""

    def resends(self, job: GenerationJob, refusal: SingletreeError) -> bool:
        """Return whether ``encode`` now gives a request with what the server no longer has."""
        return False

    def uncounted(self, job: GenerationJob) -> Sequence[PromptPicture]:
        """Return the pictures whose lengths have to be found out first, because the answer has only their sum."""
        return ()

    def first_answer_seconds(self, job: GenerationJob) -> float | None:
        """Return for how long the answer may not begin, in seconds; None for no limit but that of every silence."""
        return None

    def encode_picture_probe(self) -> bytes | None:
        """Encode a request that only a model with eyes understands; None for an endpoint that takes no pictures."""
        return None

    def blindness(self, refusal: SingletreeError | None) -> str | None:
        """Return why the model takes no pictures, and the cure, empty for none; None if it takes them.

        ``refusal`` is the answer to the picture probe; None if the server accepted it, or there is no probe.
        """
        return ""


COMMON_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
"""The fields of ``Sampling`` that vLLM, SGLang and TensorRT-LLM have by the same name."""


LEAST_TOP_P = {"top_p": 1e-9}
"""Leaves the most probable token alone, as OpenAI's 0 does, which vLLM and SGLang refuse."""


def sampling_reader(
    *same: str, zeros: Mapping[str, float] = LEAST_TOP_P, **renamed: str
) -> Callable[[Sampling], dict[str, Any]]:
    """Return a function that returns fields of ``Sampling`` by the names that a server has for them.

    Fields that are None are left out, so that the server's defaults apply.

    Args:
        same: the fields with the same name there.
        zeros: what the server accepts instead of 0, by its names.
    """
    read, names = attrgetter(*same, *renamed), (*same, *renamed.values())
    return lambda sampling: {
        name: value or zeros.get(name, value)
        for name, value in zip(names, read(sampling), strict=True)
        if value is not None
    }


@dataclass(frozen=True, slots=True)
class ServerOffer:
    """What a server serves.

    Attributes:
        name: the model's name there.
        wires: the endpoints to try, the best first; at start-up those before the first that works are dropped.
        window: longest prompt and answer together, in tokens; None when the server does not report it.
        slots: how many generations run at once; None when the server does not report it.
        details: more facts, for people to read.
        checkpoint: the server's name for the checkpoint, a path or a hub id; None when it does not report it.
        losses: path of a wire -> what is lost without it and the cure, for the log.
        tokenize: returns the question for the token ids of a text, without those that the server adds to a prompt;
            the answer has them in its field ``tokens``. None for a server that does not tokenize.
        weights: the steps of a change of its weights that it takes part in: a path, and fields of the body.
    """

    name: str
    wires: Sequence[Wire]
    window: int | None = None
    slots: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)
    checkpoint: str | None = None
    losses: Mapping[str, str] = field(default_factory=dict)
    tokenize: Callable[[str], Lookup] | None = None
    weights: Mapping[WeightStep, tuple[str, dict[str, Any]]] = field(default_factory=dict)


class Server(Protocol):
    """One kind of inference server."""

    @property
    def title(self) -> str:
        """Its name, for messages."""

    @property
    def hint(self) -> str:
        """How to start it so that singletree can use it, for messages."""

    async def look_up(self, url: str, get: GetPage) -> ServerOffer:
        """Find out what the server at ``url`` serves: the first model that it lists.

        Raises EngineFailed when it is not ready, BadConfiguration when it refuses the key or is of another kind.
        """


MakeServer = Callable[[], Server]


MODELS = "/v1/models"
T = TypeVar("T")


class ServedModel(msgspec.Struct):
    """One model of the list; fields that a server does not have are None."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


async def find_model(url: str, get: GetPage, title: str) -> tuple[ServedModel, int | None]:
    """Return the first model, and its context window in tokens, None if that is not listed.

    Raises EngineFailed when the server is not ready, BadConfiguration when it refuses the key or lists no models.
    """
    status, body = await get(MODELS)
    check_status(url, status, title)
    models = decode_models(body) if status == 200 else []
    if not models:
        raise BadConfiguration(
            f"{url}{MODELS} lists no models (HTTP {status}): {title} does not run there; correct the URL"
        )
    chosen = models[0]
    # The card of an adapter leaves the window to the card of its parent.
    cards = (chosen, *(each for each in models if each.id == chosen.parent))
    return chosen, next((each.max_model_len for each in cards if each.max_model_len), None)


async def read_page(get: GetPage, form: type[T], *paths: str) -> T | None:
    """Return the first page of that form; None where there is none, as behind a gateway that hides them."""
    for path in paths:
        status, body = await get(path)
        if status == 200 and (found := decode_as(form, body)) is not None:
            return found
    return None


async def body_fields(get: GetPage, path: str) -> frozenset[str]:
    """Return the fields of the body of ``POST path``, by the server's own description; none where that is missing."""
    page = await read_page(get, dict[str, Any], "/openapi.json") or {}
    try:
        schema = page["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        if "$ref" in schema:
            schema = page["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        return frozenset(schema["properties"])
    except (KeyError, TypeError):
        return frozenset()


def check_status(url: str, status: int, title: str) -> None:
    """Raise BadConfiguration for a refused key, EngineFailed for a server that is not ready."""
    if status in (401, 403):
        raise BadConfiguration(
            f"{url} refuses the API key (HTTP {status}): give --engine-api-key the key that {title} was started with"
        )
    if status >= 500:
        raise EngineFailed(f"{url} is not ready (HTTP {status}): wait until its /health returns 200")


def decode_models(body: bytes) -> list[ServedModel]:
    """Return the models of a list; none for a body that is no such list."""
    found = decode_as(_ModelList, body)
    return [] if found is None else found.data
