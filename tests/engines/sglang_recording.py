"""What a real SGLang said to what ``RemoteEngine`` asked: recorded into ``sglang_wire/``, replayed in the tests.

``PYTHONPATH=tests .venv/bin/python -m engines.sglang_recording`` records everything again, in both forms of its
streams; review the difference. The files have the form of those in ``vllm_wire/``.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from engines import real_sglang
from engines.tiny_vlm import BEFORE, BEHIND, LOAD, PAD, write_tiny_vlm
from engines.tiny_vlm import MODEL as TINY_VLM
from engines.vllm_recording import SCHEMA, Exchange, RecordingTransport, Scenario, constrained, greedy
from server.picture_model import PNG, picture
from singletree.engines.engine import GenerationJob
from singletree.errors import SingletreeError
from singletree.pictures import PromptPicture
from singletree.remote.engine import RemoteEngine
from singletree.remote.sglang import SglangServer

WIRE = Path(__file__).parent / "sglang_wire"
OF = 282  # the token " of", the third of the answer

SCENARIOS: dict[str, Scenario] = {
    "answer": Scenario(greedy()),
    "stop_token": Scenario(greedy(40), more={"stop_token_ids": (OF,)}),
    "length": Scenario(greedy(5, ignore_eos=True)),
    "logprobs": Scenario(greedy(3, logprobs=2)),
    "prompt_logprobs": Scenario(greedy(2, logprobs=0, prompt_logprobs=1)),
    "json_schema": constrained("json_schema", SCHEMA),
    "bad_regex": constrained("regex", "(["),
}


PICTURE_SCENARIOS: dict[str, Sequence[str | bytes]] = {
    "picture": ("red",),
    "picture_again": ("red",),
    "picture_changed": ("blue",),
    "two_pictures": ("red", "green"),
    "picture_damaged": (b"no picture",),
}
"""The colours of the pictures of a prompt, or their bytes. The file of each has its name."""


async def record(url: str, form: str) -> None:
    """Record every scenario; ``form`` is that of the server's streams, the beginning of the files' names."""
    WIRE.mkdir(exist_ok=True)
    transport = RecordingTransport(url)
    engine = RemoteEngine(SglangServer(), url, transport=transport)
    await engine.start()
    transport.got["/v1/models"].save("models", WIRE)
    for name, scenario in SCENARIOS.items():
        job = GenerationJob(scenario.prompt, scenario.sampling, name, **scenario.more)
        try:
            print(name, [chunk async for chunk in engine.generate(job)])
        except SingletreeError as error:
            print(name, type(error).__name__, error)
        transport.posted().save(f"{form}_{name}", WIRE)
    await engine.close()


async def record_pictures(url: str) -> None:
    """Record prompts with pictures, on a server that runs ``tiny_vlm``."""
    transport = RecordingTransport(url)
    engine = RemoteEngine(SglangServer(), url, transport=transport)
    await engine.start()
    transport.got["/model_info"].save("model_info", WIRE)
    for name, pictures in PICTURE_SCENARIOS.items():
        ids = [*b"A picture: "]
        placed = []
        for colour in pictures:
            data = colour if isinstance(colour, bytes) else picture(colour, size=(112, 112))
            place = len(ids) + 1
            ids += [BEFORE, PAD, BEHIND, *b" and "]
            key = hashlib.sha256(data).hexdigest()
            placed.append(PromptPicture(place, PAD, key, PNG, data, (BEFORE,), (BEHIND,)))
        job = GenerationJob(ids, greedy(2), name, pictures=tuple(placed))
        try:
            print(name, [chunk async for chunk in engine.generate(job)])
        except SingletreeError as error:
            print(name, type(error).__name__, error)
        transport.posted().save(name, WIRE)
    await engine.close()


def load(form: str, name: str) -> Exchange:
    """Return one recorded exchange."""
    return Exchange.load(f"{form}_{name}", WIRE)


def main() -> int:
    """Record both forms of the streams."""
    for form, incremental in (("incremental", True), ("cumulative", False)):
        with real_sglang.running_sglang(incremental=incremental) as server:
            asyncio.run(record(server.url, form))
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_tiny_vlm(Path(scratch) / TINY_VLM)
        with real_sglang.running_sglang("--enable-multimodal", *LOAD, folder=folder) as server:
            asyncio.run(record_pictures(server.url))
    return 0


if __name__ == "__main__":
    sys.exit(main())
