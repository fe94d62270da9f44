"""``singletree sessions list|export|import|delete``, with a state that the real llama.cpp saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from engines.test_saved_shapes import PROMPT, ask, running
from engines.tiny_shapes import tiny_model
from singletree.cli import main


def command(capsys: pytest.CaptureFixture[str], *words: str | Path) -> tuple[int, str]:
    """Return the exit status, and what it printed."""
    status = 0
    try:
        main(["sessions", *map(str, words)])
    except SystemExit as end:
        status = int(end.code or 0)
    return status, "".join(capsys.readouterr())


async def test_a_session_moves_to_another_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, file = tmp_path / "here", tmp_path / "there", tmp_path / "session"
    async with running("dense", here) as engine:
        _, answer = await ask(engine, PROMPT)
    _, listed = command(capsys, "list", here)
    assert "dense.gguf, llama.cpp" in listed
    id, tokens = listed.splitlines()[1].split()[:2]
    assert tokens == str(len(PROMPT) + len(answer) - 1)

    assert command(capsys, "export", here, id[:6], file)[0] == 0
    assert file.stat().st_mode & 0o777 == 0o600
    assert "File exists" in command(capsys, "export", here, id, file)[1]

    model = shutil.copy(tiny_model("dense"), tmp_path / "renamed.gguf")
    refused = command(capsys, "import", there, file, "--model", tiny_model("dense", 1))
    assert refused[0] == 1
    assert "it comes from another model file (dense.gguf; this is dense-1.gguf)" in refused[1]
    assert list(there.iterdir()) == []
    assert command(capsys, "import", there, file, "--model", model)[0] == 0
    async with running("dense", there) as engine:
        assert (await ask(engine, [*PROMPT, *answer, 7]))[0] == len(PROMPT) + len(answer) - 1

    file.write_bytes(file.read_bytes()[:-4096])
    assert "it is cut" in command(capsys, "import", there, file, "--model", model)[1]
    assert "no id is given; `singletree sessions list" in command(capsys, "delete", here)[1]
    assert "0 saved states" in command(capsys, "delete", here, "no")[1]
    assert command(capsys, "delete", here, id) == (0, "")
    assert list(here.iterdir()) == []
    assert command(capsys, "list", file)[1].startswith(f"singletree: {file} is no folder")
