"""Time to the first token of the next turn on a real engine with a real cache: what it is worth that a prompt stays.

    python -m benchmarks.first_token [--quick] [--tokens N] [--rounds N] [--write] [-- FLAGS of singletree serve]
    python -m benchmarks.first_token --killed N [-- FLAGS of singletree serve]

A tool loop is built up with turns that the model itself generates. Then each further turn is timed: with Claude Code's
billing header constant, changing, and changing but stripped; and while the harness clears the thoughts of earlier
turns, one more in every request, with and without the turn memory. Without flags it is the embedded llama.cpp with the
default model; ``-- --engine vllm --engine-url URL --model FOLDER`` measures that engine. ``--write`` puts the table
into docs/prefix.md. ``--killed`` kills the server after a turn with N tokens, and times the next turn of a server that
restores the session (``--prefix-cache-path``) beside one that reads it anew.
"""

from __future__ import annotations

import argparse
import json
import random
import secrets
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from anthropic import Anthropic

from benchmarks import documents, peers, servers, tool_session
from benchmarks.processor import Watch, machine
from benchmarks.servers import Server
from clients.served import running
from engines.real_vllm import free_port
from engines.whole_server import Stream

Message = dict[str, Any]

_SECONDS = 900.0
_ANSWER = 160  # tokens: a short thought and a call
_GIVEN = ("bisect", "colorsys", "fnmatch")
_SETUP = 6  # generated turns before the first that is timed
_NEW = "The file is empty: it holds nothing but its name, {0}.py."
_TOOLS = [
    {
        "name": "read",
        "description": "Read a file of the project and return its text.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string", "description": "The file's path."}},
            "required": ["path"],
        },
    }
]
_CHARACTERS = 4.5  # of source code, a token of Qwen3's


@dataclass(frozen=True, slots=True)
class Case:
    """One way to send the next turn.

    Attributes:
        flags: of the server, beside those that name what is served.
        changes_header: whether the billing header has another value in every request.
        drops_thoughts: whether every request leaves the thought of one more earlier turn out.
    """

    name: str
    flags: tuple[str, ...] = ()
    changes_header: bool = False
    drops_thoughts: bool = False


_KEEP_HEADER = "--no-strip-anthropic-preamble"
CONSTANT = Case("the same prompt", (_KEEP_HEADER,))
VARYING = Case("billing header changes", (_KEEP_HEADER,), changes_header=True)
STRIPPED = Case("billing header changes, stripped", changes_header=True)
REPLAYED = Case("thoughts are cleared, exact replay", drops_thoughts=True)
RENDERED = Case("thoughts are cleared, no replay", ("--turn-memory", "0"), drops_thoughts=True)
GROUPS = ((CONSTANT, VARYING), (STRIPPED, REPLAYED), (RENDERED,))
"""Those of one group have the same flags, and so one server."""

REFERENCE = {CONSTANT: 168.0, VARYING: 912.0, STRIPPED: 169.0, REPLAYED: 167.0, RENDERED: 322.0}
"""Milliseconds that NVIDIA published for Dynamo: a prompt of 52,000 tokens on a B200."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One turn: ``first`` in ms to its first word; tokens of the prompt, and of them what the engine had; ``others``
    how many cores everything else kept busy meanwhile.
    """

    first: float
    prompt: int
    cached: int
    others: float

    @property
    def read(self) -> int:
        """Tokens that the engine had to read."""
        return self.prompt - self.cached


@dataclass(slots=True)
class Talk:
    """A tool loop that grows, on one server.

    Attributes:
        marker: ends each question and result: it asks an engine that plays scripts for its turn. Empty for a model that
            takes turns by itself.
    """

    server: Server
    client: Anthropic
    system: str
    messages: list[Message]
    marker: str = ""

    def turn(self, case: Case, forgotten: int = 0) -> Timed:
        """Ask for the next turn and add it; without the thoughts of the first generated turns, ``forgotten`` many."""
        sent = without_thoughts(self.messages, forgotten)
        watch, began = Watch((self.server.pid,)), time.perf_counter()
        first, spent = 0.0, None
        with self.client.messages.stream(
            model=servers.MODEL,
            max_tokens=_ANSWER,
            extra_body={"temperature": 0},
            system=[
                {"type": "text", "text": billing_header(changes=case.changes_header)},
                {"type": "text", "text": self.system},
            ],
            messages=sent,  # type: ignore[arg-type]  # as they came
            tools=_TOOLS,  # type: ignore[arg-type]
            tool_choice={  # type: ignore[arg-type]  # a constraint would not let a script's thoughts pass
                "type": "auto" if self.marker else "any",
                "disable_parallel_tool_use": True,
            },
            thinking={"type": "enabled", "budget_tokens": 1024},
        ) as stream:
            for event in stream:
                if event.type == "content_block_delta" and not first:
                    first, spent = time.perf_counter() - began, watch.stop()
            message = stream.get_final_message()
        blocks = [block.model_dump(exclude_none=True, exclude={"caller"}) for block in message.content]
        self.messages.append({"role": "assistant", "content": blocks})
        cached = message.usage.cache_read_input_tokens or 0
        if spent is None:
            raise SystemExit(f"the model wrote nothing: {message.stop_reason}")
        others = spent.others / spent.wall
        return Timed(first * 1e3, message.usage.input_tokens + cached, cached, others)

    def answer(self, text: str) -> None:
        """Answer the last turn's calls with ``text``, or ask on where it made none."""
        text = f"{text}{self.marker}"
        calls = [block["id"] for block in self.messages[-1]["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": id, "content": text} for id in calls]
        self.messages.append({"role": "user", "content": results or text})


def without_thoughts(messages: Sequence[Message], forgotten: int) -> list[Message]:
    """``messages`` as a harness sends them that has cleared the thoughts of the first generated turns, so many.

    The turns of ``opening`` keep theirs: nobody generated them. Raises SystemExit where there is no thought.
    """
    sent = list(messages)
    written = [at for at, message in enumerate(sent) if message["role"] == "assistant"][len(_GIVEN) :]
    for at in written[:forgotten]:
        kept = [block for block in sent[at]["content"] if block["type"] != "thinking"]
        if len(kept) == len(sent[at]["content"]):
            raise SystemExit(
                "the model wrote a turn without a thought, so none can change; measure another model"
            )
        sent[at] = {**sent[at], "content": kept}
    return sent


def billing_header(*, changes: bool) -> str:
    """What Claude Code puts before its system prompt."""
    value = secrets.token_hex(3) if changes else "00000"
    return f"x-anthropic-billing-header: cc_version=2.1.329.{value[:3]}; cc_entrypoint=cli; cch={value[:5]};"


def opening(marker: str = "") -> list[Message]:
    """A question and turns that show the model how it works: a thought, a word, a call; ``marker`` ends the last."""
    messages: list[Message] = [{"role": "user", "content": "Read the modules one after another."}]
    for number, module in enumerate(_GIVEN):
        turn = [
            {"type": "thinking", "thinking": f"Next is {module}.py. I read it whole.", "signature": ""},
            {"type": "text", "text": f"I read {module}.py."},
            {"type": "tool_use", "id": f"toolu_{number}", "name": "read", "input": {"path": f"{module}.py"}},
        ]
        text = _NEW.format(module) + (marker if module == _GIVEN[-1] else "")
        given = {"type": "tool_result", "tool_use_id": f"toolu_{number}", "content": text}
        messages += [{"role": "assistant", "content": turn}, {"role": "user", "content": [given]}]
    return messages


def source(tokens: int, number: int) -> str:
    """About so many tokens of Python's library; another ``number``, another text."""
    library = tool_session.library()
    size = int(tokens * _CHARACTERS)
    begin = number * 1_000_003 % (len(library) - size)
    return library[begin : begin + size]


def measure(
    cases: Sequence[Case],
    serve: Sequence[str],
    tokens: int,
    rounds: int,
    *,
    engine_arguments: Sequence[str] = (),
    marker: str = "",
    patience: float = servers.START_SECONDS,
) -> Iterator[tuple[Case, Timed]]:
    """The timed turns of cases with the same flags, on one server, in one conversation. Raises SystemExit when the
    model wrote no thought that could be left out.

    Args:
        engine_arguments: what the engine in the server's process gets.
        marker: as in ``Talk``.
        patience: seconds in which the server has to start.
    """
    own = ("--", *engine_arguments) if engine_arguments else ()
    with servers.singletree("singletree", (*serve, *cases[0].flags, *own), patience) as server:
        client = Anthropic(
            base_url=f"http://127.0.0.1:{server.port}", api_key="none", timeout=_SECONDS, max_retries=0
        )
        talk = Talk(
            server, client, f"You are a coding agent.\n\n{source(tokens // 2, 1)}", opening(marker), marker
        )
        for number in range(_SETUP):
            talk.turn(cases[0])
            talk.answer(source(tokens // 2 // _SETUP, number + 2))
        for case in cases:
            for number in range(rounds):
                yield case, talk.turn(case, forgotten=number + 1 if case.drops_thoughts else 0)
                talk.answer(_NEW.format(f"module_{number}"))


Measured = dict[Case, list[Timed]]


def measure_all(serve: Sequence[str], tokens: int, rounds: int, **engine: Any) -> Measured:
    """Measure all cases, and print each turn; ``engine`` is what ``measure`` takes beside."""
    measured: Measured = {}
    for cases in GROUPS:
        for case, turn in measure(cases, serve, tokens, rounds, **engine):
            measured.setdefault(case, []).append(turn)
            print(f"{case.name}: {turn.first:.0f} ms, {turn.read} of {turn.prompt} tokens read", flush=True)
    return measured


def report(measured: Measured, served: str, rounds: int) -> str:
    """The table, with the reference's figures beside."""
    others = median([turn for turns in measured.values() for turn in turns], "others")
    conditions = (
        f"{documents.today()}; {machine()}. {served}; {rounds} turns timed in each case, every figure is the "
        f"median. Everything else on the machine kept {others:.1f} cores busy meanwhile."
    )
    return f"{conditions}\n\n{table(measured)}"


def table(measured: Measured) -> str:
    """The medians of all cases as a Markdown table, with the reference's figures beside."""
    head = [
        "next turn",
        "prompt, tokens",
        "to read, tokens",
        "to first token, ms",
        "ratio",
        "reference, ms",
        "its ratio",
    ]
    return documents.table(head, [_row(case, measured) for case in measured])


def _row(case: Case, measured: Measured) -> list[str]:
    against = REPLAYED if case.drops_thoughts else STRIPPED
    cells = [f"{median(measured[case], of):,.0f}" for of in ("prompt", "read", "first")]
    ours = median(measured[case], "first") / median(measured[against], "first")
    theirs = REFERENCE[case] / REFERENCE[against]
    return [case.name, *cells, f"{ours:.2f}", f"{REFERENCE[case]:.0f}", f"{theirs:.2f}"]


def median(turns: Sequence[Timed], of: str) -> float:
    """The middle one of that field."""
    return float(statistics.median(getattr(turn, of) for turn in turns))


def _default(folder: Path) -> list[str]:
    """The default model, with a chat template that prints tools and thoughts: its own prints neither."""
    peers.ensure_tokenizer()
    template = folder / "template.jinja"
    config = json.loads((peers.QWEN3 / "tokenizer_config.json").read_bytes())
    template.write_text(config["chat_template"], encoding="utf-8")
    return ["--chat-template", str(template)]


def measure_killed(serve: Sequence[str], tokens: int, folder: Path) -> str:
    """Return the times of the turn after ``kill -9``, restored and cold. The token ids of the prompt are made up.

    The answers of a restored session and of one that was never killed are the same. One whose prompt is read anew may
    differ: llama.cpp reads it in other batches, and rounds otherwise.
    """
    numbers = random.Random(tokens)
    prompt = [numbers.randrange(1000, 40_000) for _ in range(tokens)]
    saved, log = folder / "saved", folder / "log"

    def turn(port: int) -> _Completion:
        return _complete(port, prompt, 8)

    with _killed([*serve, "--prefix-cache-path", str(saved)], log) as port:
        before = log.read_text()
        answer = _complete(port, prompt, 32)
        while "saved" not in log.read_text()[len(before) :]:
            time.sleep(0.1)
        shutil.copytree(saved, folder / "kept")  # The next turn replaces what is saved.
        prompt += [*answer.token_ids, *prompt[:64]]
        never_killed = turn(port)
    with _killed([*serve, "--prefix-cache-path", str(folder / "kept")], log) as port:
        restored = turn(port)
    with _killed(serve, log) as port:
        cold = turn(port)
    same = "same answer" if restored.token_ids == never_killed.token_ids else "ANOTHER ANSWER"
    return (
        f"{len(prompt)} tokens, first token: {never_killed.first:.2f} s never killed, {restored.first:.2f} s restored "
        f"({restored.cached} cached, {same}), {cold.first:.2f} s cold ({cold.cached} cached): "
        f"{cold.first / restored.first:.0f} times; "
        f"{sum(path.stat().st_size for path in (folder / 'kept').iterdir()) / 1e6:.0f} MB saved"
    )


@contextmanager
def _killed(serve: Sequence[str], log: Path) -> Iterator[int]:
    """A server on the port, killed at the end of the block."""
    port = free_port()
    with running([*serve, "--no-store"], port, log) as process:
        yield port
        process.kill()
        process.wait()


@dataclass(frozen=True, slots=True)
class _Completion:
    first: float
    cached: int
    token_ids: list[int]


def _complete(port: int, prompt: Sequence[int], count: int) -> _Completion:
    body = {
        **{"model": "any", "prompt": list(prompt), "max_tokens": count, "temperature": 0, "ignore_eos": True},
        **{"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True},
    }
    began, first, cached = time.monotonic(), 0.0, 0
    token_ids: list[int] = []
    with Stream(f"http://127.0.0.1:{port}", "/v1/completions", body) as stream:
        for event in stream.events():
            for choice in event["choices"]:
                token_ids += choice.get("token_ids") or []
                first = first or (time.monotonic() - began if token_ids else 0.0)
            if event.get("usage"):
                cached = event["usage"]["prompt_tokens_details"]["cached_tokens"]
    return _Completion(first, cached, token_ids)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_token", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a prompt of 1500 tokens, two rounds")
    parser.add_argument("--tokens", type=int, help="of the prompt, about (5000)")
    parser.add_argument("--rounds", type=int, help="turns timed in each case (5, at most 6)")
    parser.add_argument("--write", action="store_true", help="write the table into docs/prefix.md")
    parser.add_argument(
        "--killed", type=int, metavar="N", help="time the turn after kill -9 of N tokens instead"
    )
    parser.add_argument("flags", nargs="*", metavar="FLAGS", help="flags of singletree serve, after --")
    options = parser.parse_args()
    options.tokens = options.tokens or (1500 if options.quick else 5000)
    options.rounds = options.rounds or (2 if options.quick else 5)
    if options.rounds > _SETUP:
        parser.error(f"--rounds is {options.rounds}; give at most {_SETUP}")
    return options


def main() -> None:
    """Measure and print."""
    options = _options()
    with TemporaryDirectory() as folder:
        if options.killed:
            print(machine(), measure_killed(options.flags, options.killed, Path(folder)), sep="\n")
            return
        serve = options.flags if "--model" in options.flags else [*_default(Path(folder)), *options.flags]
        measured = measure_all(serve, options.tokens, options.rounds)
    text = report(measured, " ".join(options.flags) or "the default model", options.rounds)
    print(text)
    if options.write:
        documents.replace_in_prefix("first-token", text)


if __name__ == "__main__":
    main()
