"""Look for inputs that break a target, guided by coverage, with Atheris: ``make fuzz MINUTES=60``.

    python tests/fuzz/run.py --minutes 16 [--target gguf] …

The targets share the minutes. What was found interesting stays in ``build/fuzz/TARGET`` for the next run. An input that
fails is written to ``build/fuzz/TARGET-crash-…``: mend the code, and put the input into ``tests/fuzz/inputs/TARGET``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ATHERIS = "atheris==3.0.0"
_WORK = ROOT / "build" / "fuzz"
_INPUTS = Path(__file__).parent / "inputs"
_SECONDS = 20
"""How long one input may take."""
_MEGABYTES = 3000
_NAMES = ["http", "decoders", "templates", "template_sources", "parser", "capsules", "kv_events", "gguf"]


def installed() -> Path:
    """Return the folder with Atheris, which is installed when it is missing; its wheels are of Python 3.11 to 3.13."""
    place = _WORK.parent / ATHERIS.replace("==", "-")
    if not place.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*command, "--only-binary", ":all:", "--target", str(place), ATHERIS], check=True)
    return place


def run(name: str, seconds: float) -> bool:
    """Fuzz a target for so long in a process of its own; return whether nothing failed."""
    corpus = _WORK / name
    corpus.mkdir(parents=True, exist_ok=True)
    flags = [
        f"-max_total_time={seconds:.0f}",
        f"-timeout={_SECONDS}",
        f"-rss_limit_mb={_MEGABYTES}",
        "-max_len=4096",
    ]
    paths = [str(ROOT / "tests"), str(installed()), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, __file__, "--child", name, *flags, f"-artifact_prefix={corpus}-", str(corpus)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    log = corpus.with_suffix(".log")
    with log.open("wb") as output:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    printed = log.read_text(encoding="utf-8", errors="replace")
    ran = re.findall(r"^(?:#(\d+)\s|Done (\d+) runs)", printed, re.MULTILINE)
    covered = re.findall(r"cov: (\d+)", printed) or ["0"]
    print(f"{name:18} {int(max(ran[-1]) if ran else 0):>9,} inputs, {covered[-1]:>6} edges: ", end="")
    print("nothing failed" if not done.returncode else f"FAILED, see {corpus}.log", flush=True)
    return not done.returncode


def child(name: str, flags: list[str]) -> None:
    """Run a target in this process until libFuzzer ends it."""
    import logging

    import atheris

    logging.disable()
    with atheris.instrument_imports(include=["singletree"]):
        from fuzz.targets import TARGETS
    function, seeds = TARGETS[name]

    def kept(data: bytes) -> None:
        try:
            function(data)
        except Exception:
            digest = hashlib.sha256(data).hexdigest()[:12]
            (_WORK / f"{name}-crash-{digest}").write_bytes(data)
            raise

    for at, seed in enumerate(seeds):
        (Path(flags[-1]) / f"seed-{at}").write_bytes(seed)
    known = [str(_INPUTS / name)] if (_INPUTS / name).is_dir() else []
    atheris.Setup([sys.argv[0], *flags, *known], kept)
    atheris.Fuzz()


def main() -> None:
    """Fuzz the targets one after the other, and end with 1 if one failed."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="for all targets together")
    parser.add_argument("--target", action="append", choices=_NAMES, help="one of them; may be repeated")
    options = parser.parse_args()
    names = options.target or _NAMES
    results = [run(name, options.minutes * 60 / len(names)) for name in names]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
