"""A whole server is killed or swaps its models, and its sessions go on without being read again."""

from __future__ import annotations

import json
import signal
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

from clients.served import running
from engines import real_vllm
from engines.tiny_shapes import tiny_model

PROMPT = [1 + at * at % 251 for at in range(600)]
PATIENCE = 30.0


def ask(port: int, prompt: Sequence[int], model: str = "dense") -> tuple[int, list[int]]:
    """Return how many tokens of the prompt were cached, and the answer's tokens."""
    body = {
        **{"model": model, "prompt": list(prompt), "max_tokens": 32, "temperature": 0},
        **{"return_token_ids": True, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:
        answer = json.load(reply)
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"], answer["choices"][0]["token_ids"]


@contextmanager
def server(tmp_path: Path, *flags: str) -> Iterator[tuple[int, Popen[bytes]]]:
    """A server with the folder ``saved``."""
    port = real_vllm.free_port()
    own = ["--engine", "llamacpp", "--model", str(tiny_model("dense")), "--model-name", "dense", "--no-store"]
    with running(
        [*(flags or (*own, "--prefix-cache-path", str(tmp_path / "saved")))], port, tmp_path / "log"
    ) as process:
        yield port, process


def until(tmp_path: Path, files: int, log: str = "") -> None:
    """Wait until so many states are saved, and the log has that text."""
    for _ in range(int(PATIENCE * 10)):
        if (
            len(list((tmp_path / "saved").glob("*.prefix"))) == files
            and log in (tmp_path / "log").read_text()
        ):
            return
        time.sleep(0.1)
    raise AssertionError((tmp_path / "log").read_text())


def test_a_killed_server_goes_on_with_the_next_turn(tmp_path: Path) -> None:
    with server(tmp_path) as (port, process):
        _, first = ask(port, PROMPT)
        second = [*PROMPT, *first, *PROMPT[:100]]
        cached, read = ask(port, second)
        assert cached == len(PROMPT) + 31
        third = [*second, *read, 5, 6, 7]
        until(tmp_path, 1, "saved 763 tokens to disk")
        _, expected = ask(port, third)
        process.send_signal(signal.SIGKILL)
        process.wait()
    with server(tmp_path) as (port, _):
        assert ask(port, third) == (len(third) - 4, expected)


def test_two_models_of_one_server_take_turns(tmp_path: Path) -> None:
    config = tmp_path / "models.toml"
    tables = [
        f'[[models]]\nmodel = "{tiny_model(shape)}"\nmodel-name = "{shape}"\nengine = "llamacpp"\nidle-unload = 1\n'
        for shape in ("dense", "hybrid")
    ]
    config.write_text("\n".join([f'prefix-cache-path = "{tmp_path / "saved"}"', *tables]))
    with server(tmp_path, "--config", str(config), "--no-store") as (port, _):
        answers = {shape: ask(port, PROMPT, shape)[1] for shape in ("dense", "hybrid")}
        until(tmp_path, 2, "the engine of hybrid is stopped")
        for shape, answer in answers.items():
            cached, _ = ask(port, [*PROMPT, *answer, 5, 6, 7], shape)
            assert cached == len(PROMPT) + len(answer) - 1
