"""A call is the same call after a round trip through a client's JSON library."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from singletree.conversation import Tool, ToolCall, Turn
from singletree.prompts.replay.turn_comparison import canonical_json, is_equivalent_turn

ROUND_TRIPS = [
    ('{"n": -0.0}', '{"n":0}'),
    ('{"n": -0}', '{"n":0}'),
    ('{"n": -1e-400}', '{"n":0}'),
    ('{"n": 1e400}', '{"n":null}'),
    ('{"n": -1e400}', '{"n":null}'),
    ('{"n": [1.0, 1e2, 1E+2, 0.10]}', '{"n":[1,100,100,0.1]}'),
    ('{"n": 9007199254740993}', '{"n":9007199254740992}'),
    ('{"n": 123456789012345678901234567890}', '{"n":1.2345678901234568e+29}'),
    (f'{{"n": {"9" * 400}}}', '{"n":null}'),
    ('{"a": 1, "b": 2, "a": 3}', '{"a":3,"b":2}'),
    ('{"b": 1, "10": 2, "9": 3}', '{"9":3,"10":2,"b":1}'),
    ('{"s": "\\u00e9\\/\\u2028"}', '{"s":"é/\u2028"}'),
    ('{"s": "\\ud83d\\ude00"}', '{"s":"\U0001f600"}'),
    ('{"s": "\\ud800"}', '{"s":"\\ud800"}'),
    ('{"a": {"b": [-0.0, {"c": 1e999}]}}', '{"a":{"b":[0,{"c":null}]}}'),
]
"""A call's arguments as a model wrote them, and what JavaScript makes of them."""

OTHER_LIBRARIES = [
    ('{"n": NaN}', '{"n":null}'),
    ('{"n": -Infinity}', '{"n":null}'),
    ('{"s": "\\ud800x"}', '{"s":"\ufffdx"}'),
    ('{"a": 1, "__proto__": {"b": 2}}', '{"a":1}'),
    ("", "{}"),
]
"""The same for values that JavaScript's own parser keeps or refuses, and other clients' libraries change."""


@pytest.mark.parametrize(("sent", "returned"), [*ROUND_TRIPS, *OTHER_LIBRARIES])
def test_a_round_trip_is_no_edit(sent: str, returned: str) -> None:  # C3
    came, was = (Turn("assistant", (ToolCall("f", it, "call_1"),)) for it in (returned, sent))
    assert is_equivalent_turn(came, was)
    assert is_equivalent_turn(came, was, (Tool("f", parameters={"type": "object"}),))
    assert canonical_json(canonical_json(sent)) == canonical_json(sent)


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no JavaScript engine here")
def test_the_round_trips_are_those_of_javascript() -> None:
    script = "for (const s of process.argv.slice(1)) console.log(JSON.stringify(JSON.parse(s)))"
    given = [written for written, _ in ROUND_TRIPS]
    made = subprocess.run(["node", "-e", script, "--", *given], capture_output=True, check=True)
    assert made.stdout.decode().split("\n")[:-1] == [returned for _, returned in ROUND_TRIPS]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ('{"n": 0}', '{"n": false}'),
        ('{"n": 1}', '{"n": true}'),
        ('{"n": 0}', '{"n": null}'),
        ('{"n": 1}', '{"n": "1"}'),
        ('{"n": 0.1}', '{"n": 0.10000000000000002}'),
        ('{"n": 9007199254740992}', '{"n": 9007199254740994}'),
        ('{"s": "a"}', '{"s": "a "}'),
        ('{"a": null}', "{}"),
    ],
)
def test_another_value_is_an_edit(one: str, other: str) -> None:
    assert canonical_json(one) != canonical_json(other)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "plain words", "\ud800"])
def test_what_is_not_json_is_compared_as_text(text: str) -> None:
    assert canonical_json(text) == text


def test_a_default_is_compared_in_the_same_way() -> None:
    schema = {"type": "object", "properties": {"n": {"default": -0.0}, "m": {"default": 1e400}}}
    came, was = (Turn("assistant", (ToolCall("f", it, "call_1"),)) for it in ('{"n":0,"m":null}', "{}"))
    assert is_equivalent_turn(came, was, (Tool("f", parameters=schema),))
