"""``singletree traces``: check captured sessions, count what can be trained on, and write them for trainers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from cyclopts import App

from singletree.cli.inspect import print_value
from singletree.errors import BadConfiguration
from singletree.private_files import open_private

if TYPE_CHECKING:
    from singletree.training.graph import SessionGraph

app = App(name="traces", help="Check captured sessions, and write them in the forms of trainers.")


def _files(path: Path) -> list[Path]:
    found = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
    if not found:
        raise BadConfiguration(f"{path} has no sessions; give a file or folder of --capture")
    return found


def _undamaged(files: list[Path]) -> Iterator[tuple[Path, SessionGraph]]:
    from singletree.training.graph import check_session, read_session

    for file in files:
        graph = read_session(file)
        if problems := check_session(graph):
            print(f"{file} is left out, it is damaged: {problems[0]}", file=sys.stderr)
        else:
            yield file, graph


@app.command(name="check")
def check_traces(path: Path) -> None:
    """Prove that each prompt is the one that the engine was given, and begins with the turns that it continues.

    The exit status is 1 if a file is damaged. A session that may lack something is no failure: it is marked.

    Args:
        path: a file of a session, or a folder of --capture.
    """
    from singletree.training.graph import check_session, read_session

    wrong = 0
    for file in _files(path):
        graph = read_session(file)
        problems = check_session(graph)
        wrong += bool(problems)
        continued = sum(call.continues for call in graph.followers())
        print(
            f"{file}: {'damaged' if problems else graph.status}, {len(graph.calls)} calls, {continued} continued"
        )
        for each in [*problems, *graph.lacks]:
            print(f"  {each}")
    if wrong:
        sys.exit(1)


@app.command(name="stats")
def count_traces(path: Path, *, json: bool = False) -> None:
    """Count how much of each session can be trained on, in one trajectory and in all, and why the rest cannot.

    Args:
        path: a file of a session, or a folder of --capture.
        json: print JSON.
    """
    from singletree.training.exports import count_trained

    found = []
    for file, graph in _undamaged(_files(path)):
        summary = count_trained(graph)
        tokens = summary["prompt_tokens"] + summary["sampled_tokens"]
        found.append({**summary, "bytes_per_token": round(file.stat().st_size / max(1, tokens), 2)})
    if json:
        print_value(found)
        return
    for each in found:
        print(_line(each))


def _line(each: dict[str, Any]) -> str:
    found = each["share_in_one_trajectory"], each["share_trained"]
    shares = ["–" if share is None else f"{share:.1%}" for share in found]
    masked = ", ".join(f"{count} {reason}" for reason, count in each["masked"].items()) or "none"
    return (
        f"{each['session']}: {each['status']}, {each['calls']} calls, {each['sampled_tokens']} tokens sampled, "
        f"{shares[0]} in one trajectory, {shares[1]} in {each['trajectories']}, {each['drifted']} of "
        f"{each['drifted'] + each['continued']} turns drifted, masked calls: {masked}, "
        f"{each['bytes_per_token']} bytes a token"
    )


@app.command(name="export")
def export_traces(
    path: Path, *, form: str = "singletree", output: Path | None = None, incomplete: bool = False
) -> None:
    """Write sessions as lines of JSON.

    Args:
        path: a file of a session, or a folder of --capture.
        form: singletree, trl, verl, skyrl, openenv, rllm or atif (docs/training.md).
        output: file to write; standard output by default.
        incomplete: write sessions too that may lack something, whose reward is left out.
    """
    from singletree.training.exports import find_form

    documents = find_form(form)
    files = _files(path)
    if output is not None and output.exists() and any(map(output.samefile, files)):
        raise BadConfiguration(f"--output {output} is one of the sessions; give another file")

    def lines() -> Iterator[bytes]:
        for file, graph in _undamaged(files):
            if graph.lacks and not incomplete:
                print(f"{file} is left out, it may lack something: {graph.lacks[0]}", file=sys.stderr)
            else:
                yield from (msgspec.json.encode(each) + b"\n" for each in documents(graph))

    out = sys.stdout.buffer
    with nullcontext(out) if output is None else open(output, "wb", opener=open_private) as file:
        file.writelines(lines())
        file.flush()
