"""What may happen in a session, as data: what the model says, what goes wrong, and what each harness does then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from clients.harness import Harness
from clients.turns import Break, Fault, Turn, read, shell, text_for_user, thought, write

COMMAND = "echo product-$((6 * 7))"
"""The shell works it out: its result stands neither in the prompt nor in the call."""
PRINTED = "product-42"
ANSWER = "The command printed product-42, and I have read the notes."
PARTIAL = "Partial words of an answer"
RESUMED = "And this is the rest of it."

CALLING = (thought("I run the command first."), shell(COMMAND))
ANSWERING = (thought("I know both."), text_for_user(ANSWER))
RESUMING = (text_for_user(RESUMED),)


class Behaviour(NamedTuple):
    """What a harness does.

    Attributes:
        asks: for which of the model's turns, from 0, one after another.
        answer: its last word begins with this.
        says: what its last request says beyond the one before.
    """

    asks: tuple[int, ...]
    answer: str = ANSWER
    says: str = ""


class Scenario(NamedTuple):
    """One of them.

    Attributes:
        turns: what the model says, by how many turns of its own it sees behind the user's words.
        expected: of every harness, but for ``otherwise``.
        otherwise: by the title of a harness or, for all of its APIs and versions, its name.
        flags: of the server.
        broken: how turn 1 ends the first time; None where the engine failed or nobody listened any more, ``stop``
            where nothing went wrong.
        refused: HTTP statuses of failure that the harness was answered with, by API.
        is_smooth: whether the harness has nothing to complain of, and each prompt goes on from the last.
    """

    name: str
    turns: Sequence[Turn]
    expected: Behaviour
    otherwise: Mapping[str, Behaviour] = MappingProxyType({})
    flags: tuple[str, ...] = ()
    broken: str | None = "stop"
    refused: Mapping[str, Mapping[str, int]] = MappingProxyType({})
    is_smooth: bool = False

    def behaviour(self, harness: Harness) -> Behaviour:
        """Of that harness."""
        return self.otherwise.get(harness.title, self.otherwise.get(harness.name, self.expected))


def smooth(name: str, *turns: Turn, flags: tuple[str, ...] = ()) -> Scenario:
    """A scenario in which nothing goes wrong."""
    return Scenario(name, turns, Behaviour(tuple(range(len(turns)))), flags=flags, is_smooth=True)


_AGAIN = Behaviour((0, 1, 1))
_PARTLY_AGAIN = Behaviour((0, 1, 1), PARTIAL)
_GIVES_UP = Behaviour((0, 1), "API Error")
_ENDS = Behaviour((0, 1), "")
_SHOWS_THE_ERROR = Behaviour((0, 1), "Internal server error: the script makes the engine fail")
_ONCE = {api: {"500": 1} for api in ("messages", "chat", "responses")}
_TWICE = {"messages": {"529": 2}, "chat": {"503": 2}, "responses": {"503": 2}}

SCENARIOS = (
    smooth(
        "interleaved_with_text",
        (
            thought("First thought A."),
            text_for_user("Text between A."),
            shell(COMMAND),
            thought("Second thought B."),
            text_for_user("Text between B."),
            read(),
        ),
        ANSWERING,
    ),
    smooth(
        "parallel", (thought("Three at once."), shell(COMMAND), shell("cat notes.txt"), read()), ANSWERING
    ),
    smooth(
        "three_turns",
        (thought("Step one."), shell(COMMAND)),
        (thought("Step two."), text_for_user("Now reading."), shell("cat notes.txt")),
        (thought("Step three."), shell("ls")),
        ANSWERING,
    ),
    smooth(
        "patch",
        (thought("I write a file."), write("out.txt", "PELICAN")),
        (shell("cat out.txt"),),
        ANSWERING,
    ),
    # Events that the protocols do not know, in the form that says nothing in each of them.
    smooth(
        "dispatched",
        CALLING,
        (
            thought("Now the notes."),
            text_for_user("I read the notes."),
            read(),
            thought("And again."),
            shell(COMMAND),
        ),
        ANSWERING,
        flags=("--enable-streaming-tool-dispatch", "--enable-streaming-reasoning-dispatch"),
    ),
    Scenario(
        "fails_before_the_stream",
        (CALLING, (Fault.FAIL, *ANSWERING), RESUMING),
        Behaviour((0, 1)),
        refused=_ONCE,
    ),
    Scenario(
        "fails_in_a_thought",
        (CALLING, (thought("I know both."), Fault.FAIL, text_for_user(ANSWER)), RESUMING),
        _AGAIN,
        {"claude-2.1.197": _GIVES_UP, "cline": _SHOWS_THE_ERROR},
        broken=None,
    ),
    Scenario(
        "fails_in_text",
        (CALLING, (thought("I know."), text_for_user(PARTIAL), Fault.FAIL, text_for_user(ANSWER)), RESUMING),
        _PARTLY_AGAIN,
        {
            "claude": Behaviour((0, 1, 2), RESUMED, "Your response above was cut off mid-stream."),
            "claude-2.1.197": _GIVES_UP,
            "cline": _SHOWS_THE_ERROR,
            "qwen": Behaviour((0, 1, 2), PARTIAL + RESUMED, "Do not repeat any line"),
        },
        broken=None,
    ),
    # Where tools run during the stream, the call's result is there and the turn stands.
    Scenario(
        "fails_after_a_call",
        (CALLING, (thought("I know."), read(), Fault.FAIL), ANSWERING, RESUMING),
        Behaviour((0, 1, 1, 2)),
        {
            "claude": Behaviour((0, 1, 2)),
            "cline": _SHOWS_THE_ERROR,
            "codex": Behaviour((0, 1, 2)),
            # Asks anew, and keeps the first call beside the second.
            "opencode": Behaviour((0, 1, 1, 3), RESUMED),
            "qwen-messages": _ENDS,
        },
        broken=None,
    ),
    Scenario(
        "fails_at_the_end",
        (CALLING, (thought("I know."), text_for_user(ANSWER), Fault.FAIL), RESUMING),
        _AGAIN,
        {
            "claude": Behaviour((0, 1, 2), RESUMED, "Your response above was cut off mid-stream."),
            "claude-2.1.197": _GIVES_UP,
            "cline": _SHOWS_THE_ERROR,
            "qwen": Behaviour((0, 1, 2), ANSWER + RESUMED, "Do not repeat any line"),
        },
        broken=None,
    ),
    Scenario(
        "connection_breaks",
        (CALLING, (thought("I know."), Break("Partial"), text_for_user(ANSWER)), RESUMING),
        Behaviour((0, 1, 1), "Partial\n" + ANSWER),
        {
            "claude": Behaviour(
                (0, 1, 1), "Partial\n" + ANSWER, "Your response above was cut off mid-stream."
            ),
            "claude-2.1.197": _GIVES_UP,
            "cline": Behaviour((0, 1, 1), "PartialPartial\n" + ANSWER),
            "qwen-chat": Behaviour((0, 1, 2), "Partial" + RESUMED, "Do not repeat any line"),
        },
        broken=None,
    ),
    Scenario("held_while_full", (CALLING, (Fault.OVERLOAD, *ANSWERING)), Behaviour((0, 1)), is_smooth=True),
    Scenario(
        "refused_while_full",
        (CALLING, (Fault.OVERLOAD, *ANSWERING), RESUMING),
        Behaviour((0, 1)),
        flags=("--hold-seconds", "0"),
        refused=_TWICE,
    ),
    Scenario(
        "too_long_an_answer",
        (
            CALLING,
            (thought("I know."), text_for_user(PARTIAL), Fault.LENGTH, text_for_user(ANSWER)),
            RESUMING,
        ),
        Behaviour((0, 1), PARTIAL),
        {
            "claude": Behaviour((0, 1, 2), RESUMED, "Output token limit hit."),
            # Compacts the session, and begins again.
            "cline": Behaviour((0, 1, 0, 1), PARTIAL),
            "copilot": Behaviour((0, 1, 2), RESUMED),
            "qwen": Behaviour((0, 1, 1), f"{PARTIAL}\n{ANSWER}"),
        },
        broken="length",
    ),
    Scenario(
        "only_a_thought",
        (CALLING, (thought("I only think."), Fault.STOP, text_for_user(ANSWER)), RESUMING),
        _ENDS,
        {
            "claude": Behaviour((0, 1, 1), ANSWER, "had no visible output"),
            "kimi": _AGAIN,
            # Asks once more without tools.
            "openclaw": Behaviour((0, 1), RESUMED),
            "qwen": _AGAIN,
        },
    ),
)
