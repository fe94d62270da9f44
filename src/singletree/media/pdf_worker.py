"""The program of the child process that reads a PDF; not a module to import.

Arguments: ``pages`` or ``text``, the most pages, the longer side of a page in pixels, the most bytes of memory. The PDF
comes from standard input; one line of JSON goes to standard output: ``{"pages": [...]}`` with PNG in base64 or with
text, or ``{"error": text}`` for a file that cannot be read. A PDF is foreign data for a large native library, so it is
read where a crash, an endless loop or a full memory ends nothing else.
"""

from __future__ import annotations

import base64
import io
import json
import os
import sys
from typing import Any


def main() -> None:
    """Read, convert, answer."""
    form, most, side, memory = sys.argv[1], *map(int, sys.argv[2:5])
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output of the library must not mix with the answer
    try:
        _limit(memory)
        found: dict[str, Any] = _read(sys.stdin.buffer.read(), form, most, side)
    except Exception as error:
        found = {"error": str(error)[:200] or type(error).__name__}
    print(json.dumps(found), file=answer, flush=True)


def _limit(memory: int) -> None:
    try:
        import resource
    except ImportError:  # not a Unix system
        return
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))


def _read(data: bytes, form: str, most: int, side: int) -> dict[str, Any]:
    import pypdfium2

    document = pypdfium2.PdfDocument(data)
    if len(document) > most:
        return {"error": f"it has {len(document)} pages, of which at most {most} are accepted"}
    convert = _picture if form == "pages" else _text
    return {"pages": [convert(page, side) for page in document]}


def _picture(page: Any, side: int) -> str:
    longer = max(page.get_size())
    target = io.BytesIO()
    page.render(scale=side / max(longer, 1)).to_pil().convert("RGB").save(target, "PNG", compress_level=1)
    return base64.b64encode(target.getvalue()).decode()


def _text(page: Any, side: int) -> str:
    return str(page.get_textpage().get_text_bounded())


if __name__ == "__main__":
    main()
