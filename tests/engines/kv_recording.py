"""Records the KV events of real engines: ``python tests/engines/kv_recording.py vllm|sglang``.

Each recording in ``kv_events`` is a list of steps, as msgpack: a request with its prompt, what the engine answered, and
the frames that it published meanwhile. A small cache makes it evict blocks. Needs pyzmq; the engines are installed as
for the tests marked ``engines``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import msgspec
import zmq

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engines.real_sglang import SGLANG, running_sglang
from engines.real_vllm import VLLM, Server, running

FOLDER = Path(__file__).parent / "kv_events"
QUIET_SECONDS = 1.0

ONE = [(7 * n) % 9000 + 20 for n in range(150)]
OTHER = [(11 * n) % 9000 + 20 for n in range(200)]


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        value: dict[str, Any] = json.load(answer)
        return value


def _vllm(url: str, prompt: list[int], salt: str) -> tuple[list[int], int]:
    body = {"model": "smollm2", "prompt": prompt, "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True} | ({"cache_salt": salt} if salt else {})
    answer = _post(f"{url}/v1/completions", body)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["token_ids"], details.get("cached_tokens") or 0


def _sglang(url: str, prompt: list[int], salt: str) -> tuple[list[int], int]:
    sampling = {"max_new_tokens": 40, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling} | ({"extra_key": salt} if salt else {})
    answer = _post(f"{url}/generate", body)
    return answer["output_ids"], answer["meta_info"]["cached_tokens"]


class Subscriber:
    """Collects frames until it is closed."""

    def __init__(self, endpoint: str) -> None:
        self.frames: list[list[bytes]] = []
        context: Any = zmq.Context.instance()
        self._socket: Any = context.socket(zmq.SUB)
        self._socket.subscribe(b"")
        self._socket.rcvtimeo = 200
        self._socket.connect(endpoint)
        self._open = True
        self._thread = threading.Thread(target=self._collect)
        self._thread.start()

    def _collect(self) -> None:
        while self._open:
            try:
                self.frames.append(self._socket.recv_multipart())
            except zmq.Again:
                continue

    def take(self) -> list[list[bytes]]:
        taken, self.frames = self.frames, []
        return taken

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self._socket.close(0)


def _replay(endpoint: str) -> list[list[bytes]]:
    socket: Any = zmq.Context.instance().socket(zmq.DEALER)
    socket.rcvtimeo = 3000
    socket.connect(endpoint)
    socket.send_multipart([b"", (0).to_bytes(8, "big")])
    frames: list[list[bytes]] = []
    try:
        while not frames or frames[-1][-2] != (-1).to_bytes(8, "big", signed=True):
            frames.append(socket.recv_multipart())
    except zmq.Again:
        print("no end of the replay", file=sys.stderr)
    socket.close(0)
    return frames


Ask = Callable[[str, list[int], str], tuple[list[int], int]]


def record(
    name: str, version: str, ask: Ask, serve: Callable[[str], AbstractContextManager[Server]]
) -> dict[str, Any]:
    """Ask for turns of two sessions, one of them with a salt, until blocks are evicted."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/events"
        with serve(endpoint) as server:
            subscriber = Subscriber(endpoint)
            time.sleep(2 * QUIET_SECONDS)
            steps: list[dict[str, Any]] = []
            grown = ONE
            for prompt, salt in (
                ("one", ""),
                ("grown", ""),
                ("one", ""),
                ("one", "tenant"),
                ("one", "tenant"),
                ("other", ""),
                *(("filler", str(n)) for n in range(5)),
                ("one", ""),
            ):
                tokens = {"one": ONE, "grown": grown, "other": OTHER}.get(prompt)
                if tokens is None:
                    tokens, salt = [(13 * n + int(salt) * 1000) % 9000 + 20 for n in range(200)], ""
                generated, cached = ask(server.url, tokens, salt)
                if prompt == "one" and grown is ONE:
                    grown = [*ONE, *generated, *OTHER[:60]]
                time.sleep(QUIET_SECONDS)
                steps.append(
                    {
                        "prompt": tokens,
                        "salt": salt,
                        "generated": generated,
                        "cached": cached,
                        "frames": subscriber.take(),
                    }
                )
                print(prompt, salt, "cached", cached, "frames", len(steps[-1]["frames"]), flush=True)
            replayed = _replay(f"{endpoint}.replay")
            subscriber.close()
    return {"engine": name, "version": version, "steps": steps, "replay": replayed}


def _config(endpoint: str) -> str:
    return json.dumps(
        {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": endpoint,
            "replay_endpoint": f"{endpoint}.replay",
            "topic": "kv-events",
        }
    )


RECORDERS: Mapping[str, Callable[[], dict[str, Any]]] = {
    "vllm": lambda: record(
        "vllm",
        VLLM,
        _vllm,
        lambda endpoint: running(
            "--block-size", "32", "--num-gpu-blocks-override", "32", "--kv-events-config", _config(endpoint),
            max_model_len=512,
        ),
    ),
    "sglang": lambda: record(
        "sglang",
        SGLANG,
        _sglang,
        lambda endpoint: running_sglang(
            "--kv-events-config", _config(endpoint), "--max-total-tokens", "1024", "--context-length", "512"
        ),
    ),
}  # fmt: skip


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in names:
        (FOLDER / f"{name}.msgpack").write_bytes(msgspec.msgpack.encode(RECORDERS[name]()))


if __name__ == "__main__":
    main(sys.argv[1:] or list(RECORDERS))
