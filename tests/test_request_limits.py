"""The table of the limits of a request: what --limit changes, and how a limit refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from singletree.errors import BadConfiguration, InvalidRequest
from singletree.request_limits import RequestLimits, check, current, parse_limits


def test_given_limits_replace_defaults() -> None:
    default = RequestLimits()
    assert parse_limits(()) == default == current()
    limits = parse_limits(("stop_strings=1000", " stop-characters = 7 "))
    assert (limits.stop_strings, limits.stop_characters) == (1000, 7)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("stops=3", "--limit stops=3: no limit has this name; there are "),
        ("stop_strings", "--limit stop_strings: give a whole number from 1 on, such as stop_strings=1000"),
        ("stop_strings=0", "--limit stop_strings=0: give a whole number from 1 on"),
        ("stop_strings=-1", "give a whole number from 1 on"),
        ("stop_strings=many", "give a whole number from 1 on"),
    ],
)
def test_wrong_limits_are_refused(given: str, expected: str) -> None:
    with pytest.raises(BadConfiguration) as refused:
        parse_limits((given,))
    assert expected in refused.value.message


def test_check_names_the_number_the_limit_and_the_flag(set_limits: Callable[..., None]) -> None:
    set_limits(stop_strings=2)
    check("stop_strings", 2, what="stop strings", param="stop")
    with pytest.raises(InvalidRequest) as refused:
        check("stop_strings", 3, what="stop strings", param="stop")
    message = refused.value.message
    assert refused.value.param == "stop"
    assert message.startswith("stop has 3 stop strings; send at most 2 ")
    assert "--limit stop_strings=3" in message
