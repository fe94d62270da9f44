"""One recorded agent session behind vLLM's own API server and behind singletree, on the GPU: ``make compare-gpu``.

    python -m benchmarks.compare_gpu [--record FILE] [--recording FILE] [--shapes A,B] [--turns N] [--python PYTHON]
                                     [-- FLAGS of vllm serve]

First, where npm is: a real Claude Code works through sessions with a long CLAUDE.md behind singletree's scripted
engine, and its requests are kept (``--record FILE`` does that alone, without a GPU). Then the same requests go to every
server, in order, and each is timed to its first words; what was prefilled is the engine's own count. vLLM's sampler
plays the turns that the requests hold. Weights are random: time depends on the shape alone. ``--shapes tiny`` tests
the script on a CPU; its times mean nothing.

PYTHON has vLLM and what singletree needs to serve. ``--write`` keeps the run for docs/comparison.md.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import lzma
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import compare_report, compare_servers, compare_sessions, peers, processor
from benchmarks.compare import Bench
from benchmarks.compare_report import Cell, Comparison
from benchmarks.compare_servers import NAMES, ROWS, TINY, Host
from benchmarks.compare_sessions import SECONDS, SESSIONS
from benchmarks.template_models import Scripted, scripted
from clients import install, served, session_script
from clients.harness import Task, run
from clients.recording import Sent
from engines import real_vllm
from singletree.conversation import Part

_TEMPLATE = "llama.cpp/Qwen3.5-4B"
_SESSIONS = ("claude-as-opus", "claude")
_SERVERS = ("vLLM", "singletree")
_HANDBOOK = ("architecture.md", "cases.md", "house-rules.md", "serving.md", "benchmarks.md", "flags.md")
_HANDBOOK_CHARACTERS = 110_000
_CACHE_GIB = {"8b": 20, "hybrid": 12, "sliding": 24}
"""More than a session of 60,000 tokens; fixed, because the engines of all shapes start together on one GPU."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    # https://huggingface.co/Qwen/Qwen3-8B/blob/main/config.json, with a window for the prompts.
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "max_position_embeddings": 131_072,
    },
    # https://huggingface.co/Qwen/Qwen3.5-9B/blob/main/config.json: three layers of four keep a state, not the keys.
    "hybrid": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "tie_word_embeddings": False,
        "max_position_embeddings": 262_144,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
    },
    # https://huggingface.co/google/gemma-3-12b-it/blob/main/config.json: five layers of six see 1,024 tokens back.
    "sliding": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "layer_types": [
            "full_attention" if (layer + 1) % 6 == 0 else "sliding_attention" for layer in range(48)
        ],
        "tie_word_embeddings": True,
        "max_position_embeddings": 131_072,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000},
        },
    },
    "tiny": TINY,
}


class Recording(msgspec.Struct):
    """Sessions of a harness, with all that a server needs to play them again.

    Attributes:
        harness: its name and version.
        template: the name of the chat template, and its source.
        scripts: what the model writes, by the names in the prompts.
        sessions: the requests, by name in ``SESSIONS``.
    """

    harness: str
    turns: int
    template: tuple[str, str]
    scripts: dict[str, str]
    sessions: dict[str, list[Sent]]

    def model(self, folder: Path) -> Scripted:
        """Write the model that plays it into ``folder``."""
        file = folder.with_suffix(".jinja")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self.template[1], encoding="utf-8")
        return scripted(file, folder)


def record(template: Path, count: int, root: Path) -> Recording:
    """Let Claude Code work through each session, with ``count`` turns that call tools."""
    if not install.is_installed():
        install.install()
    name = f"{template.parent.name}/{template.stem}"
    found = Recording("Claude Code", count, (name, template.read_text(encoding="utf-8")), {}, {})
    model = found.model(root / "model")
    names = ("--model-name", NAMES[0], "--model-name", NAMES[1], "--context-window", "131072")
    folder = root / "server"
    folder.mkdir()
    with served.serving(model.folder, folder, names) as server:
        for session in _SESSIONS:
            found.sessions[session] = _play(session, model, server, root / session, found)
            print(f"recorded {session}: {len(found.sessions[session])} requests", flush=True)
    found.harness = f"Claude Code {SESSIONS[_SESSIONS[0]].harness.version}"
    return found


def _play(name: str, model: Scripted, server: served.Server, folder: Path, found: Recording) -> list[Sent]:
    session = SESSIONS[name]
    workspace, home = folder / "workspace", folder / "home"
    session_script.make_workspace(workspace)
    (workspace / "CLAUDE.md").write_text(_handbook(), encoding="utf-8")
    home.mkdir()

    def write(script: str, turn: Sequence[Part]) -> None:
        found.scripts[script] = model.writes(turn)
        (server.scripts / f"{script}.txt").write_bytes(found.scripts[script].encode())

    (prompt,), _ = compare_sessions.asked(name, workspace, found.turns, write)
    with compare_sessions.recording(server.url) as (url, sent):
        outcome = run(session.harness, Task(url, session.model, prompt, home, workspace), SECONDS)
    if outcome.answer.strip() != session_script.answer(found.turns):
        raise SystemExit(f"{name}: Claude Code ended otherwise: {outcome.complaints} {outcome.output[-800:]}")
    return [
        each._replace(headers={key: each.headers[key] for key in _HEADERS if key in each.headers})
        for each in sent
    ]


_HEADERS = ("content-type", "anthropic-version", "anthropic-beta", "user-agent", "x-api-key", "authorization")


def _handbook() -> str:
    """Return the text of a long CLAUDE.md: pages of this project."""
    docs = real_vllm.ROOT / "docs"
    return "\n\n".join((docs / name).read_text(encoding="utf-8") for name in _HANDBOOK)[:_HANDBOOK_CHARACTERS]


def _host(shape: str, python: str | None, flags: Sequence[str]) -> Host:
    if shape == "tiny" and python is None:
        cpu = compare_servers.cpu()
        return Host(cpu.command, cpu.environment, SHAPES[shape], flags)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([real_vllm.PYTHONPATH, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the newer runner takes logits processors of another interface only
    }
    command = [python or sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
    size = str(_CACHE_GIB.get(shape, 1) * 2**30)
    cache = ("--kv-cache-memory-bytes", size, "--gpu-memory-utilization", "0.4")
    return Host(command, variables, SHAPES[shape], (*cache, *flags))


def measure(
    recording: Recording, shapes: Sequence[str], python: str | None, flags: Sequence[str], root: Path
) -> Iterator[Cell]:
    """Yield the cells as they are measured; one engine a shape, and all of them start together."""

    def start(shape: str) -> compare_servers.Engine | None:
        try:
            model = recording.model(root / shape / "model")
            scripts = root / shape / "scripts"
            scripts.mkdir()
            real = stack.enter_context(compare_servers.engine(model, _host(shape, python, flags), scripts))
        except SystemExit as error:
            print(f"{shape} is left out: {error}", flush=True)
            return None
        for script, text in recording.scripts.items():
            (real.scripts / f"{script}.txt").write_bytes(text.encode())
        return real

    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        for shape, real in zip(shapes, list(pool.map(start, shapes)), strict=True):
            if real is None:
                continue
            bench = Bench(recording.model(root / f"{shape}-again"), real, recording.turns, root)
            bench.recorded("warm-up", "vLLM", real.url, recording.sessions[_SESSIONS[0]][:1])
            with ExitStack() as running:
                urls = {server: running.enter_context(ROWS[server].front(real)).url for server in _SERVERS}
                for session, sent in recording.sessions.items():
                    for server, url in urls.items():
                        cell = bench.recorded(session, server, url, sent, timed=True)
                        cell.model = shape
                        yield cell


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare_gpu", description=__doc__)
    parser.add_argument("--record", type=Path, help="only record the sessions, into this file")
    parser.add_argument(
        "--recording", type=Path, help="a file that --record wrote; by default it is made first"
    )
    parser.add_argument("--shapes", default="8b,hybrid,sliding", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--turns", type=int, default=10, help="turns with calls of a session")
    parser.add_argument("--python", help="a Python that has vLLM and what singletree needs to serve")
    parser.add_argument("--write", action="store_true", help="keep the run for docs/comparison.md")
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="flags of vllm serve, after --")
    options = parser.parse_args()
    options.shapes = options.shapes.split(",")
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"--shapes has no {', '.join(sorted(unknown))}; there are {', '.join(SHAPES)}")
    return options


def main() -> None:
    """Record, measure, print and write."""
    options = _options()
    peers.ensure_tokenizer()
    root = Path(tempfile.mkdtemp(prefix="singletree-compare-gpu-"))
    try:
        if options.recording is None:
            template = peers.ensure_templates() / f"{_TEMPLATE}.jinja"
            recording = record(template, options.turns, root / "recorded")
        else:
            recording = msgspec.json.decode(lzma.decompress(options.recording.read_bytes()), type=Recording)
        if options.record:
            options.record.write_bytes(lzma.compress(msgspec.json.encode(recording)))
            print(f"wrote {options.record}")
            return
        _measure(recording, options, root)
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _measure(recording: Recording, options: argparse.Namespace, root: Path) -> None:
    device, *versions = (
        ("cpu", real_vllm.VLLM, "for the CPU") if options.shapes == ["tiny"] else _facts(options.python)
    )
    name, source = recording.template
    result = Comparison(
        date.today().isoformat(),
        f"{device}; {processor.machine()}",
        recording.turns,
        {"vLLM": versions[0], "PyTorch": versions[1], "recorded from": recording.harness},
        {name: hashlib.sha256(source.encode()).hexdigest()},
        {session: SESSIONS[session].title for session in recording.sessions},
    )
    for cell in measure(recording, options.shapes, options.python, options.flags, root):
        result.put(cell)
        turns = zip(cell.prefilled, cell.first_ms, strict=True)
        shown = ", ".join(f"{tokens:,} in {ms:,.0f} ms" for tokens, ms in turns)
        print(f"{cell.model}, {cell.session}, {cell.server}: {shown} {cell.complaints}", flush=True)
        if options.write:
            compare_report.write(result, compare_report.GPU_FILE)


_ASK = """
import json, torch
from importlib.metadata import version
name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
print(json.dumps([name, version("vllm"), version("torch")]))
"""


def _facts(python: str | None) -> list[str]:
    """Return the GPU's name and the versions of vLLM and PyTorch, as the Python that runs vLLM has them."""
    asked = subprocess.run(
        [python or sys.executable, "-c", _ASK], capture_output=True, text=True, check=False
    )
    if asked.returncode:
        raise SystemExit(
            f"{python or sys.executable} does not have vLLM: {asked.stderr.strip()[-200:]}\ninstall it there "
            "(.venv/bin/python -m pip install '.[serve,vllm]'), or name one that has it: ARGS='--python PYTHON'"
        )
    facts: list[str] = json.loads(asked.stdout.splitlines()[-1])
    if facts[0] == "cpu":
        raise SystemExit("this machine has no GPU; ARGS='--shapes tiny' tests the script on a CPU")
    return facts


if __name__ == "__main__":
    main()
