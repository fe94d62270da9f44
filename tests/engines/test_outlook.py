"""What is given up where room is short: the order, and what an engine reads of it."""

from __future__ import annotations

import pickle

from singletree.engines.engine import ONCE, OVERDUE_SECONDS, SOON_SECONDS, Outlook, worth

NOW = 1000.0


def outlook(**known: object) -> Outlook:
    made = Outlook(goes_on=True)
    made.is_running = False
    for name, value in known.items():
        setattr(made, name, value)
    return made


def test_what_comes_back_soon_stays_and_what_is_over_goes_first() -> None:
    states = {
        "over, just used": (outlook(is_over=True), NOW),
        "waits for a person for long": (outlook(), NOW - 500),
        "one turn, a moment ago": (outlook(goes_on=False), NOW - 1),
        "waits for a person": (outlook(), NOW - 10),
        "a long call is out": (outlook(returns_at=NOW + 60), NOW - 900),
        "a short call is out": (outlook(returns_at=NOW + 1), NOW - 900),
        "pinned": (outlook(is_pinned=True), NOW - 5000),
    }
    assert sorted(states, key=lambda name: worth(*states[name], NOW)) == list(states)


def test_a_call_that_never_comes_back_is_forgotten() -> None:
    out = outlook(returns_at=NOW)
    assert worth(out, NOW, NOW + 1) > worth(outlook(), NOW, NOW + 1)
    late = NOW + OVERDUE_SECONDS
    assert worth(out, NOW, late) < worth(outlook(), NOW + 1, late)


def test_a_conversation_of_one_turn_counts_as_idle_for_longer() -> None:
    once = outlook(goes_on=False)
    idle = ONCE * (1 + SOON_SECONDS) - SOON_SECONDS
    assert worth(once, NOW - 1, NOW) == worth(outlook(), NOW - idle, NOW)


def test_where_nothing_is_known_the_least_recently_used_goes() -> None:
    assert worth(None, NOW - 2, NOW) < worth(None, NOW - 1, NOW)


def test_a_place_is_kept_for_who_may_come_back_in_time() -> None:
    assert Outlook().may_return_by(NOW), "its turn runs"
    assert outlook().may_return_by(NOW)
    assert outlook(returns_at=NOW).may_return_by(NOW)
    assert not outlook(returns_at=NOW + 1).may_return_by(NOW)
    assert not outlook(goes_on=False).may_return_by(NOW)
    assert not outlook(is_over=True).may_return_by(NOW)


def test_an_outlook_moves_with_its_session_to_another_process() -> None:
    moved = pickle.loads(pickle.dumps(outlook(returns_at=NOW)))
    assert (moved.goes_on, moved.returns_at) == (True, NOW)
