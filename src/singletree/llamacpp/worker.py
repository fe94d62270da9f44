"""The program of the child process in which llama.cpp runs. Only ``state_settings`` is imported by others.

It reads one line of JSON settings from standard input and writes one line to standard output:
``{"socket": path, "states": path, "version": text, "state_settings": text}`` or ``{"error": text}``. It then serves
llama.cpp's HTTP interface on that UNIX socket, and saves states of slots in that folder, until its standard input
closes, which also happens when the parent process ends for any reason.

It imports only the standard library and xllamacpp, so that it starts fast and needs no import path.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from typing import Any, TextIO

# The path of a UNIX socket has at most 104 bytes (macOS), which limits the folder before it.
_LONGEST_FOLDER = 80

_STATE_SETTINGS = (
    *("cache_type_k", "cache_type_v", "flash_attn_type", "swa_full", "lora_adapters"),
    *("rope_scaling_type", "rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"),
    *("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"),
)


def main() -> None:
    """Load the model, answer, and serve until standard input closes."""
    # Ctrl-C in a terminal reaches every process of the group, but the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Output of llama.cpp must not mix with the answer.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    # Saved states contain prompts: they are for their owner only.
    os.umask(0o077)
    short = len(tempfile.gettempdir()) <= _LONGEST_FOLDER
    # mkdtemp creates a folder that only its owner may enter: the socket needs no key.
    folder = tempfile.mkdtemp(prefix="singletree-", dir=None if short else "/tmp")
    states = tempfile.mkdtemp(prefix="singletree-", dir=settings["parking_root"])
    try:
        _serve(settings, os.path.join(folder, "llama.sock"), states, answer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(states, ignore_errors=True)
        # Nobody reads the running generations any more; llama.cpp's own shutdown would finish them first.
        os._exit(0)


def _serve(settings: dict[str, Any], socket: str, states: str, answer: TextIO) -> None:
    os.environ["LLAMA_MEDIA_MARKER"] = settings["media_marker"]  # otherwise another one with each start
    try:
        import xllamacpp

        params = xllamacpp.CommonParams()
        server = _load(xllamacpp, params, settings, socket, states)
        version = str(getattr(xllamacpp, "__version__", ""))
    except Exception as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), file=answer, flush=True)
        return
    ready = {"socket": socket, "states": states, "version": version, "state_settings": state_settings(params)}
    print(json.dumps(ready), file=answer, flush=True)
    sys.stdin.read()
    del server


def state_settings(params: Any) -> str:
    """Return the settings of ``CommonParams`` that change the state of a slot, as text."""
    return " ".join(f"{name}={getattr(params, name, None)}" for name in _STATE_SETTINGS)


def _load(xllamacpp: Any, params: Any, settings: dict[str, Any], socket: str, states: str) -> Any:
    params.model.path = settings["path"]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["kv_tokens"]
    params.kv_unified = True
    params.n_batch = params.n_ubatch = settings["batch_tokens"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    if settings["temperature"] is not None:
        params.sampling.temp = settings["temperature"]
    params.cache_ram_mib = settings["cache_ram_mib"]
    params.cache_idle_slots = settings["cache_idle_slots"]
    params.verbosity = settings["verbosity"]
    if settings["mmproj"]:
        params.mmproj.path = settings["mmproj"]
    params.hostnames = [socket]
    params.slot_save_path = os.path.join(states, "")
    # Prompts are token ids: llama.cpp needs no chat template and no web page.
    params.use_jinja = params.ui = False
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
