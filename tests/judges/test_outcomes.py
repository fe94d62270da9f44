"""The comparison of a judge's report with the failures that are expected."""

from __future__ import annotations

import re
from pathlib import Path

from judges.outcomes import EXPECTED, Expected, judge_report, read_expected

REPORT = """<testsuites><testsuite>
<testcase classname="unit.test_chat" name="test_passes"/>
<testcase classname="unit.test_chat" name="test_skips"><skipped/></testcase>
<testcase classname="unit.test_chat" name="test_fails[a]"><failure message="404 == 200">trace</failure></testcase>
<testcase classname="unit.test_chat" name="test_breaks"><error message="boom"/></testcase>
</testsuite></testsuites>"""


def _rule(tests: str, message: str) -> Expected:
    return Expected("suite", tests, message, "a reason")


def _report(folder: Path) -> Path:
    (folder / "report.xml").write_text(REPORT)
    return folder / "report.xml"


def test_an_unexpected_failure_is_reported(tmp_path: Path) -> None:
    verdict = judge_report(_report(tmp_path), [_rule(r"test_fails", "404")])
    assert (verdict.passed, verdict.expected) == (1, 1)
    assert [failure.test for failure in verdict.unexpected] == ["unit.test_chat.test_breaks"]
    assert verdict.stale == []


def test_a_failure_with_another_message_is_unexpected(tmp_path: Path) -> None:
    verdict = judge_report(_report(tmp_path), [_rule(r"test_fails", "500"), _rule("breaks", "boom")])
    assert [failure.test for failure in verdict.unexpected] == ["unit.test_chat.test_fails[a]"]
    assert [rule.message for rule in verdict.stale] == ["500"]


def test_each_expectation_has_a_reason_and_valid_patterns() -> None:
    judges = set(re.findall(r'^judge = "(.*)"$', EXPECTED.read_text(encoding="utf-8"), re.MULTILINE))
    assert judges
    for judge in judges:
        for rule in read_expected(judge):
            re.compile(rule.tests), re.compile(rule.message)
            assert len(rule.reason) > 20, rule
