"""Reads the model list that most inference servers have at ``/v1/models``."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from singletree.engines.remote.wire import GetPage
from singletree.errors import BadConfiguration, EngineFailed

MODELS = "/v1/models"


class ServedModel(msgspec.Struct):
    """One model of the list; fields that a server does not have are None."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    owned_by: str | None = None


class _ModelList(msgspec.Struct):
    data: list[ServedModel]


async def read_models(url: str, get: GetPage, title: str) -> list[ServedModel]:
    """Return the models that the server lists, at least one.

    Raises EngineFailed when it is not ready, BadConfiguration when it refuses the key or lists none.
    """
    status, body = await get(MODELS)
    check_status(url, status, title)
    models = decode_models(body) if status == 200 else []
    if not models:
        raise BadConfiguration(
            f"{url}{MODELS} lists no models (HTTP {status}): it is not a {title} server; correct the URL"
        )
    return models


def check_status(url: str, status: int, title: str) -> None:
    """Raise BadConfiguration for a refused key, EngineFailed for a server that is not ready."""
    if status in (401, 403):
        raise BadConfiguration(
            f"{url} refuses the API key (HTTP {status}): give the key that {title} was started with"
        )
    if status >= 500:
        raise EngineFailed(f"{url} is not ready (HTTP {status}): wait until its /health returns 200")


def decode_models(body: bytes) -> list[ServedModel]:
    """Return the models of a list; none for a body that is no such list."""
    try:
        return msgspec.json.decode(body, type=_ModelList).data
    except (msgspec.DecodeError, ValueError, RecursionError):
        return []


def choose_model(url: str, title: str, models: Sequence[ServedModel], wanted: str | None) -> ServedModel:
    """Return the wanted model, or the first for None. Raises BadConfiguration when it is not served."""
    if wanted is None:
        return models[0]
    for model in models:
        if model.id == wanted:
            return model
    served = ", ".join(model.id for model in models)
    raise BadConfiguration(f"{title} at {url} does not serve {wanted!r}; it serves: {served}")


def window_of(model: ServedModel, models: Sequence[ServedModel]) -> int | None:
    """Return ``max_model_len``; the card of an adapter leaves it to the card of its parent."""
    parents = [other for other in models if other.id == model.parent]
    return next((each.max_model_len for each in (model, *parents) if each.max_model_len), None)
