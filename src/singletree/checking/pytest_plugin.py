"""A plugin of pytest: with ``--singletree-url`` each check of an endpoint is a test.

pytest finds it by its entry point. Without the option it does nothing, and imports nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from singletree.checking.endpoint import Endpoint
    from singletree.checking.verdicts import Check

_OPTIONS = {
    "--singletree-url": "check the agent-serving endpoint at this URL",
    "--singletree-model": "the model to check; the first one that is listed by default",
    "--singletree-key": "API key of the endpoint",
    "--singletree-second-key": "another key, for the check of two tenants",
    "--singletree-only": "names of checks, with commas between",
    "--singletree-skip": "names of checks, with commas between",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("singletree", "checks of an endpoint that serves agents")
    for name, meaning in _OPTIONS.items():
        group.addoption(name, default="", help=meaning)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    """Add a test for each check on each protocol; one that the endpoint lacks is skipped."""
    if not (url := config.getoption("--singletree-url")):
        return
    from singletree.checking.contract import choose

    only, skip = (
        [name.strip() for name in config.getoption(option).split(",") if name.strip()]
        for option in ("--singletree-only", "--singletree-skip")
    )
    target = _Target(url, config)
    for check in choose(only, skip):
        for protocol in ("",) if check.once else check.protocols:
            name = f"{check.name}[{protocol}]" if protocol else check.name
            items.append(
                _CheckItem.from_parent(session, name=name, check=check, protocol=protocol, target=target)
            )


class _Target:
    """The endpoint, which is looked at when the first check runs."""

    def __init__(self, url: str, config: pytest.Config) -> None:
        self._url, self._config = url, config
        self._found: Endpoint | Exception | None = None

    def endpoint(self) -> Endpoint:
        from singletree.checking.endpoint import Endpoint, HttpConnector, Unreachable

        if self._found is None:
            given = (
                self._config.getoption(f"--singletree-{name}") for name in ("key", "second-key", "model")
            )
            try:
                self._found = Endpoint(HttpConnector(self._url), *given)
                self._found.discover()
            except Unreachable as error:
                self._found = error
        if isinstance(self._found, Exception):
            raise self._found
        return self._found


class _Unmet(Exception):
    """A check that failed."""


class _CheckItem(pytest.Item):
    def __init__(self, *, check: Check, protocol: str, target: _Target, **more: Any) -> None:
        super().__init__(**more)
        self._check, self._protocol, self._target = check, protocol, target

    def runtest(self) -> None:
        from singletree.checking.contract import places, run_check

        endpoint = self._target.endpoint()
        found = [each for _, each in places([self._check], endpoint) if self._protocol in ("", each.name)]
        if not found:
            pytest.skip(f"the endpoint has no {self._protocol or 'protocol of this check'}")
        result = run_check(self._check, endpoint, found[0])
        if result.verdict == "fail":
            raise _Unmet(result.reason)
        if result.verdict != "pass":
            pytest.skip(f"{result.verdict}: {result.reason}")

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        if isinstance(excinfo.value, _Unmet):
            check = self._check
            return f"{check.title}\n  seen: {excinfo.value}\n  users see: {check.users}\n  reference: {check.reference}"
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[str, int | None, str]:
        return "singletree", None, self.name
