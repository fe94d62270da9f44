"""The command line: what it prints, what it starts, and its error messages."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import pytest

from singletree.cli import main, running_server
from singletree.server.http import run as run_server

TEXT = '<think>\nhm\n</think>\n\nI look.\n<tool_call>\n{"name": "ls", "arguments": {"n": 1.0}}\n</tool_call>'


def run(*arguments: str) -> int:
    """Return the exit status."""
    try:
        main(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "turn.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.parametrize("chunk", ["0", "1", "7"])
def test_parse(chunk: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("parse", text, "--family", "qwen3", "--chunk", chunk, "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert [part["type"] for part in value["parts"]] == ["Reasoning", "Text", "ToolCall"]
    assert value["parts"][2]["arguments"] == '{"n": 1.0}'
    assert "".join(event["raw"] for event in value["events"]) == TEXT


@pytest.mark.parametrize("place", [[], ["-"]])
def test_standard_input_is_read(
    place: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments in (["parse", *place, "--family", "qwen3"], ["parse", "--family", "qwen3", *place]):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode())))
        assert run(*arguments) == 0
        assert "ToolCall" in capsys.readouterr().out


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("json_too", [True, False])
def test_parse_prints_what_the_terminal_has_not(
    encoding: str, json_too: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = '<tool_call>{"name": "f\\ud83d", "arguments": {}}</tool_call>h\u00e9'
    (tmp_path / "call").write_text(call, encoding="utf-8")
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
    assert run("parse", str(tmp_path / "call"), "--family", "hermes", *(["--json"] * json_too)) == 0
    sys.stdout.flush()
    if json_too:
        parts = json.loads(printed.getvalue().decode(encoding))["parts"]
        assert parts[1]["text"] == "h\u00e9"


def test_parse_by_halves_from_standard_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hm</think>\r\nx")))
    assert run("parse", "--reasoning", "qwen3", "--tools", "hermes", "--prompt-tail", "<think>\n") == 0
    printed = capsys.readouterr().out
    assert "Reasoning        text='hm'" in printed
    assert "\\r\\n" in printed


def test_parse_types_arguments_by_the_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = "<tool_call>\n<function=ls>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    (tmp_path / "call").write_text(call)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    for tools in (
        [{"name": "ls", "input_schema": schema}],
        [{"function": {"name": "ls", "parameters": schema}}],
    ):
        (tmp_path / "tools").write_text(json.dumps(tools))
        flags = ("--family", "qwen3_coder", "--schemas", str(tmp_path / "tools"), "--json")
        assert run("parse", str(tmp_path / "call"), *flags) == 0
        assert json.loads(json.loads(capsys.readouterr().out)["parts"][0]["arguments"]) == {"n": 3}


BODIES: dict[str, dict[str, Any]] = {
    "messages": {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "h\u00e9"}]},
    "chat": {"model": "m", "messages": [{"role": "user", "content": "h\u00e9"}]},
    "responses": {"model": "m", "input": "h\u00e9"},
}


@pytest.mark.parametrize("protocol", BODIES)
def test_render(protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "body.json"
    path.write_text(json.dumps(BODIES[protocol]))
    assert run("render", str(path), "--protocol", protocol, "--model", "scripted", "--json") == 0
    value = json.loads(capsys.readouterr().out)
    assert value["prompt"] == "<|im_start|>user\nh\u00e9<|im_end|>\n<|im_start|>assistant\n"
    assert value["token_ids"][0] == 257
    assert run("render", str(path), "--protocol", protocol, "--model", "scripted", "--no-ids") == 0
    assert capsys.readouterr().out == value["prompt"] + "\n"


@pytest.mark.parametrize("protocol", BODIES)
def test_render_needs_no_model_and_no_limit(
    protocol: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "body.json"
    body = {name: value for name, value in BODIES[protocol].items() if name not in ("model", "max_tokens")}
    path.write_text(json.dumps(body))
    assert run("render", str(path), "--protocol", protocol, "--model", "scripted", "--no-ids") == 0
    assert capsys.readouterr().out == "<|im_start|>user\nh\u00e9<|im_end|>\n<|im_start|>assistant\n\n"


NO_REQUEST = [
    ("{}", "messages: Field required"),
    ('{"messages": [{"role": "user", "content": 3}]}', "messages.0.content"),
    ('{"model": 3, "messages": []}', "model: Expected `str`"),
    ("[]", "object"),
    ("{", "not valid JSON"),
]


@pytest.mark.parametrize(("body", "says"), NO_REQUEST)
def test_render_says_which_file_and_field_is_wrong(
    body: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "body.json"
    path.write_text(body)
    assert run("render", str(path), "--model", "scripted") == 1
    message = capsys.readouterr().err
    assert message.startswith(f"singletree: {path}: ")
    assert says in message
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(body.encode())))
    assert run("render", "--model", "scripted") == 1
    assert capsys.readouterr().err.startswith("singletree: standard input: ")


def test_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("families") == 0
    assert "kimi_k2" in capsys.readouterr().out


_UNENDING = """
import threading
from concurrent.futures import ThreadPoolExecutor
from singletree import cli

def interrupted(*_):
    # As of a download: the interpreter waits for such threads at its end.
    ThreadPoolExecutor(1).submit(threading.Event().wait)
    raise KeyboardInterrupt

cli.app = interrupted
cli.main(["families"])
"""


def test_ctrl_c_ends_without_a_word_while_threads_work() -> None:
    done = subprocess.run([sys.executable, "-c", _UNENDING], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


def test_ctrl_c_while_the_command_line_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name.startswith("cyclopts"):
                raise KeyboardInterrupt

    left: list[int] = []
    for name in [name for name in sys.modules if name.partition(".")[0] == "cyclopts"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    monkeypatch.setattr("os._exit", left.append)
    main(["families"])
    assert left == [130]


def test_little_is_imported_before_ctrl_c_is_caught() -> None:
    code = "import sys; from singletree import cli; print(*(m for m in sys.modules if m.startswith('singletree')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.split() == ["singletree", "singletree.cli"]


_LIBRARY_ALONE = """
import sys

sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))  # None: as if it were not installed
from singletree.cli import main
main(sys.argv[2:])
"""


def with_the_library_alone(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command where no package of an extra can be imported."""
    path = Path(__file__).parents[1] / "pyproject.toml"
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    extra = {
        re.split(r"[>=<;\[]", each)[0].replace("-", "_") for each in project["optional-dependencies"]["serve"]
    }
    command = [sys.executable, "-c", _LIBRARY_ALONE, ",".join(extra), *arguments]
    return subprocess.run(command, input=TEXT.encode(), capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("arguments", [("parse", "--family", "qwen3"), ("families",)])
def test_what_needs_no_server_needs_no_extra(arguments: tuple[str, ...]) -> None:
    done = with_the_library_alone(*arguments)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"ToolCall" in done.stdout or b"qwen3" in done.stdout


def test_a_command_without_its_packages_says_what_to_install() -> None:
    done = with_the_library_alone("serve")
    assert done.returncode == 1
    assert done.stderr.startswith(b"singletree: this command needs the package ")
    assert done.stderr.endswith(b": pip install 'singletree[all]'\n")


def test_without_arguments_the_library_alone_names_the_package_of_the_server() -> None:
    done = with_the_library_alone()
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"pip install 'singletree[all]'" in done.stdout
    assert b"singletree serve" not in done.stdout


@pytest.mark.parametrize(
    ("models", "expected", "missing"),
    [
        ([], "singletree serve --model", "singletree tail"),
        ([{"id": "vllm's"}], "singletree serve --model", "singletree tail"),
        ([{"id": "qwen", "calls_tools": True}], "http://127.0.0.1:8000, with qwen", "singletree serve"),
    ],
)
def test_without_arguments_the_next_command_fits_this_machine(
    models: list[dict[str, Any]],
    expected: str,
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "pi").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(running_server.RunningServer, "fetch", lambda *where: {"data": models})
    assert run() == 0
    printed = capsys.readouterr().out
    assert expected in printed
    assert missing not in printed
    assert "singletree launch pi" in printed
    assert "singletree launch codex" not in printed


WRONG = [
    (["serv"], 2, "serve"),
    (["serve", "--port", "x"], 2, "--port"),
    (["serve", "--port", "99999"], 1, "--port is 99999"),
    (["serve", "--nope"], 2, "--nope"),
    (["serve", "--engine", "scripted", "--script-dir", "nowhere", "--port", "0"], 1, "nowhere"),
    (["serve", "--model", "./nowhere.gguf", "--port", "0"], 1, "no model at './nowhere.gguf'"),
    (["parse", "nowhere", "--family", "qwen3"], 1, "nowhere: No such file"),
    (["parse", "x"], 1, "no model family given"),
    (["parse", "x", "--family", "nope"], 1, "nope"),
    (["doctor", "x", "bogus", "two words"], 2, "too many arguments: bogus 'two words'; see --help"),
    (["serve", "--engine-url", "nothing"], 1, "'nothing' is not the URL of an inference server"),
    (["parse", "x", "--family", "qwen3", "--tools", "hermes"], 1, "--family cannot be combined"),
    (["parse", "x", "--family", "qwen3", "--chunk", "-1"], 1, "--chunk is -1"),
    (["traces", "export", "x", "--output", "no/file"], 1, "no/file: No such file or directory; give a path"),
    (["service", "install", "--", "--prot", "9"], 2, "--prot"),
    (["service", "install", "--", "--port", "99999"], 1, "--port is 99999"),
    (["launch", "claude"], 1, "no server at http://127.0.0.1:8000 (Connection refused)"),
    (["launch", "claude", "--base-url", "localhost"], 1, "--base-url 'localhost' is not a URL"),
    (["launch", "claude", "--base-url", "http://[::1"], 1, "--base-url 'http://[::1' is not a URL"),
    (["launch", "claude", "--base-url", "http://h:port"], 1, "--base-url 'http://h:port' is not a URL"),
]


@pytest.mark.parametrize(("arguments", "status", "says"), WRONG, ids=[" ".join(w[0]) for w in WRONG])
def test_what_is_wrong_is_one_line(
    arguments: list[str],
    status: int,
    says: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise ConnectionRefusedError(111, "Connection refused")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_server, "choose_address", lambda host, port: (host, port))
    monkeypatch.setattr("urllib.request.urlopen", refuse)
    (tmp_path / "x").write_text("x")
    assert run(*arguments) == status
    printed = capsys.readouterr().err.splitlines()
    assert says in printed[-1]
    assert printed[-1].startswith("singletree: ")
    assert not any("Traceback" in line for line in printed)
