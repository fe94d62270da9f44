"""The child process in which llama.cpp runs. A program, not a module to import.

On standard input it reads one line of JSON settings; on standard output it answers with one line,
``{"socket": path, "version": text}`` or ``{"error": text}``, and then serves llama.cpp's HTTP interface on
that UNIX socket until its standard input closes, which also happens when the parent dies in whatever way.

It imports the standard library and xllamacpp only, so that it starts fast and needs no import path.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
from typing import Any, TextIO

# A path to a UNIX socket has at most 104 bytes (macOS) and so has the folder before it.
_LONGEST_FOLDER = 80


def main() -> None:
    """Load, answer, and serve until standard input closes."""
    # Ctrl-C in a terminal reaches every process of the group; the parent decides when this one ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What llama.cpp prints must not mix with the answer.
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    settings = json.loads(sys.stdin.readline())
    short = len(tempfile.gettempdir()) <= _LONGEST_FOLDER
    # mkdtemp makes a folder that only its owner may enter: the socket needs no key.
    folder = tempfile.mkdtemp(prefix="singletree-", dir=None if short else "/tmp")
    try:
        _serve(settings, os.path.join(folder, "llama.sock"), answer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        # Generations in flight are nobody's any more: llama.cpp's own way out would finish them first.
        os._exit(0)


def _serve(settings: dict[str, Any], socket: str, answer: TextIO) -> None:
    try:
        import xllamacpp

        server = _load(xllamacpp, settings, socket)
        version = str(getattr(xllamacpp, "__version__", ""))
    except Exception as error:
        print(json.dumps({"error": str(error) or type(error).__name__}), file=answer, flush=True)
        return
    print(json.dumps({"socket": socket, "version": version}), file=answer, flush=True)
    sys.stdin.read()
    del server


def _load(xllamacpp: Any, settings: dict[str, Any], socket: str) -> Any:
    params = xllamacpp.CommonParams()
    params.model.path = settings["path"]
    params.n_parallel = settings["slots"]
    params.n_ctx = settings["kv_tokens"]
    params.kv_unified = True
    params.n_batch = params.n_ubatch = settings["batch_tokens"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = settings["threads"]
    params.cache_ram_mib = settings["cache_ram_mib"]
    params.verbosity = settings["verbosity"]
    params.hostnames = [socket]
    # Prompts come as token ids: no template is rendered, no page served.
    params.use_jinja = params.ui = False
    return xllamacpp.Server(params)


if __name__ == "__main__":
    main()
