"""Each command in the documents is one that today's programs take; what cannot be read here has a reason."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from cyclopts import App
from cyclopts.exceptions import CycloptsError

from singletree.cli import app
from singletree.cli.flags import with_each_model
from singletree.errors import SingletreeError
from singletree.key_files import KeyFile
from source import PACKAGE, ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *PACKAGE.rglob("*.md")])

EXCUSED = {
    "claude": "`make clients` starts it with the settings that its page is made from",
    "cline": "as claude",
    "codex": "as claude",
    "copilot": "as claude",
    "kimi": "as claude",
    "openclaw": "as claude",
    "opencode": "as claude",
    "pi": "as claude",
    "qwen": "as claude",
    "vllm": "`make engines` starts it",
    "docker": "no container engine is at hand; `make deploy` runs the steps of the image",
    "uvx": "`make deploy` runs it (tests/deploy/test_installed.py)",
    "pipx": "no target installs it; `make deploy` installs the same file by pip",
    "cd": "the shell's own",
    "echo": "the shell's own",
    "head": "not ours",
    "grep": "not ours",
}
"""Programs whose arguments no test here reads."""

OF_OTHERS = {
    "Claude Code": "--disallowedTools",
    "Dynamo": """--discovery-backend --event-plane --kserve-grpc-server --namespace --no-router-kv-events
        --request-plane --router-kv-events --router-kv-overlap-score-credit --router-queue-policy --router-replica-sync
        --router-temperature --router-ttl-secs --tls-cert-path --tls-key-path""",
    "llama-server": """--api-key-file --cache-ram --cache-reuse --chat-template-file --cors-origins --embedding --jinja
        --lora --metrics --models-dir --models-max --models-preset --reasoning --reasoning-budget --reasoning-effort
        --reasoning-format --reasoning-preserve --rerank --sleep-idle-seconds --slot-save-path --spec-draft-…
        --sse-ping-interval --ssl-key-file --swa-full""",
    "SGLang": """--enable-multimodal --enable-priority-scheduling --enable-session-radix-cache --grammar-backend
        --incremental-streaming-output --mm-preprocess-cache-size-mb --page-size""",
    "vLLM": """--distributed-executor-backend --enable-auto-tool-choice --enable-log-requests
        --enable-prompt-tokens-details --enable-scale-out --kv-events-config --lora-modules --root-path
        --scheduling-policy --sse-keep-alive-interval --ssl-certfile --ssl-keyfile --structured-outputs-config
        --tensor-parallel-size --tool-parser-plugin --trust-request-chat-template --uds""",
    "docker": "--build-arg",
}
"""Flags of other programs that the pages name alone, by program."""

_FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)
_SHELLS = {"sh", "console", "bash"}
_OLDER = re.compile(r"^## \[\d.*", re.MULTILINE | re.DOTALL)
"""The sections of the changelog that name commands of their day."""
_RECORDS = ROOT / "docs" / "decisions"
"""Records name programs of their day, too."""
_PATH = re.compile(r"(?:src|tests|docs|deploy|benchmarks)/[\w./-]*\w")
_OWN_PROGRAMS = {"singletree", "make", "python", "pytest", "pip", "npm", "curl", "helm", "serve"}

Words = Sequence[str]


class Command(NamedTuple):
    """A command of a page.

    Attributes:
        words: without the variables before it.
        variables: that are set before it, or by it.
        is_whole: whether it can be typed as it is; a command in a sentence may lack arguments.
    """

    page: str
    words: Words
    is_whole: bool
    variables: Sequence[tuple[str, str]] = ()


_VARIABLE = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)


def _read(page: str, words: Words) -> Command:
    begin = 1 if words[0] == "export" else 0
    end = next((at for at in range(begin, len(words)) if not _VARIABLE.match(words[at])), len(words))
    found = [found.groups() for word in words[begin:end] if (found := _VARIABLE.match(word))]
    return Command(page, words[end:], True, [(name, value) for name, value in found])


def _typed(text: str) -> Iterator[list[str]]:
    """Yield each command of lines that a shell reads: one may go on in further lines, or after a pipe."""
    read = ""
    for line in text.replace("\\\n", " ").splitlines():
        read += line + "\n"
        try:
            lexer = shlex.shlex(read, posix=True, punctuation_chars="|&;>")
            lexer.whitespace_split = True
            words = list(lexer)
        except ValueError:  # A quotation goes on.
            continue
        read = ""
        while words:
            end = next((at for at, word in enumerate(words) if word and set(word) <= set("|&;>")), len(words))
            if end:
                yield words[:end]
            words = words[end + 1 + (end < len(words) and words[end][0] == ">") :]


def _prompted(text: str) -> str:
    """Return what is typed in a transcript: the lines from each ``$`` on until its quotations end."""
    kept, rest = list[str](), text.splitlines()
    while rest:
        line = rest.pop(0)
        if line.startswith("$ "):
            line = line[2:]
            while rest and (line.count("'") % 2 or line.endswith("\\")):
                line += "\n" + rest.pop(0)
            kept.append(line)
    return "\n".join(kept)


@cache
def commands() -> Sequence[Command]:
    """Return those of all pages."""
    found = []
    for path in PAGES:
        page = path.relative_to(ROOT).as_posix()
        text = _OLDER.sub("", path.read_text(encoding="utf-8"))
        blocks = []
        for _, kind, block in _FENCED.findall(text) if page != "docs/flags.md" else ():
            blocks.append(block if kind in _SHELLS else _prompted(block) if kind == "text" else "")
        rest = _FENCED.sub("", text)
        indented = re.findall(r"^ {4}(\w.*)", rest, re.MULTILINE)
        blocks += [line for line in indented if line.split()[0] in _OWN_PROGRAMS]
        for block in blocks:
            found += [_read(page, words) for words in _typed(block)]
        for _, code in _CODE.findall(rest):
            words = code.replace("\\|", "|").split()
            if words and words[0].removeprefix(".venv/bin/") in _OWN_PROGRAMS - {"serve"} and len(words) > 1:
                found.append(Command(page, list(next(_typed(" ".join(words)), words)), False))
    return found


@cache
def _cli() -> App:
    return app()


@cache
def _flags(command: tuple[str, ...]) -> set[str]:
    """Return the flags of a command, and of those below it."""
    found = _cli()
    for name in command:
        found = found[name]
    names = {"--help", "--version"}
    if command and found.default_command:
        names |= {name for argument in found.assemble_argument_collection() for name in argument.names}
    return names.union(*(_flags((*command, name)) for name in found if not name.startswith("-")))


def _singletree(words: Words, is_whole: bool) -> str | None:
    chain, apps, rest = _cli().parse_commands(list(words))
    chain = tuple(name for name in chain if name != "--help")
    own = list(rest[: rest.index("--")] if "--" in rest else rest)
    passed = rest[len(own) + 1 :]
    if chain == ("service", "install") and (error := _singletree(["serve", *passed], is_whole)):
        return error
    if is_whole:
        for word in words:
            if word.startswith("@"):
                Path(word[1:]).write_text("secret", encoding="utf-8")
        try:
            _cli().parse_args(list(words), exit_on_error=False, print_error=False)
        except (CycloptsError, SingletreeError) as error:
            return str(error)
        return None
    below = {name for name in apps[-1] if not name.startswith("-")} if not apps[-1].default_command else set()
    if below and own and (missing := set(own[0].split("|")) - below):
        return f"no command {missing} below {chain}" if not own[0].isupper() else None
    unknown = {word.partition("=")[0] for word in own if re.match("--?[a-z]", word)} - _flags(chain)
    return f"unknown flags: {unknown}" if unknown else None


@cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))


def _make(words: Words, is_whole: bool) -> str | None:
    given = dict(word.split("=", 1) for word in words if "=" in word)
    targets = {word for word in words if "=" not in word}
    arguments = shlex.split(given.get("ARGS", ""))
    if missing := targets - _targets():
        return f"no target {missing}"
    return _singletree(["serve", *arguments], is_whole) if "serve" in targets else _marks(arguments)


@cache
def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def _marks(words: Words) -> str | None:
    known = {mark.partition(":")[0] for mark in _project()["tool"]["pytest"]["ini_options"]["markers"]}
    marks = {after for before, after in pairwise(words) if before == "-m"}
    return f"no mark {marks - known}" if marks - known else None


def _python(words: Words, is_whole: bool) -> str | None:
    if words[0] != "-m":
        return None  # The file is looked for with all others.
    module, arguments = words[1], words[2:]
    if module in ("pytest", "pip"):
        return _CHECKS[module](arguments, is_whole)
    if (found := find_spec(module)) is None or found.origin is None:
        return f"no module {module}"
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    if (rest := arguments[len(own) + 1 :]) and (error := _singletree(["serve", *rest], is_whole)):
        return error
    code = Path(found.origin).read_text(encoding="utf-8")
    unknown = [word for word in own if word.startswith("--") and f'"{word}"' not in code]
    return f"{module} has no {unknown}" if unknown else None


def _pytest(words: Words, is_whole: bool) -> str | None:
    options = (PACKAGE / "checking" / "pytest_plugin.py").read_text(encoding="utf-8")
    unknown = [word for word in words if word.startswith("--singletree") and f'"{word}"' not in options]
    return f"no options {unknown}" if unknown else _marks(words)


def _pip(words: Words, is_whole: bool) -> str | None:
    extras = _project()["project"]["optional-dependencies"]
    asked = {extra for word in words for extra in re.findall(r"[a-z]+", word.partition("[")[2])}
    return f"no extras {asked - set(extras)}" if asked - set(extras) else None


def _npm(words: Words, is_whole: bool) -> str | None:
    package = json.loads((ROOT / "tests" / "clients" / "package.json").read_text(encoding="utf-8"))
    unknown = {word for word in words[1:] if not word.startswith("-")} - set(package["dependencies"])
    return f"`make clients` tries no {unknown}" if unknown else None


@cache
def _sources() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))


def _curl(words: Words, is_whole: bool) -> str | None:
    headers = [word.partition(":")[0] for word in words if word.startswith("x-singletree-")]
    if unknown := [name for name in headers if name not in _sources()]:
        return f"no header {unknown}"
    paths = {urlsplit(word).path for word in words if word.startswith("http")}
    routes = (ROOT / "docs" / "routes.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`(?:[A-Z]+ )?(/[^`]*)`", routes))
    return f"no route {paths - known}" if paths - known else None


def _helm(words: Words, is_whole: bool) -> str | None:
    schema = json.loads((ROOT / "deploy/helm/singletree/values.schema.json").read_text(encoding="utf-8"))
    for word in (word for word in words if re.match(r"[\w.]+=", word)):
        found = schema
        for name in word.partition("=")[0].split("."):
            if name not in found.get("properties", {}):
                return f"the chart has no value {word}"
            found = found["properties"][name]
    return None


def _serve(words: Words, is_whole: bool) -> str | None:
    """Read ``serve run`` of Ray, whose arguments are settings."""
    if words[:2] != ["run", "singletree.ray:app"]:
        return "Ray Serve runs singletree.ray:app"
    names = {word.partition("=")[0] for word in words[2:]} - {"engines"}
    unknown = {name for name in names if f"--{name.replace('_', '-')}" not in _flags(("serve",))}
    return f"no settings {unknown}" if unknown else None


_CHECKS: dict[str, Callable[[Words, bool], str | None]] = {
    "singletree": _singletree,
    "make": _make,
    "python": _python,
    "pytest": _pytest,
    "pip": _pip,
    "npm": _npm,
    "curl": _curl,
    "helm": _helm,
    "serve": _serve,
}


@pytest.mark.parametrize("page", sorted({command.page for command in commands()}))
def test_commands_are_taken(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong = []
    for _, words, is_whole, variables in (command for command in commands() if command.page == page):
        for name, value in variables:
            if name.startswith("SINGLETREE_"):
                monkeypatch.setenv(name, value)
        if not words:
            continue
        program = words[0].removeprefix(".venv/bin/")
        if program not in EXCUSED and not (ROOT / page).is_relative_to(_RECORDS):
            check = _CHECKS.get(program)
            error = check(words[1:], is_whole) if check else "neither read by this test nor excused"
            wrong += [f"{shlex.join(words)}: {error}"] if error else []
        missing = [path for word in words for path in _PATH.findall(word) if word.startswith(path)]
        wrong += [f"{path} is missing" for path in missing if not (ROOT / path).exists()]
    assert wrong == []


def test_each_block_says_what_it_is() -> None:
    unnamed = [
        f"{path.relative_to(ROOT)}: {block[:60]}"
        for path in PAGES
        for _, kind, block in _FENCED.findall(path.read_text(encoding="utf-8"))
        if not kind
    ]
    assert unnamed == [], "name its language after ```: sh, text …"


def test_files_of_settings_are_read(tmp_path: Path) -> None:
    texts = [(ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("serving", "security")]
    (models,), (keys,) = (
        [block for _, kind, block in _FENCED.findall(text) if kind == "toml"] for text in texts
    )
    (tmp_path / "models.toml").write_text(models, encoding="utf-8")
    given = ["serve", "--config", str(tmp_path / "models.toml")]
    _, bound, _ = _cli().parse_args(given, exit_on_error=False, print_error=False)
    names = [each.model_name for each in with_each_model(bound.arguments["config"]).each_model]
    assert names == [("big",), ("small",)]
    (tmp_path / "keys.toml").write_text(keys, encoding="utf-8")
    assert len(KeyFile(tmp_path / "keys.toml")()) == 2


def test_each_flag_that_a_page_names_exists() -> None:
    ours = _flags(()) | {"--"}
    others = {flag for flags in OF_OTHERS.values() for flag in flags.split()}
    programs = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").glob("*.py"))
    ours |= set(re.findall(r'"(--[a-z-]+)"', programs + _sources()))
    named = set()
    for path in PAGES:
        text = _FENCED.sub("", _OLDER.sub("", path.read_text(encoding="utf-8")))
        for _, code in _CODE.findall(text):
            if code.startswith("--") and not path.is_relative_to(_RECORDS):
                named |= {word.rstrip(",") for word in code.split() if word.startswith("--")}
    named = {flag.partition("=")[0] for flag in named}
    assert named - ours - others == set(), "flags that no program here has: those of others go to OF_OTHERS"
    assert others - named == set(), "no page names them any more"


@pytest.mark.parametrize(
    "typed",
    [
        "singletree serve --engin-url http://a:1",
        "singletree serve --workers many",
        "singletree sessions costs",
        "make no-such-target",
        'make serve ARGS="--modell a"',
        "python -m benchmarks.gone",
        "python -m benchmarks.soak --minutes 3",
        "pip install '.[serv]'",
        "curl http://127.0.0.1:8000/v2/messages",
        "helm install x --set server.nothing=1",
        "serve run singletree.ray:app engine=2 modell=3",
    ],
)
def test_a_wrong_command_is_found(typed: str) -> None:
    [words] = _typed(typed)
    assert _CHECKS[words[0]](words[1:], True)
