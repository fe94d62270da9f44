"""Count what a server for engines at --engine-url loads until it has answered Claude Code, and the lines of all."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "tests"))

from source import DOORS, PACKAGE  # noqa: E402

_SCRIPT = """\
import json, sys
import singletree.cli.serve, singletree.server.http.run, singletree.server.models.model_source
from singletree.server.doors import open_door
for feature in ("engine URLs", "kind of a server", "server vllm", "router", "model files", "protocol messages"):
    open_door(feature)
print(json.dumps([m.__file__ for n, m in sys.modules.items() if n.partition(".")[0] == "singletree" and m.__file__]))
"""


@cache
def loaded() -> tuple[int, int]:
    """Return how many modules and lines ``serve --engine-url`` has loaded for a vLLM and clients of Messages alone.

    Without the families, which are data: whatever the model, all are loaded, about 1,300 lines.
    """
    run = subprocess.run([sys.executable, "-c", _SCRIPT], check=True, stdout=subprocess.PIPE)
    paths = [Path(each) for each in json.loads(run.stdout)]
    return len(paths), sum(_lines(path) for path in paths)


@cache
def sizes() -> tuple[int, int, int]:
    """Return the modules and the lines of the source, and the lines of the core: all but what is behind doors."""
    files = list(PACKAGE.rglob("*.py"))
    core = [
        path for path in files if path.relative_to(PACKAGE).with_suffix("").parts[0] not in DOORS | {"cli"}
    ]
    return len(files), sum(map(_lines, files)), sum(map(_lines, core))


def _lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def sentence() -> str:
    """Return the present sizes in words. They are rounded, so that few changes change them."""
    count, lines = loaded()
    files, total, core = sizes()
    return (
        f"The source has about {_round(total)} lines in {round(files, -1)} modules, the core {_round(core)}. A server "
        f"for engines at\n`--engine-url` whose clients use Messages loads about {_round(lines)} lines in "
        f"{round(count, -1)} modules,\nand the data of all families.\n"
    )


def _round(lines: int) -> str:
    return f"{round(lines, -3):,}"
