"""A hub of a few repositories, from which nothing is copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from singletree.engines.progress import Progress
from singletree.errors import WeightsUnavailable
from singletree.model_files.hub import HubUnreachable, HuggingFaceHub


class FakeHub(HuggingFaceHub):
    """Repositories by name, what of them is on this machine, and what was taken; it can be switched off."""

    def __init__(self, folder: Path, repos: Mapping[str, Sequence[str]]) -> None:
        self.folder, self.repos = folder, repos
        self.here: Mapping[str, Sequence[str]] = {}
        self.taken: list[tuple[str, list[str]]] = []
        self.online = True

    def files(self, repo: str) -> Mapping[str, int]:
        """As ``HuggingFaceHub.files``."""
        known = self.repos if self.online else self.here
        if repo not in known:
            message = f"{repo} is not there"
            raise WeightsUnavailable(message) if self.online else HubUnreachable(message, "no network")
        return dict.fromkeys(known[repo], 1)

    def cached(self, repo: str) -> Mapping[str, Path]:
        """As ``HuggingFaceHub.cached``."""
        return {name: self.folder / name for name in self.here.get(repo, ())}

    def fetch(self, repo: str, files: Sequence[str], progress: Progress) -> Path:
        """As ``HuggingFaceHub.fetch``."""
        self.taken.append((repo, list(files)))
        return self.folder
