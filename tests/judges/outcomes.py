"""What a judge's tests gave, compared with the failures that are expected of them."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

EXPECTED = Path(__file__).with_name("expected.toml")


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that failed: its name with the module, and the message of its exception."""

    test: str
    message: str


@dataclass(frozen=True, slots=True)
class Expected:
    """Failures that are expected, with the reason.

    Attributes:
        judge: the name of the judge.
        tests: a regular expression for the names of the tests.
        message: a regular expression for the message of each.
        reason: why the test fails here and the server stays as it is.
    """

    judge: str
    tests: str
    message: str
    reason: str

    def covers(self, failure: Failure) -> bool:
        """Return whether this failure was expected."""
        return bool(
            re.search(self.tests, failure.test) and re.search(self.message, failure.message, re.DOTALL)
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The outcome of a judge: how many tests passed, what failed unexpectedly, which expectations met no failure."""

    passed: int
    expected: int
    unexpected: Sequence[Failure]
    stale: Sequence[Expected]


def read_expected(judge: str) -> list[Expected]:
    """Return the failures that are expected of ``judge``."""
    entries = tomllib.loads(EXPECTED.read_text(encoding="utf-8"))["expected"]
    return [each for each in (Expected(**entry) for entry in entries) if each.judge == judge]


def judge_report(report: Path, expected: Iterable[Expected]) -> Verdict:
    """Compare the report of a run, as pytest's ``--junitxml`` writes it, with ``expected``."""
    rules = list(expected)
    passed = 0
    failures: list[Failure] = []
    for case in ElementTree.parse(report).iter("testcase"):
        failed = next((child for child in case if child.tag in ("failure", "error")), None)
        if failed is not None:
            message = f"{failed.get('message', '')}\n{failed.text or ''}"
            failures.append(Failure(f"{case.get('classname')}.{case.get('name')}", message))
        elif case.find("skipped") is None:
            passed += 1
    unexpected = [failure for failure in failures if not any(rule.covers(failure) for rule in rules)]
    stale = [rule for rule in rules if not any(rule.covers(failure) for failure in failures)]
    return Verdict(passed, len(failures) - len(unexpected), unexpected, stale)
