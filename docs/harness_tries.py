"""Let a real harness do short tasks on a running server, several times each, and count how often each succeeds.

``singletree serve`` runs already, and the harness is installed. Every try has a new folder with the same path, so
that the prompts of all tries begin alike. A try is judged by what the files or the answer hold, not by the way there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Task:
    """One task: what the user asks, and whether the answer and the folder show that it was done."""

    name: str
    prompt: str
    done: Callable[[str, Path], bool]


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


TASKS = (
    Task("read", "read notes.txt and tell me the word", lambda answer, _: "PELICAN" in answer),
    Task("run", "run `expr 1234 + 8765` and tell me what it printed", lambda answer, _: "9999" in answer),
    Task(
        "write",
        "create the file hello.txt with the text: hi there",
        lambda _, folder: "hi there" in _text(folder / "hello.txt"),
    ),
    Task(
        "copy",
        "read the word in notes.txt and write it into word.txt",
        lambda _, folder: "PELICAN" in _text(folder / "word.txt"),
    ),
    Task(
        "edit",
        "in notes.txt replace PELICAN by HERON",
        lambda _, folder: "is HERON" in _text(folder / "notes.txt"),
    ),
    Task("count", "how many lines does data.csv have?", lambda answer, _: "7" in answer or "seven" in answer),
    Task(
        "chat", "what is 2+2? answer in one word", lambda answer, _: "4" in answer or "four" in answer.lower()
    ),
)


def prepare(folder: Path) -> None:
    """Fill ``folder`` with the files of the tasks, and nothing else."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "notes.txt").write_text("The secret word is PELICAN.\n", encoding="utf-8")
    (folder / "data.csv").write_text("".join(f"{n},{n * n}\n" for n in range(7)), encoding="utf-8")


def attempt(task: Task, command: list[str], folder: Path, limit: float) -> tuple[bool, float, str]:
    """Return whether the task was done, the seconds that it took, and the end of the answer."""
    prepare(folder)
    began = time.monotonic()
    try:
        ended = subprocess.run(
            [*command, "-p", task.prompt],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit,
            check=False,
        )
        answer = ended.stdout.strip() or ended.stderr.strip()
    except subprocess.TimeoutExpired:
        answer = f"no end after {limit:.0f} s"
    return task.done(answer, folder), time.monotonic() - began, answer


def main() -> int:
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--harness", default="pi", help="a command of `singletree launch` that takes -p")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="a name that the server has")
    parser.add_argument("--tries", type=int, default=10)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds after which a try has failed")
    parser.add_argument("--tasks", nargs="+", choices=[task.name for task in TASKS])
    parser.add_argument("arguments", nargs="*", help="arguments for the harness, after --")
    given = parser.parse_args()
    command = [sys.executable, "-c", "from singletree.cli import main; main()", "launch", given.harness]
    command += ["--base-url", given.base_url, *(["--model", given.model] if given.model else [])]
    command += ["--", *given.arguments]
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for task in TASKS:
            if given.tasks and task.name not in given.tasks:
                continue
            tries = [attempt(task, command, Path(scratch, "work"), given.limit) for _ in range(given.tries)]
            done = sum(ok for ok, _, _ in tries)
            failed += len(tries) - done
            seconds = sorted(took for _, took, _ in tries)
            print(
                f"{task.name:8}{done} of {len(tries)}, {seconds[len(seconds) // 2]:.0f} s in the middle",
                flush=True,
            )
            for ok, took, answer in tries:
                print(
                    f"    {'done  ' if ok else 'failed'} {took:4.0f} s  {' '.join(answer.split())[:110]}",
                    flush=True,
                )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
