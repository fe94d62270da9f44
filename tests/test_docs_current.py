"""The documents that are generated from the code are current."""

from __future__ import annotations

import pytest

from make_docs import DOCS, DOCUMENTS


@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_is_current(name: str) -> None:
    path = DOCS / name
    assert path.exists(), f"docs/{name} is missing: make it with `make docs`"
    assert path.read_text(encoding="utf-8") == DOCUMENTS[name](), "run `make docs` and review what changed"
