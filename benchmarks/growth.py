"""The way from a prompt to its first token in a conversation that grows turn by turn: what is old should cost
nothing. Singletree beside Dynamo, where it is installed (``python -m benchmarks.peers``), in the same run.

    python -m benchmarks.growth [--quick] [--rounds N] [--protocols NAMES] [--write]

``--write`` puts the tables into docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from benchmarks import documents, peers, servers, tool_session
from benchmarks.overhead import filler
from benchmarks.processor import Watch, machine
from benchmarks.servers import Server
from benchmarks.stream_reader import Answer, WrongAnswer, read_streams
from benchmarks.tool_session import Session, Step
from benchmarks.wire_protocols import PROTOCOLS, Protocol, prompt_tokens
from singletree.conversation import Sampling
from singletree.engines.engine import GenerationJob
from singletree.engines.scripted.engine import ScriptedEngine
from singletree.prompts.tokenizer.tokenizer import load_tokenizer

NAME = "growth"
_TURNS = 100
_BAND = 10  # turns of one row
_ANSWER = 120  # tokens, more than any turn has
_MARK = b"Perhaps"
"""The first word of every thought; nothing else in an answer has it."""

_CALL_ID = re.compile(rb'"(?:call_id|id)":"((?:call|toolu)[^"]*)"')


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of the growing conversation: ``first`` in ms to the first word, ``cpu`` in ms of the server for
    the whole request, ``tokens`` of the prompt, ``others`` how many cores everything else kept busy meanwhile.
    """

    first: float
    cpu: float
    tokens: int
    others: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through the turns: ms at the beginning, and ms for each 1000 tokens that were there before."""

    start: float
    slope: float


def growing(tokenizer: Tokenizer, each: int, number: int) -> Iterator[str]:
    """Results of tools, of ``each`` tokens, all different; another ``number``, another text."""
    library = tool_session.library()
    begin = number * 1_000_003 % len(library)
    text = (library * 2)[begin : begin + each * (_TURNS + 8) * 6]
    offsets = tokenizer.encode(text, add_special_tokens=False).offsets
    for at in range(_TURNS):
        yield text[offsets[at * each][0] : offsets[(at + 1) * each][0]]


def converse(server: Server, protocol: Protocol, results: Iterable[str], number: int) -> Iterator[Turn]:
    """The conversation: the engine is told what to say, and what it said goes back as harnesses send it."""
    session = replace(tool_session.opening(""), tools=tool_session.tools(number))
    for at, result in enumerate(results):
        step, said = _next_step(session, number, at)
        asked = _asking(session, f"{result}\n{said}\nEnd of result {at}.")
        watch = Watch((server.pid,))
        (answer,) = read_streams(server.port, [protocol.request(asked, _ANSWER)], _MARK)
        spent = watch.stop()
        cpu, others = spent.cpu[0] * 1e3, spent.others / spent.wall
        yield Turn(answer.first * 1e3, cpu, prompt_tokens(answer), others)
        session = replace(asked, steps=(*asked.steps, replace(step, call_id=_call_id(answer))))


def _next_step(session: Session, number: int, at: int) -> tuple[Step, str]:
    """What the model is to say next, and the marker that makes the engine say it."""
    tool, _, _ = session.tools[at % len(session.tools)]
    arguments = json.dumps({"path": f"src/{number}/module_{at}.py", "first_line": at})
    thought = f"Perhaps module {at} of {number} is at fault, as its test says nothing about the border."
    said = f"Step {at}: I look at the next place."
    call = f'<tool_call>\n{{"name": "{tool}", "arguments": {arguments}}}\n</tool_call>'
    step = Step(said, "", tool, arguments, "", thought)
    return step, f"[[echo:<think>\n{thought}\n</think>\n\n{said}\n{call}]]"


def _asking(session: Session, result: str) -> Session:
    """The session with ``result`` as the answer to its last call, or to begin with as the question."""
    if not session.steps:
        return replace(session, question=result)
    *earlier, last = session.steps
    return replace(session, steps=(*earlier, replace(last, result=result)))


def _call_id(answer: Answer) -> str:
    found = _CALL_ID.findall(b"".join(answer.tail))
    if not found:
        raise WrongAnswer(f"an answer without a call: {answer.end!r}")
    return str(found[-1].decode())


def engine_alone(tokens: int) -> float:
    """CPU ms of the scripted engine for a turn on a known prompt of so many tokens, which grew by one result."""
    tokenizer = load_tokenizer(peers.QWEN3)
    engine = ScriptedEngine(tokenizer.encode, tokenizer.decode)
    _, said = _next_step(tool_session.opening(""), 0, 0)
    known = array("I", tokenizer.encode(" and" * tokens))

    async def answer(result: str) -> float:
        prompt = known + array("I", tokenizer.encode(f"{result}\n{said}"))
        began = time.process_time()
        async for _ in engine.generate(GenerationJob(prompt, Sampling(), "alone")):
            pass
        return time.process_time() - began

    async def answers() -> list[float]:
        await engine.start()
        return [await answer(f"Result {at}." * 100) for at in range(9)]

    return statistics.median(asyncio.run(answers())) * 1e3


def fit(turns: Sequence[Turn], of: Callable[[Turn], float]) -> Fit:
    """By Theil and Sen, which a few slow turns do not move: the median of the slopes between all pairs."""
    points = [(turn.tokens / 1e3, of(turn)) for turn in turns]
    slopes = [(y - v) / (x - u) for i, (x, y) in enumerate(points) for u, v in points[:i] if x != u]
    slope = statistics.median(slopes)
    return Fit(statistics.median(y - slope * x for x, y in points), slope)


Measured = dict[tuple[int, str, str], list[list[Turn]]]
"""By tokens of a turn, protocol and server: the rounds."""


def measure(
    running: Sequence[Server],
    protocols: Sequence[Protocol],
    sizes: Sequence[int],
    rounds: int,
    tokenizer: Tokenizer,
) -> Measured:
    """Every conversation on every server, the servers in turn."""
    measured: Measured = {}
    number = 0
    for _ in range(rounds):
        for each in sizes:
            for protocol in protocols:
                number += 1
                results = list(growing(tokenizer, each, number))
                talks = [converse(server, protocol, results, number) for server in running]
                # Turn by turn, so that whatever else the machine does meets them all.
                rows = list(zip(*talks, strict=True))
                for server, turns in zip(running, zip(*rows, strict=True), strict=True):
                    measured.setdefault((each, protocol.name, server.name), []).append(list(turns))
                print(f"{protocol.name}, {each} tokens a turn", flush=True)
    return measured


def report(measured: Measured, names: Sequence[str], rounds: int) -> str:
    """The tables."""
    own, *others = names
    busy = statistics.median(turn.others for talks in measured.values() for talk in talks for turn in talk)
    parts = [
        f"{documents.today()}; {machine()}. {_TURNS} turns, {rounds} round{'s' * (rounds > 1)}; every figure is "
        f"the median of the turns in its row. Everything else on the machine, the other servers' engines included, "
        f"kept {busy:.2f} cores busy meanwhile (median)."
    ]
    lengths = sorted({round(talks[0][-1].tokens, -4) for talks in measured.values()})
    alone = " and ".join(f"{engine_alone(tokens):.1f} ms for {tokens:,} tokens" for tokens in lengths)
    parts.append(
        f"singletree's scripted engine alone takes {alone} of CPU a turn; it is inside singletree's figures, Dynamo's "
        "worker outside Dynamo's."
    )
    for each in sorted({size for size, _, _ in measured}):
        protocols = [protocol for size, protocol, name in measured if size == each and name == own]
        for protocol in protocols:
            talks = {name: measured[each, protocol, name] for name in names}
            tokens = round(talks[own][0][-1].tokens, -3)
            parts.append(
                f"**{protocol}, to {tokens:,} tokens in {_TURNS} turns**\n\n{_table(talks, own, others)}"
            )
    return "\n\n".join(parts)


def _table(talks: dict[str, list[list[Turn]]], own: str, others: Sequence[str]) -> str:
    head = ["turns", "tokens"]
    for name in (own, *others):
        head += [f"{name}: ms", "CPU ms"]
    head += [f"ratio to {name}: ms, CPU" for name in others]
    rows = []
    for begin in range(0, _TURNS, _BAND):
        bands = {
            name: [t for talk in told for t in talk[begin : begin + _BAND]] for name, told in talks.items()
        }
        row = [f"{begin + 1}–{begin + _BAND}", f"{statistics.median(t.tokens for t in bands[own]):,.0f}"]
        rows.append([*row, *_cells(bands, own, others, _first, _cpu)])
    fits = {name: [turn for talk in told for turn in talk] for name, told in talks.items()}
    for title, part in (("at the start", "start"), ("for each 1000 tokens more", "slope")):
        row = ["fit", title]
        for name in (own, *others):
            row += [f"{getattr(fit(fits[name], of), part):.3f}" for of in (_first, _cpu)]
        for name in others:
            ratios = [
                getattr(fit(fits[own], of), part) / getattr(fit(fits[name], of), part)
                for of in (_first, _cpu)
            ]
            row.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
        rows.append(row)
    return documents.table(head, rows)


def _cells(
    bands: dict[str, list[Turn]], own: str, others: Sequence[str], *of: Callable[[Turn], float]
) -> list[str]:
    medians = {name: [statistics.median(map(each, turns)) for each in of] for name, turns in bands.items()}
    cells = [f"{value:.1f}" for name in (own, *others) for value in medians[name]]
    for name in others:
        ratios = (ours / theirs for ours, theirs in zip(medians[own], medians[name], strict=True))
        cells.append(", ".join(f"{ratio:.2f}" for ratio in ratios))
    return cells


def _first(turn: Turn) -> float:
    return turn.first


def _cpu(turn: Turn) -> float:
    return turn.cpu


def _options() -> argparse.Namespace:
    # Dynamo leaves the reasoning out of Responses, so that its first word would be another one.
    names = [protocol.name for protocol in PROTOCOLS if protocol.name != "responses"]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one protocol, one round")
    parser.add_argument("--rounds", type=int, default=1, help="conversations of each kind")
    parser.add_argument("--protocols", default=",".join(names), help=f"of {', '.join(names)}")
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = _options()
    if not peers.has_tokenizer():
        peers.install_tokenizer()
    tokenizer = Tokenizer.from_file(str(peers.QWEN3 / "tokenizer.json"))
    wanted = ["chat"] if options.quick else options.protocols.split(",")
    protocols = [protocol for protocol in PROTOCOLS if protocol.name in wanted]
    with ExitStack() as stack:
        running = [stack.enter_context(servers.singletree())]
        if peers.has_dynamo():
            played = filler()
            running.append(stack.enter_context(servers.dynamo("Dynamo", played)))
            fast = servers.dynamo("Dynamo, fastokens", played, ("--tokenizer", "fastokens"))
            running.append(stack.enter_context(fast))
        measured = measure(running, protocols, (400, 1900), options.rounds, tokenizer)
    text = report(measured, [server.name for server in running], options.rounds)
    print(text)
    if options.write:
        documents.replace(NAME, text)


if __name__ == "__main__":
    main()
