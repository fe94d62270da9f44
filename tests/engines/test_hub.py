"""Models on the hub: which files are taken, and what is said when they cannot be had."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from engines.fake_hub import FakeHub
from singletree.engines.progress import no_progress
from singletree.errors import WeightsUnavailable
from singletree.model_files.hub import (
    HubUnreachable,
    HuggingFaceHub,
    choose_gguf,
    fetch_gguf,
    fetch_tokenizer,
    fetch_weights,
    offers_gguf,
    offers_weights,
    parse_id,
)
from tiny_gguf import tiny_gguf

QWEN = ["config.json", "tokenizer.json", "merges.txt", "vocab.json", "LICENSE", "README.md"]
QWEN += ["chat_template.jinja", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
QWEN_GGUF = ["Qwen3-4B-Q4_K_M.gguf", "Qwen3-4B-Q8_0.gguf", "README.md", "params.json"]


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    split = [f"big-Q4_K_M-0000{i}-of-00003.gguf" for i in (2, 1, 3)]
    repos = {
        "Qwen/Qwen3-4B": QWEN,
        "Qwen/Qwen3-4B-GGUF": QWEN_GGUF,
        "org/both": [*QWEN, "both-Q8_0.gguf"],
        "org/big-GGUF": [*split, "big-Q8_0.gguf"],
        "org/neither": ["README.md"],
    }
    return FakeHub(tmp_path, repos)


def test_ids() -> None:
    assert parse_id("Qwen/Qwen3-4B") == ("Qwen/Qwen3-4B", None)
    assert parse_id("Qwen/Qwen3-4B-GGUF:Q4_K_M") == ("Qwen/Qwen3-4B-GGUF", "Q4_K_M")
    for other in ("Qwen3-4B", "a/b/c", "a/b:", "a b/c", "http://a/b", "./nothing", "../nothing", "~/nothing"):
        assert parse_id(other) is None


def test_a_checkpoint_without_its_weights(hub: FakeHub) -> None:
    path = fetch_tokenizer("Qwen/Qwen3-4B", None, hub=hub, progress=no_progress)
    assert path == hub.folder
    ((repo, files),) = hub.taken
    assert repo == "Qwen/Qwen3-4B"
    assert set(files) == {
        "chat_template.jinja",
        "config.json",
        "merges.txt",
        "model.safetensors.index.json",
        "tokenizer.json",
        "vocab.json",
    }


def test_a_checkpoint_with_its_weights(hub: FakeHub) -> None:
    kinds = {
        "org/safe": [
            "tokenizer.json",
            "model.safetensors",
            "consolidated.safetensors",
            "pytorch_model.bin",
            "m.py",
        ],
        "org/old": ["tokenizer.json", "pytorch_model-00001-of-00002.bin", "training_args.bin", "tf_model.h5"],
    }
    hub.repos = kinds
    for repo in kinds:
        fetch_weights(repo, None, hub=hub, progress=no_progress)
    assert [files for _, files in hub.taken] == [
        ["m.py", "model.safetensors", "tokenizer.json"],
        ["pytorch_model-00001-of-00002.bin", "tokenizer.json"],
    ]


def test_what_is_offered(hub: FakeHub) -> None:
    assert offers_weights("Qwen/Qwen3-4B", hub)
    assert not offers_weights("Qwen/Qwen3-4B-GGUF", hub)
    assert offers_gguf("Qwen/Qwen3-4B", None, hub)
    assert offers_gguf("Qwen/Qwen3-4B-GGUF", "Q8_0", hub)
    assert not offers_gguf("Qwen/Qwen3-4B", "Q2_K", hub)
    assert not offers_gguf("org/neither", None, hub)
    assert hub.taken == []


@pytest.mark.parametrize(
    ("repo", "quant", "taken"),
    [
        ("Qwen/Qwen3-4B-GGUF", None, ("Qwen/Qwen3-4B-GGUF", ["Qwen3-4B-Q4_K_M.gguf"])),
        ("Qwen/Qwen3-4B-GGUF", "q8_0", ("Qwen/Qwen3-4B-GGUF", ["Qwen3-4B-Q8_0.gguf"])),
        ("Qwen/Qwen3-4B", None, ("Qwen/Qwen3-4B-GGUF", ["Qwen3-4B-Q4_K_M.gguf"])),
        ("Qwen/Qwen3-4B", "Q8_0", ("Qwen/Qwen3-4B-GGUF", ["Qwen3-4B-Q8_0.gguf"])),
        ("org/both", None, ("org/both", ["both-Q8_0.gguf"])),
        ("org/big-GGUF", None, ("org/big-GGUF", [f"big-Q4_K_M-0000{i}-of-00003.gguf" for i in (1, 2, 3)])),
    ],
)
def test_a_gguf_file(hub: FakeHub, repo: str, quant: str | None, taken: tuple[str, list[str]]) -> None:
    path = fetch_gguf(repo, quant, hub=hub, progress=no_progress)
    assert hub.taken == [taken]
    assert path == hub.folder / taken[1][0]


@pytest.mark.parametrize("is_online", [True, False])
def test_a_gguf_file_beside_the_repository_is_found_without_the_hub(hub: FakeHub, is_online: bool) -> None:
    hub.online = is_online
    hub.here = {"Qwen/Qwen3-4B-GGUF": ["Qwen3-4B-Q8_0.gguf"]}
    path = fetch_gguf("Qwen/Qwen3-4B", "Q8_0", hub=hub, progress=no_progress)
    assert path.name == "Qwen3-4B-Q8_0.gguf"
    assert offers_gguf("Qwen/Qwen3-4B", "Q8_0", hub)
    hub.online, hub.here = False, {"Qwen/Qwen3-4B": QWEN}
    with pytest.raises(HubUnreachable):
        fetch_gguf("Qwen/Qwen3-4B", "Q8_0", hub=hub, progress=no_progress)
    with pytest.raises(HubUnreachable):
        offers_gguf("Qwen/Qwen3-4B", "Q8_0", hub)


def test_a_tokenizer_alone_brings_no_weights(hub: FakeHub) -> None:
    def tokenizer(repo: str, quant: str | None = None) -> Path:
        return fetch_tokenizer(repo, quant, hub=hub, progress=no_progress)

    def nothing_heavy() -> bool:
        return not any(name.endswith((".gguf", ".safetensors")) for _, files in hub.taken for name in files)

    tokenizer("org/both", "Q8_0")
    tokenizer("Qwen/Qwen3-4B-GGUF", "Q8_0")
    assert [repo for repo, _ in hub.taken] == ["org/both", "Qwen/Qwen3-4B"]
    for repo in ("org/big-GGUF", "org/neither"):
        with pytest.raises(WeightsUnavailable, match=f"{repo} has no tokenizer.json.*give --model"):
            tokenizer(repo)
    with pytest.raises(WeightsUnavailable, match="org/none-GGUF is not there"):
        tokenizer("org/none-GGUF")
    assert nothing_heavy()
    hub.here = {"org/big-GGUF": ["big-Q8_0.gguf"], "Qwen/Qwen3-4B": QWEN}
    assert tokenizer("org/big-GGUF").name == "big-Q8_0.gguf"
    hub.online = False
    assert tokenizer("org/big-GGUF").name == "big-Q8_0.gguf"
    assert tokenizer("Qwen/Qwen3-4B-GGUF") == hub.folder
    with pytest.raises(HubUnreachable):
        tokenizer("Qwen/Qwen3-8B")
    assert nothing_heavy()


def test_a_quantisation_that_is_not_there_lists_what_is(hub: FakeHub) -> None:
    with pytest.raises(
        WeightsUnavailable, match=r"of quantization Q2_K.*Qwen3-4B-Q4_K_M\.gguf, Qwen3-4B-Q8_0"
    ):
        fetch_gguf("Qwen/Qwen3-4B-GGUF", "Q2_K", hub=hub, progress=no_progress)


def test_a_repository_without_a_model_says_so(hub: FakeHub) -> None:
    with pytest.raises(WeightsUnavailable, match="org/neither has no GGUF file"):
        fetch_gguf("org/neither", None, hub=hub, progress=no_progress)


@pytest.mark.parametrize(
    ("names", "quant", "chosen"),
    [
        (["a-Q8_0.gguf", "a-Q4_K_M.gguf"], None, ["a-Q4_K_M.gguf"]),
        (["a-Q4_K_M.gguf", "a-Q4_K.gguf"], "Q4_K", ["a-Q4_K.gguf"]),
        (["a-q4_k_m.gguf"], "Q4_K_M", ["a-q4_k_m.gguf"]),
        (["mmproj-Q4_K_M.gguf", "a.imatrix.gguf", "a-IQ2_XXS.gguf"], None, ["a-IQ2_XXS.gguf"]),
        (["Q4_K_M/a-Q4_K_M-00001-of-00002.gguf", "Q4_K_M/a-Q4_K_M-00002-of-00002.gguf"], None, [0, 1]),
        (["a-Q4_K_M-00001-of-00003.gguf", "a-Q4_K_M-00003-of-00003.gguf"], None, []),
        (["a-Q4_K_M-00002-of-00002.gguf", "a-Q8_0.gguf"], None, ["a-Q8_0.gguf"]),
        (["a.safetensors"], None, []),
        ([], None, []),
    ],
)
def test_which_file_is_taken(names: list[str], quant: str | None, chosen: list[str | int]) -> None:
    assert choose_gguf(names, quant) == [names[c] if isinstance(c, int) else c for c in chosen]


def cached(folder: Path, repo: str, files: Mapping[str, bytes]) -> None:
    """The hub's own cache as huggingface_hub lays it out."""
    root = folder / f"models--{repo.replace('/', '--')}"
    commit = "a" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    for name, data in files.items():
        path = root / "snapshots" / commit / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def offline(folder: Path, *models: str) -> list[str]:
    """What ``resolve`` says of each, in a process of its own: the library reads settings as it loads."""
    program = (
        "import sys; from singletree.model_files.resolve import resolve; from singletree.errors import *\n"
        "for model in sys.argv[1:]:\n"
        "    try: found = resolve(model); print(found.path.name, found.context_window)\n"
        "    except WeightsUnavailable as error: print(error)\n"
    )
    env = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_CACHE": str(folder),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *models], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def test_offline_what_is_in_the_cache_is_found_and_the_rest_says_why(tmp_path: Path) -> None:
    header = tiny_gguf({"general.architecture": "qwen3", "qwen3.context_length": 40960})
    cached(tmp_path, "Qwen/Qwen3-4B-GGUF", {"Qwen3-4B-Q4_K_M.gguf": header})
    cached(
        tmp_path, "Qwen/Qwen3-4B", {"tokenizer.json": b"{}", "config.json": b'{"max_position_embeddings": 7}'}
    )
    written = offline(
        tmp_path, "Qwen/Qwen3-4B-GGUF", "Qwen/Qwen3-4B-GGUF:Q4_K_M", "Qwen/Qwen3-4B", "org/none"
    )
    assert written[:2] == ["Qwen3-4B-Q4_K_M.gguf 40960"] * 2
    assert written[2] == f"{'a' * 40} 7"
    assert written[3].startswith("org/none is not available from the Hugging Face Hub: HF_HUB_OFFLINE is set")


@pytest.mark.parametrize(
    ("failure", "says"),
    [
        (OSError(errno.ENOSPC, "full"), "No space left on device.*free some space, or set HF_HUB_CACHE"),
        (OSError(errno.EACCES, "no", "/models/x"), "Permission denied.*allow this user to write there"),
        (OSError(errno.EACCES, "a firewall"), "the hub cannot be reached"),
        (OSError(errno.ECONNREFUSED, "no server"), "the hub cannot be reached"),
        (OSError("lost"), "the hub cannot be reached"),
    ],
)
@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_fault_of_the_disk_is_none_of_the_network(
    failure: OSError, says: str, is_wrapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(repo: str, **_: object) -> object:
        if is_wrapped:
            raise RuntimeError("the download failed") from failure
        raise failure

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(WeightsUnavailable, match=says):
        HuggingFaceHub().files("org/model")


def test_without_the_library_the_cure_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(WeightsUnavailable, match="pip install"):
        HuggingFaceHub().files("org/name")


def test_a_hub_that_does_not_answer_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = threading.Event()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: answered.wait(60) and [])
    try:
        with pytest.raises(HubUnreachable, match="the hub cannot be reached"):
            HuggingFaceHub(0.01).files("org/model")
    finally:
        answered.set()
    assert HuggingFaceHub(60).files("org/model") == {}
