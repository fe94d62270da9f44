"""The page of ``make certify``: what a run of a part does to the cells that are kept."""

from __future__ import annotations

from pathlib import Path

import certified_page
from certified_page import Cell

RESULTS = """<testsuites><testsuite>
<testcase name="test_cell[hermes on llama.cpp server-pi-chat]">
 <properties><property name="finished" value="True"/><property name="generated" value="10"/>
 <property name="kept" value="9"/><property name="dispatch_ms" value="1.5"/>
 <property name="engine" value="llama.cpp b1"/>
 <property name="family" value="hermes"/></properties></testcase>
<testcase name="test_cell[hermes-codex]"><failure message="assert 3 == 0&#10;where 3"/></testcase>
</testsuite></testsuites>"""


def test_a_part_takes_the_place_of_its_cells_alone(tmp_path: Path) -> None:
    results = tmp_path / "certified.xml"
    results.write_text(RESULTS, encoding="utf-8")
    new = certified_page.cells_of([str(results)], "later")
    earlier = [Cell("hermes", harness, "earlier", finished=True) for harness in ("codex", "pi-chat")]
    cells = certified_page.merged(earlier, new)
    assert [(cell.row, cell.harness, cell.run, cell.failed) for cell in cells] == [
        ("hermes", "codex", "later", "assert 3 == 0"),
        ("hermes", "pi-chat", "earlier", ""),
        ("hermes on llama.cpp server", "pi-chat", "later", ""),
    ]
    report = certified_page.report(cells)
    assert "earlier: hermes." in report
    assert "later: hermes, hermes on llama.cpp server." in report
    assert "Engines: llama.cpp b1." in report
    assert "| pi-chat | 2 of 2 | 90.0% | 0 | 0 | – |" in report
    assert "| hermes | **no** | yes |" in report
    assert "- hermes with codex: `assert 3 == 0`" in report
