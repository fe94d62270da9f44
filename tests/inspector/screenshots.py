"""Takes the pictures of docs/inspector.md: ``PYTHONPATH=tests python -m inspector.screenshots [FOLDER]``.

The sessions are real: harnesses from npm, and clients of our own, on a server with the scripted engine.
"""

from __future__ import annotations

import io
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from PIL import Image

from clients import install as harness_install
from clients import session_script
from clients.conftest import TOKENIZER
from clients.harness import CLAUDE, CODEX, OPENCODE, PI, Task, run
from clients.served import MODEL, Server, serving
from inspector import install, traffic
from inspector.conftest import CONTENT, DESKTOP, FLAGS, PHONE
from inspector.recorded import write_scripts

DOCS = Path(__file__).resolve().parents[2] / "docs" / "pictures"
TURNS = {CLAUDE: 14, CODEX: 6, OPENCODE._replace(api="chat"): 5, PI._replace(api="responses"): 4}
COLOURS = 256
LARGEST = 150_000
"""Largest size of a picture in bytes."""


class Shot(NamedTuple):
    """One picture.

    Attributes:
        name: of its file, without ``inspector-`` and ending.
        address: what is shown.
        keys: pressed before.
        options: of the browser's context.
        scroll: text of a heading that is scrolled to the top; empty for none.
    """

    name: str
    address: str
    keys: str = ""
    options: dict[str, Any] = {}  # noqa: RUF012
    scroll: str = ""


def fill(server: Server, folder: Path) -> None:
    """Run the sessions that the pictures show."""
    with ThreadPoolExecutor() as pool:
        for harness, turns in TURNS.items():
            workspace, home = folder / harness.title / "workspace", folder / harness.title / "home"
            session_script.make_workspace(workspace)
            home.mkdir()
            names = write_scripts(server, harness, workspace, turns)
            prompt = f"Look after the modules here, one after another. [[script:{','.join(names)}]]"
            pool.submit(run, harness, Task(server.url, MODEL, prompt, home, workspace))
        pool.submit(traffic.session_with_break, server, "5b1f0c7e-daily-report", 10)
        agent = traffic.Agent(server, "a41d2f90-nightly-checks")
        pool.submit(traffic.work, agent, 9, 0.3)


def shots(server: Server) -> Iterator[Shot]:
    """Yield the pictures."""
    broken = traffic.session_id(server, "5b1f0c7e-daily-report")
    turns = traffic.api(server, f"sessions/{broken}")["turns"]
    number, turn = next((at, turn) for at, turn in enumerate(turns) if turn["break"])
    last, dark = turns[-2]["id"], {"color_scheme": "dark"}
    yield Shot("sessions", "#/sessions", "j")
    yield Shot("session", f"#/sessions/{broken}")
    yield Shot("turns-dark", f"#/sessions/{broken}", "b", dark, "Prompt tokens by turn")
    yield Shot("turn", f"#/sessions/{broken}/turns/{last}", "jjjjjj")
    yield Shot("prompt", f"#/sessions/{broken}/turns/{turn['id']}/prompt")
    yield Shot("difference", f"#/difference?a={turns[number - 1]['id']}&b={turn['id']}")
    phone = {"viewport": PHONE, "device_scale_factor": 2}
    yield Shot("phone", f"#/sessions/{broken}", "", phone)


def take(browser: Any, server: Server, shot: Shot) -> bytes:
    """Return one picture as PNG."""
    context = browser.new_context(**{"viewport": DESKTOP, **shot.options})
    page = context.new_page()
    page.goto(f"{server.url}/inspect{shot.address}")
    page.locator(".page h1").first.wait_for(state="attached")
    time.sleep(1.5)
    for key in shot.keys:
        page.keyboard.press(key)
        time.sleep(0.15)
    if shot.scroll:
        heading = page.get_by_role("heading", name=shot.scroll)
        heading.evaluate("(e) => window.scrollTo(0, e.getBoundingClientRect().top + scrollY - 72)")
        time.sleep(0.5)
    image = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
    context.close()
    packed = io.BytesIO()
    # The palette is refined: the first guess gives small red words the colour of the grey ones.
    image.quantize(COLOURS, kmeans=2, dither=Image.Dither.NONE).save(packed, "PNG", optimize=True)
    return packed.getvalue()


def main() -> int:
    """Take all pictures."""
    if reason := install.missing():
        print(reason)
        return 1
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        with serving(harness_install.folder() / TOKENIZER, folder / "server", CONTENT) as server:
            fill(server, folder)
            with install.playwright().sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=install.chromium(), args=list(FLAGS))
                for shot in shots(server):
                    picture = take(browser, server, shot)
                    assert len(picture) < LARGEST, (shot.name, len(picture))
                    (target / f"inspector-{shot.name}.png").write_bytes(picture)
                    print(f"inspector-{shot.name}.png {len(picture) // 1000} kB", flush=True)
                browser.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
