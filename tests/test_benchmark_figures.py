"""What a run of all benchmarks keeps, how it is compared with its targets, and the documents made from it."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks import figures
from benchmarks.figures import DYNAMO, OWN, TARGETS, Figure, Result, slug, verdicts

import page_parts
import product_page

QUIET, LOUD = 0.02, 1.4
TOKEN = "a token, messages, 16 streams"


def result(others: float = QUIET, **more: object) -> Result:
    given = {
        "version": "1.2.3",
        "date": "2026-11-23",
        "machine": "Intel(R) Xeon(R) CPU @ 2 GHz, 2 cores, 24 GiB",
    }
    made = Result(**{**given, "is_quick": False, "others": others, "spread": 1.05, "dynamo": "1.6.1"} | more)  # type: ignore[arg-type]
    made.add(TOKEN, "CPU µs", OWN, 40.0, 50.0, 42.0)
    made.add(TOKEN, "CPU µs", DYNAMO, 80.0, 80.0, 84.0)
    made.add("start, seconds", "s", OWN, 0.8, 1.4, 1.2)
    made.add("a request of one token, chat", "CPU ms", OWN, 1.4)
    return made


def test_a_figure_has_the_median_of_its_rounds() -> None:
    figure = Figure("µs", {OWN: [1.0, 4.0]})
    assert figure.median() == 2.5
    assert figure.median("absent") is None


def test_each_figure_is_compared_with_its_target() -> None:
    found = {verdict.name: verdict for verdict in verdicts(result())}
    assert found[TOKEN].value == pytest.approx(42 / 80)
    assert found[TOKEN].is_met is True
    assert found["start, seconds"].is_met is False
    assert found["a request of one token, chat"].is_met is None, "Dynamo was not measured"


def test_the_page_says_what_was_missed_and_what_is_missing() -> None:
    page = product_page.page(result(failed={"memory": "OSError: no space"}))
    assert "Measured beside Dynamo 1.6.1. Not measured:\n\n- memory: OSError: no space" in page
    assert "| a streamed token, beside Dynamo | 0.53 | ≤ 1.00 × | met |" in page
    assert "| start until ready | 1.20 s | ≤ 1.00 | missed by 1 of 1 |" in page
    assert "| a request of one token, beside Dynamo | – | ≤ 1.00 × | not measured |" in page
    _, _, missed = page.partition("**Figures that miss their target**")
    assert missed.count("- start, seconds 1.20 (≤ 1.00). Where it goes: ") == 1
    assert "not quiet" not in page
    assert "**The machine was not quiet**" in product_page.page(result(LOUD))


def test_the_readme_shows_six_figures() -> None:
    made = result()
    made.add("a token, chat, 64 streams", "CPU µs", OWN, 15.0)
    made.add("a token, chat, 64 streams", "CPU µs", DYNAMO, 45.0)
    made.add("a token, responses, 64 streams", "CPU µs", OWN, 16.0)
    page = product_page.summary(made, [["in place", "99 %", "48 %"], ["delay", "0", "95"]])
    rows = [line for line in page.splitlines() if line.startswith("| ")][2:]
    assert len(rows) == 6
    assert "| CPU of a streamed token, 64 streams | 15.0 to 16.0 µs | 45.0 µs with Dynamo |" in rows
    assert "| memory, idle, with Qwen3's tokenizer | not measured | – |" in rows
    assert "| start until ready | 1.20 s | – |" in rows


def test_every_target_says_where_the_time_goes() -> None:
    assert all(target.where for target in TARGETS)
    assert len({(target.figures, target.peer) for target in TARGETS}) == len(TARGETS)


def test_the_newest_quiet_full_run_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(figures, "FOLDER", tmp_path)
    assert figures.newest() is None
    assert "make bench" in product_page.page(None)
    assert figures.write(result()).name == "1.2.3-intel-xeon-2-cores.json"
    figures.write(result(LOUD, version="1.2.4", date="2026-11-25"))
    figures.write(result(version="1.2.5", date="2026-11-26", is_quick=True))
    newest = figures.newest()
    assert newest is not None
    assert newest.version == "1.2.3"
    assert newest == result()


@pytest.mark.parametrize(
    ("machine", "name"),
    [
        ("AMD EPYC 7B13, 8 cores, 32 GiB", "amd-epyc-7b13-8-cores"),
        ("aarch64, 4 cores, 8 GiB", "aarch64-4-cores"),
    ],
)
def test_machines_have_names(machine: str, name: str) -> None:
    assert slug(machine) == name


def test_a_part_stands_between_its_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    marked = "a\n<!-- product: begin -->\n\nold\n\n<!-- product: end -->\nb"
    page.write_text(marked)
    assert page_parts.with_parts(page, {"product": "new"}) == marked.replace("old", "new")
    with pytest.raises(ValueError, match="no place for gpu: write <!-- gpu: begin -->"):
        page_parts.with_parts(page, {"gpu": "text"})
