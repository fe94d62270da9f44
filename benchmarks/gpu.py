"""The experiments of the reference with prompts of 52,000 tokens, unattended: ``make bench-gpu``.

    python -m benchmarks.gpu [--shape 8b | tiny] [--tokens N] [--rounds N] [--python PYTHON]

vLLM runs inside singletree, on the GPU of this machine, with a model of the shape of Qwen3-8B and random weights: the
time to the first token depends on the shape alone. A logits processor makes it write given turns: a thought, a word,
a call. Timed are further turns of one tool loop while the billing header stays, changes, and changes but is stripped;
and while the harness clears earlier thoughts, with exact replay and without. ``--shape tiny`` runs the same on a CPU,
to test this script; its times mean nothing.

PYTHON has vLLM and what singletree needs to serve; by default this one, and for ``tiny`` an environment that is made in
~/.cache/singletree-peers. The result is ``results/gpu/<device>-<shape>.json`` beside this file.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import documents, first_token, peers
from benchmarks.figures import GPU_FOLDER, slug
from benchmarks.first_token import Measured
from benchmarks.processor import machine
from benchmarks.vllm_api import TINY, write_model

ROOT = Path(__file__).resolve().parent.parent
SHAPES: dict[str, dict[str, Any]] = {
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
    "tiny": TINY,
}
TITLES = {"8b": "the shape of Qwen3-8B (36 layers, full attention)", "tiny": "one small layer"}
TOKENS = {"8b": 50_000, "tiny": 3000}
"""Of the prompt before the timed turns, which add about 2,000."""

_TURN = (
    "<think>\nNext is the module behind it. I read it whole, because its border may be at fault.\n</think>\n\n"
    'I read the next one.\n<tool_call>\n{"name": "read", "arguments": {"path": "next.py"}}\n</tool_call>'
)
_MARKER = " [[script:turn]]"
_PATIENCE = 420.0
_ROOM = 12_000  # tokens of the window beside the prompt


def experiment(shape: str, tokens: int, rounds: int) -> Measured:
    """Run all cases, in the environment that has vLLM."""
    with TemporaryDirectory(prefix="singletree-gpu-") as made:
        folder = Path(made)
        (folder / "scripts").mkdir()
        (folder / "scripts" / "turn.txt").write_text(_TURN, encoding="utf-8")
        os.environ["SINGLETREE_SAMPLER_SCRIPTS"] = str(folder / "scripts")
        os.environ["SINGLETREE_SAMPLER_LOG"] = str(folder / "sampled.jsonl")
        # On a GPU vLLM's newer model runner is the default; it takes logits processors of another interface only.
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
        model = write_model(folder / f"random-{shape}", SHAPES[shape])
        serve = ["--engine", "vllm", "--model", str(model), "--slots", "2"]
        serve += ["--context-window", str(tokens + _ROOM)]
        engine = ["--load-format", "dummy", "--enforce-eager"]
        engine += ["--logits-processors", "engines.scripted_sampler:ScriptedSampler"]
        return first_token.measure_all(
            serve, tokens, rounds, engine_arguments=engine, marker=_MARKER, patience=_PATIENCE
        )


def device() -> str:
    """Return the name of the GPU; ``cpu`` where there is none."""
    torch = import_module("torch")
    return str(torch.cuda.get_device_name(0)) if torch.cuda.is_available() else "cpu"


def write(measured: Measured, shape: str, name: str) -> Path:
    """Write the result, and return its path."""
    GPU_FOLDER.mkdir(parents=True, exist_ok=True)
    path = GPU_FOLDER / f"{slug(machine() if name == 'cpu' else name)}-{shape}.json"
    turns = {case.name: [asdict(turn) for turn in timed] for case, timed in measured.items()}
    versions = {package: version(package) for package in ("vllm", "torch")}
    found: dict[str, Any] = {"date": documents.today(), "machine": machine(), "device": name, "shape": shape}
    found |= {"versions": versions, "turns": turns}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return path


def page(file: Path) -> str:
    """Return the table of a result as Markdown, with a line on where and how it was measured."""
    found = json.loads(file.read_text(encoding="utf-8"))
    cases = {case.name: case for group in first_token.GROUPS for case in group}
    measured = {
        cases[name]: [first_token.Timed(**turn) for turn in turns] for name, turns in found["turns"].items()
    }
    versions = " on ".join(f"{package} {number}" for package, number in found["versions"].items())
    rounds = min(map(len, measured.values()))
    conditions = (
        f"{found['date']}; {found['device']}; {found['machine']}. {versions}, eager, in process; random weights, "
        f"{TITLES[found['shape']]}; {rounds} turns timed in each case, every figure is the median."
    )
    return f"{conditions}\n\n{first_token.table(measured)}"


def _program(shape: str, python: str | None) -> tuple[str, dict[str, str]]:
    """Return the Python that has vLLM, and its environment."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in ("", "src", "tests", "docs"))
    if python is None and shape == "tiny":
        from engines import real_vllm

        own, environment = real_vllm.program()
        return str(own), {**environment, "PYTHONPATH": paths, "VLLM_CPU_KVCACHE_SPACE": "1"}
    if python is None and importlib.util.find_spec("vllm") is None:
        raise SystemExit(
            "vLLM is not installed here: .venv/bin/python -m pip install '.[serve,vllm]', or name a Python that has it "
            "with ARGS='--python PYTHON'"
        )
    return python or sys.executable, {**os.environ, "PYTHONPATH": paths}


def main() -> None:
    """Start this program anew in the environment of vLLM, measure, print and write."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="8b")
    parser.add_argument("--tokens", type=int, help="of the prompt before the timed turns")
    parser.add_argument("--rounds", type=int, default=5, help="turns timed in each case, at most 6")
    parser.add_argument("--python", help="a Python that has vLLM and what singletree needs to serve")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    peers.ensure_tokenizer()
    if not options.inside:
        python, environment = _program(options.shape, options.python)
        command: Sequence[str] = [python, "-m", "benchmarks.gpu", "--inside", *sys.argv[1:]]
        raise SystemExit(subprocess.call(command, env=environment, cwd=ROOT))
    name = device()
    if name == "cpu" and options.shape != "tiny":
        raise SystemExit("this machine has no GPU; ARGS='--shape tiny' tests the script on a CPU")
    tokens = options.tokens or TOKENS[options.shape]
    measured = experiment(options.shape, tokens, options.rounds)
    print(first_token.report(measured, f"vLLM on {name}, random weights, {options.shape}", options.rounds))
    print(f"\nwrote {write(measured, options.shape, name)}")


if __name__ == "__main__":
    main()
