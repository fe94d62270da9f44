"""Judges that other projects wrote, against a real server with a real model: ``make judges``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.served import running
from engines import real_vllm
from engines.tiny_shapes import tiny_model
from judges import install
from judges.outcomes import judge_report, read_expected

pytestmark = pytest.mark.judges

MODEL = "smollm2-135m-instruct"
SECONDS = 1200
HERE = Path(__file__).resolve().parent

LLAMA_FILES = [
    f"unit/test_{name}.py"
    for name in ("compat_anthropic", "compat_oai_responses", "chat_completion", "tool_call")
]
RESOURCES = "tests/api_resources"
OPENAI_FILES = [
    f"{RESOURCES}/{name}"
    for name in ("chat", "conversations", "responses", "test_completions.py", "test_conversations.py",
                 "test_models.py", "test_responses.py")
]  # fmt: skip
ANTHROPIC_FILES = [
    f"{RESOURCES}/{name}"
    for name in ("test_messages.py", "test_models.py", "beta/test_messages.py", "beta/test_models.py")
]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The port of a server with the default model, under any name, whose answers end after 128 tokens."""
    folder = tmp_path_factory.mktemp("judged")
    port = real_vllm.free_port()
    stored = ["--store-path", str(folder / "responses.sqlite")]
    flags = ["--model-name", MODEL, "*", "--max-output-tokens", "128", *stored]
    with running(flags, port, folder / "output.txt"):
        yield port


def _installed(what: str, *steps: object) -> None:
    """Call the steps of an installation; skip the test where one fails."""
    for step in steps:
        try:
            step()  # type: ignore[operator]
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"{what} cannot be installed here: {error}")


def _judge(judge: str, folder: Path, files: list[str], report: Path, **variables: str) -> None:
    """Run test files of a suite, and compare what they gave with what is expected."""
    # The suites' own settings are for their mock servers: they run in parallel, and a warning is an error.
    options = ["-q", "-n", "0", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    command = [
        str(install.suites()),
        "-m",
        "pytest",
        *options,
        "--timeout",
        "300",  # One test generates under twenty names of models.
        f"--junitxml={report}",
        *files,
    ]
    environment = {**os.environ, "PYTHONPATH": str(HERE), **variables}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert report.exists(), f"{judge} did not run:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    verdict = judge_report(report, read_expected(judge))
    print(f"{judge}: {verdict.passed} passed, {verdict.expected} failed as expected")
    assert verdict.passed, done.stdout[-3000:]
    assert [f"{failure.test}: {failure.message[:400]}" for failure in verdict.unexpected] == []
    assert [f"{rule.tests} no longer fails with {rule.message}" for rule in verdict.stale] == []


def test_llama_server_tests(port: int, tmp_path: Path) -> None:
    _installed("llama.cpp's tests", lambda: install.source(install.LLAMA))
    folder = install.source(install.LLAMA) / "vendor" / "llama.cpp" / "tools" / "server" / "tests"
    files = ["-p", "llama_paths", "-m", "not slow", *LLAMA_FILES]
    _judge("llama.cpp", folder, files, tmp_path / "report.xml", DEBUG_EXTERNAL="1", PORT=str(port))


def test_openai_resources(port: int, tmp_path: Path) -> None:
    _installed("the tests of openai", lambda: install.source(install.OPENAI))
    files = ["-k", "strict and not Async", *OPENAI_FILES]
    url = f"http://127.0.0.1:{port}/v1"
    _judge("openai", install.source(install.OPENAI), files, tmp_path / "report.xml", TEST_API_BASE_URL=url)


def test_anthropic_resources(port: int, tmp_path: Path) -> None:
    _installed("the tests of anthropic", lambda: install.source(install.ANTHROPIC))
    files = ["-k", "strict and not Async", *ANTHROPIC_FILES]
    url = f"http://127.0.0.1:{port}"
    _judge(
        "anthropic", install.source(install.ANTHROPIC), files, tmp_path / "report.xml", TEST_API_BASE_URL=url
    )


def test_abench(port: int, tmp_path: Path) -> None:
    """A closed loop: each turn sends the model's own answers back. All but the first find a warm prefix cache."""
    _installed("agentic-bench", install.suites)
    output = tmp_path / "abench.jsonl"
    workload = ["--dataset-name", "random", "--num-sessions", "2", "--turns", "4", "--output-len", "16"]
    workload += ["--system-prompt-len", "0", "--min-context", "0", "--input-increment", "100", "--no-gaps"]
    server = ["--base-url", f"http://127.0.0.1:{port}", "--model", MODEL, "--max-concurrency", "2"]
    command = [str(install.suites().with_name("abench")), "run", *server, *workload]
    command += ["--output-file", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(output.read_text(encoding="utf-8").splitlines()[-1])
    assert result["metrics"]["completed_sessions"] == 2
    assert result["metrics"]["successful_turns"] == 8
    print(f"abench: prefix cache ratio {result['metrics']['prefix_cache_ratio']}")
    assert result["metrics"]["prefix_cache_ratio"] > 0.5


def test_guidellm(port: int, tmp_path: Path) -> None:
    _installed("guidellm", install.guidellm)
    prompts = tmp_path / "prompts.jsonl"
    questions = ("Why is the sky blue?", "Name a color.", "Count to five.")
    prompts.write_text(
        "".join(json.dumps({"prompt": each}) + "\n" for each in questions * 2), encoding="utf-8"
    )
    output = tmp_path / "report.json"
    command = [
        str(install.guidellm().with_name("guidellm")), "run",
        "--backend", f"kind=openai_http,target=http://127.0.0.1:{port},model={MODEL}",
        "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
        "--data", f"kind=json_file,path={prompts}", "--output", f"kind=json,path={output}", "--disable-progress",
    ]  # fmt: skip
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(output.read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert (totals["successful"], totals["errored"]) == (6, 0)


@pytest.mark.parametrize(("flags", "survive"), [([], 3), (["--no-foresight"], 0)], ids=["default", "off"])
def test_agent_sim(flags: list[str], survive: int, tmp_path: Path) -> None:
    """Main agents whose sub-agents need all of a small cache: are they cached afterwards? Only tokens are judged."""
    _installed("cache-pressure", install.cache_pressure)
    port, output = real_vllm.free_port(), tmp_path / "run.json"
    program = (sys.executable, "-m", "judges.small_cache")
    served = ["--engine", "llamacpp", "--model", str(tiny_model("worded")), "--slots", "2", "--no-store"]
    workload = ["--sessions", "3", "--main-tokens", "2400", "--sub-tokens", "1200", "--step-tokens", "600"]
    workload += ["--finalize-tokens", "200", "--max-tokens", "16", "--max-context", "16384", "--salt", "42"]
    command = [str(install.cache_pressure().with_name("agent-sim")), *workload, "--miss-threshold", "0"]
    command += ["--base-url", f"http://127.0.0.1:{port}/v1", "--no-viz", "--output", str(output)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with running([*served, *flags], port, tmp_path / "output.txt", program=program, environment=environment):
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    records = json.loads(output.read_text(encoding="utf-8"))["records"]
    last = [each for each in records if each["phase"] == "finalize"]
    read = sum(each["prompt"] - each["cached"] for each in records)
    print(f"agent-sim {flags}: {[(each['cached'], each['prompt']) for each in last]}, {read} tokens read")
    assert len(last) == 3, done.stdout[-2000:] + done.stderr[-2000:]
    assert sum(each["reuse"] > 0.66 for each in last) == survive


def test_schemathesis(tmp_path: Path) -> None:
    """Requests made from the description of the API, most of them wrong: none makes the server fail, or hang."""
    _installed("schemathesis", install.schemathesis)
    port = real_vllm.free_port()
    flags = ["--engine", "scripted", "--inspect", "--capture", str(tmp_path / "captured")]
    flags += ["--store-path", str(tmp_path / "responses.sqlite")]
    command = [str(install.schemathesis().with_name("schemathesis")), "run", "--no-color"]
    command += [f"http://127.0.0.1:{port}/openapi.json", "--checks", "not_a_server_error"]
    command += ["--max-examples", "25", "--request-timeout", "20"]
    with running(flags, port, tmp_path / "output.txt") as server:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS)
        assert server.poll() is None
    print("schemathesis:", *(line.strip() for line in done.stdout.splitlines() if line.endswith(" passed")))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "Traceback" not in (tmp_path / "output.txt").read_text(encoding="utf-8")


def test_vllm_bench_serve(port: int, tmp_path: Path) -> None:
    venv = real_vllm.PEERS / "vllm"
    if not (venv / f".ready-{real_vllm.VLLM}").exists():
        pytest.skip("vLLM is not installed: run `make engines` first (3.5 GB)")
    _, model = real_vllm.install()
    command = [
        str(venv / "bin" / "vllm"), "bench", "serve", "--backend", "openai-chat", "--model", MODEL,
        "--base-url", f"http://127.0.0.1:{port}", "--endpoint", "/v1/chat/completions", "--tokenizer", str(model),
        "--dataset-name", "random", "--random-input-len", "64", "--random-output-len", "16", "--num-prompts", "8",
        "--max-concurrency", "2", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json",
    ]  # fmt: skip
    environment = real_vllm.environment()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (8, 0)
