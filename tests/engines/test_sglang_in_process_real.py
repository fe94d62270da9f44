"""``InProcessSglangEngine`` with the real SGLang on the CPU, in an environment beside vLLM's: ``make engines``.

Outside that environment the one test here runs this file inside it. SGLang's kernels for the CPU are stand-ins there
(attention and sampling run on plain PyTorch); its scheduler, prefix cache and grammars are its own.
"""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import pytest_asyncio

from engines import real_sglang, real_vllm
from engines.contract import (
    CHECKS,
    Check,
    Subject,
    closing_ends_what_is_in_flight,
    collect,
    keeps_tenants_apart,
    tokens_of,
)
from engines.tool_loop import DIALECTS, Dialect, forced_calls
from engines.vllm_recording import FRANCE, ITALY, JAPAN, QUESTION, SCHEMA, STRUCTURAL_TAG, greedy
from engines.whole_server import complete, killed
from singletree.conversation import Sampling
from singletree.engines.engine import Chunk, Constraint, GenerationJob
from singletree.errors import EngineFailed, InvalidRequest
from singletree.in_process.sglang_engine import InProcessSglangEngine
from singletree.in_process.startup import EngineSettings

pytestmark = pytest.mark.engines

INSIDE = importlib.util.find_spec("sglang") is not None
inside = pytest.mark.skipif(not INSIDE, reason="runs in SGLang's own environment")
SECONDS = 1800
SAVING_SECONDS = 60.0
WINDOW = 4096


@pytest.mark.skipif(INSIDE, reason="runs outside SGLang's environment")
def test_all_of_this_file_in_the_environment_of_sglang() -> None:
    python, environment = real_sglang.sglang_program()
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-m", "engines", "-p", "no:cacheprovider", __file__],
        cwd=real_vllm.ROOT,
        env=environment,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0


def make() -> InProcessSglangEngine:
    _, model = real_vllm.install()
    settings = EngineSettings(str(model), WINDOW, 8, tuple(real_sglang.IN_PROCESS))
    return InProcessSglangEngine(settings, name=real_vllm.MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject() -> AsyncIterator[Subject]:
    engine = make()
    await engine.start()
    yield Subject(engine, make, QUESTION, [FRANCE, ITALY, JAPAN])
    await engine.close()


async def asked(
    subject: Subject, sampling: Sampling, prompt: Any = QUESTION, **more: Any
) -> tuple[list[int], Chunk]:
    chunks = await collect(subject.engine.generate(GenerationJob(prompt, sampling, "asked", **more)))
    return tokens_of(chunks), chunks[-1]


@inside
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "check",
    # SGLang cannot be started twice in one process; the last test here closes the one that runs.
    [check for check in CHECKS if check is not closing_ends_what_is_in_flight],
    ids=lambda check: check.__name__,
)
async def test_contract(subject: Subject, check: Check) -> None:
    await check(subject)


@inside
def test_a_killed_server_finds_again_what_it_saved(tmp_path: Path) -> None:
    _, model = real_vllm.install()
    serve = ["--prefix-cache-path", str(tmp_path / "saved"), "--engine", "sglang", "--model", str(model)]
    serve += ["--model-name", "any", "--context-window", str(WINDOW), "--", *real_sglang.IN_PROCESS]
    numbers = random.Random(7)
    prompt = [numbers.randrange(1000, 40_000) for _ in range(600)]
    with killed([*serve, *real_sglang.SAVES], tmp_path / "log") as port:
        cold = complete(port, prompt, 8)
        deadline = time.monotonic() + SAVING_SECONDS
        while len(list((tmp_path / "saved").rglob("*.bin"))) < len(prompt) // real_sglang.PAGE:
            assert time.monotonic() < deadline, "the pages of the prompt were not saved"
            time.sleep(0.2)
    serve = ["--capture", str(tmp_path / "captures"), *serve]
    with killed([*serve, *real_sglang.SAVES], tmp_path / "log") as port:
        restored = complete(port, prompt, 8)
        name = json.dumps({"new_version": "step-1"}).encode()
        with urlopen(f"http://127.0.0.1:{port}/update_weight_version", name) as answer:
            assert json.load(answer)["salts"]
        named = complete(port, prompt, 8)
    assert cold.cached == 0
    assert restored.cached == (len(prompt) - 1) // real_sglang.PAGE * real_sglang.PAGE
    assert restored.token_ids == cold.token_ids == named.token_ids
    assert named.cached == 0, "what other weights have computed was read from memory or from a file"


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_a_cache_salt_keeps_tenants_apart(subject: Subject) -> None:
    await keeps_tenants_apart(subject)


@inside
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    "constraint",
    [
        Constraint("json_schema", SCHEMA),
        Constraint("regex", "[ab]{3,6}"),
        Constraint("gbnf", 'root ::= "yes" | "no"'),
        Constraint("structural_tag", STRUCTURAL_TAG),
    ],
    ids=lambda each: each.kind,
)
async def test_constraints(subject: Subject, constraint: Constraint) -> None:
    free, _ = await asked(subject, greedy(80))
    tokens, last = await asked(subject, greedy(80), constraint=constraint)
    assert last.finish == "stop"
    assert tokens != free


@inside
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("sampling", "more"),
    [
        (Sampling(max_tokens=2, top_p=0.0), {}),
        (Sampling(max_tokens=2), {"constraint": Constraint("json_schema", {"type": "nonsense"})}),
    ],
)
async def test_refusals_leave_it_well(subject: Subject, sampling: Sampling, more: Any) -> None:
    with pytest.raises(InvalidRequest, match="refused"):
        await asked(subject, sampling, **more)
    assert (await asked(subject, greedy()))[1].finish == "stop"


@inside
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda each: each.path)
async def test_a_tool_loop_through_the_whole_server(
    subject: Subject, dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.memory.PATIENCE_SECONDS", 600.0)  # The first grammar is compiled for long.
    counts = await forced_calls(subject.engine, dialect)
    assert counts == sorted(counts)
    assert counts[0] < counts[3], counts


@inside
@pytest.mark.asyncio(loop_scope="module")
async def test_closing_ends_what_is_in_flight(subject: Subject) -> None:
    """The last test: SGLang is closed."""
    held = subject.engine.generate(GenerationJob(QUESTION, greedy(200, ignore_eos=True), "held"))
    await anext(held)
    await subject.engine.close()
    with pytest.raises(EngineFailed):
        await collect(held)
    with pytest.raises(EngineFailed):
        await asked(subject, greedy())
    await subject.engine.close()
