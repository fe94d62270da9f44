"""Errors cross process boundaries: each is the same error, with its attributes, after pickling."""

from __future__ import annotations

import pickle

import pytest

from singletree import errors
from singletree.errors import SingletreeError

EXAMPLES: list[SingletreeError] = [
    errors.InvalidRequest("wrong", param="messages.0"),
    errors.PreviousResponseNotFound("resp_1"),
    errors.ThreadUnsupported(),
    errors.ContextOverflow(5, 3),
    errors.BudgetSpent("used up"),
    errors.Unauthorized("no key"),
    errors.NotPermitted("no right"),
    errors.ForbiddenOrigin("http://a.example"),
    errors.ForbiddenHost("a.example"),
    errors.ForbiddenAddress("a.example"),
    errors.ModelNotFound("a", ("b", "c")),
    errors.RouteNotFound("no path"),
    errors.NotStored("Response", "resp_1"),
    errors.MethodNotAllowed("no method"),
    errors.RequestTimeout("late"),
    errors.Superseded(),
    errors.RateLimited("too often", retry_after=3.0),
    errors.BodyTooLarge("large"),
    errors.UnsupportedEncoding("zip"),
    errors.Overloaded("full", retry_after=7.0),
    errors.EngineFailed("died"),
    errors.EngineUnfit("lacks it"),
    errors.EngineUnreachable("no answer"),
    errors.WeightsUnavailable("gone"),
    errors.BadConfiguration("wrong"),
    errors.BadFamily("wrong"),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_survives_pickling(error: SingletreeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_every_error_is_an_example() -> None:
    def below(kind: type[SingletreeError]) -> set[type[SingletreeError]]:
        return {kind}.union(*(below(each) for each in kind.__subclasses__()))

    abstract = {SingletreeError, errors.Rejected}
    ours = {kind for kind in below(SingletreeError) if kind.__module__ == errors.__name__}
    assert ours - abstract == {type(each) for each in EXAMPLES}
