"""The views of the inspector's page in a real Chromium, on sessions of a real server."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from clients.served import Server
from inspector import checks, install, traffic
from inspector.conftest import PHONE, OpenPage

pytestmark = pytest.mark.browser

Sessions = Mapping[str, str]


def expect(located: Any) -> Any:
    """Return Playwright's assertions, which wait."""
    return install.playwright().expect(located)


def turns(server: Server, session: str) -> list[dict[str, Any]]:
    return list(traffic.api(server, f"sessions/{session}")["turns"])


def addresses(server: Server, sessions: Sessions) -> dict[str, str]:
    """An address for each view, on the session with a break."""
    session = sessions["broken"]
    first, _, broken, *_ = turns(server, session)
    return {
        "sessions": "#/sessions",
        "session": f"#/sessions/{session}",
        "turn": f"#/sessions/{session}/turns/{broken['id']}",
        "prompt": f"#/sessions/{session}/turns/{broken['id']}/prompt",
        "difference": f"#/difference?a={first['id']}&b={broken['id']}",
        "sides": f"#/sides?a={session}&b={sessions['good']}",
    }


HEADINGS = {
    "sessions": "Sessions",
    "session": "Claude Code broken",
    "turn": "Turn 3",
    "prompt": "Turn 3",
    "difference": "Difference",
    "sides": "Two sessions",
}


def test_two_sessions_stand_side_by_side(open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    one, two = (turns(server, sessions[name])[-1] for name in ("broken", "good"))
    page = open_page(f"#/difference?a={one['id']}&b={two['id']}")
    page.get_by_role("link", name="The two sessions side by side").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Two sessions")
    first = page.get_by_role("region", name="Turn 1", exact=True)
    expect(first.get_by_role("link")).to_have_count(2)
    expect(first).to_contain_text("Bash {")
    expect(first).to_contain_text("tokens of prefill")


@pytest.mark.parametrize("view", HEADINGS)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_view_is_readable_and_named(
    view: str, theme: str, open_page: OpenPage, server: Server, sessions: Sessions
) -> None:
    page = open_page(addresses(server, sessions)[view], color_scheme=theme)
    expect(page.get_by_role("heading", level=1)).to_contain_text(HEADINGS[view])
    page.wait_for_timeout(300)
    assert checks.unnamed_controls(page) == []
    assert checks.low_contrast(page) == []
    assert {"banner", "navigation", "main", "heading"} <= checks.roles(page)
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground)[:3])) < 200) == (theme == "dark")


def test_the_checks_of_every_view_can_fail(open_page: OpenPage, sessions: Sessions) -> None:
    page = open_page(viewport=PHONE)
    expect(page.get_by_role("treegrid").get_by_role("rowheader").first).to_be_visible()
    page.evaluate(
        "() => { document.querySelector('.totals').style.color = '#bbb';"
        " const wide = document.querySelector('main').appendChild(document.createElement('button'));"
        " wide.className = 'wide'; wide.style.marginLeft = '500px'; }"
    )
    assert [kind.split(":")[0] for kind in checks.low_contrast(page)] == ["totals"]
    assert checks.unnamed_controls(page) == ["button"]
    assert "BUTTON.wide" in checks.overflowing(page)


@pytest.mark.parametrize("view", HEADINGS)
def test_every_view_fits_a_phone(view: str, open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    page = open_page(addresses(server, sessions)[view], viewport=PHONE, has_touch=True)
    expect(page.get_by_role("heading", level=1)).to_contain_text(HEADINGS[view])
    page.wait_for_timeout(300)
    assert checks.overflowing(page) == []
    assert page.locator(".crumbs ol").evaluate("list => list.scrollWidth - list.clientWidth") == 0


def test_the_tree_of_sessions(open_page: OpenPage, sessions: Sessions) -> None:
    page = open_page()
    tree = page.get_by_role("treegrid", name="Sessions")
    rows = tree.get_by_role("row")
    parent = rows.filter(has=page.get_by_role("link", name="Claude Code broken", exact=True))
    child = rows.filter(has=page.get_by_role("link", name="broken/helper-1"))
    expect(parent).to_have_attribute("aria-expanded", "true")
    expect(child).to_have_attribute("aria-level", "2")
    expect(child).to_contain_text("sub-agent")
    expect(parent).to_contain_text("✕ 1")
    page.get_by_role("button", name="Fold 1 sub-session").click()
    expect(child).to_have_count(0)
    expect(tree.get_by_role("columnheader", name="Last")).to_have_attribute("aria-sort", "descending")


def test_search_and_filters_are_in_the_address(open_page: OpenPage, sessions: Sessions) -> None:
    page = open_page()
    rows = page.get_by_role("treegrid").get_by_role("rowheader")
    expect(rows.first).to_be_visible()
    page.keyboard.press("/")
    page.keyboard.type("host")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("hostile")
    assert "q=host" in page.url
    again = open_page("#" + page.url.partition("#")[2])
    expect(again.get_by_role("treegrid").get_by_role("rowheader")).to_have_count(1)
    again.get_by_role("searchbox").fill("nothing has this name")
    expect(again.get_by_text("No session matches the filters.")).to_be_visible()
    again.get_by_role("button", name="Show all sessions").click()
    again.get_by_label("with breaks").check()
    expect(again.get_by_role("treegrid").get_by_role("rowheader").first).to_contain_text("broken")


def test_all_of_it_by_keyboard(open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    page = open_page("#/sessions?q=broken")
    expect(page.get_by_role("treegrid").get_by_role("rowheader").first).to_be_visible()
    page.keyboard.press("j")
    chosen = page.locator("[aria-selected=true]")
    expect(chosen).to_have_count(1)
    page.wait_for_function(
        "document.activeElement.closest('[role=row]')?.getAttribute('aria-selected') === 'true'"
    )
    page.goto(page.url.partition("#")[0] + f"#/sessions/{sessions['broken']}")
    expect(page.get_by_role("treegrid", name="Turns")).to_be_visible()
    page.keyboard.press("b")
    expect(page.locator("[aria-selected=true]")).to_contain_text("date_in_system")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="What the model wrote")).to_be_visible()
    page.keyboard.press("p")
    expect(page.get_by_role("heading", name="Rendered prompt")).to_be_visible()
    expect(page.get_by_text("The prompt broke here").first).to_be_visible()
    page.keyboard.press("b")
    page.wait_for_function("document.activeElement.textContent.includes('The prompt broke here')")
    page.keyboard.press("r")
    expect(page.get_by_role("region", name="Raw request")).to_contain_text('"model": "scripted-qwen3"')
    page.keyboard.press("[")
    expect(page.get_by_role("heading", level=1)).to_contain_text("Turn 2")
    page.keyboard.press("?")
    help = page.get_by_role("dialog", name="Keys")
    expect(help).to_be_visible()
    page.keyboard.press("Escape")
    expect(help).to_have_count(0)
    page.keyboard.press("Escape")
    expect(page.get_by_role("treegrid", name="Turns")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("treegrid", name="Sessions")).to_be_visible()


def test_the_focus_can_be_seen_and_reaches_the_list(open_page: OpenPage, sessions: Sessions) -> None:
    page = open_page()
    expect(page.get_by_role("treegrid").get_by_role("rowheader").first).to_be_visible()
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "document.activeElement.closest('[role=row]') ? 'row' : document.activeElement.tagName"
            )
        )
        outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or page.evaluate("document.activeElement === document.body")
    assert {"row", "INPUT", "SELECT", "BUTTON"} <= reached


def test_a_break_is_explained(open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    session = sessions["broken"]
    broken = turns(server, session)[2]
    lost = f"{broken['break']['lost_tokens']:,}"
    page = open_page(f"#/sessions/{session}")
    cache = page.get_by_role("region", name="Where the cache went")
    expect(cache).to_contain_text("1 break: the system prompt contains a date or a time that changed")
    expect(cache).to_contain_text(f"{lost} tokens")
    expect(cache).to_contain_text("Cure: Let the harness put it into the last message")
    cache.get_by_role("button", name="turn 3").click()
    aside = page.get_by_role("complementary", name="Turn 3")
    expect(aside).to_contain_text("the prompt broke")
    aside.get_by_role("link", name="Prompt").click()
    why = page.get_by_role("region", name="Why the prompt broke")
    expect(why).to_contain_text("message 0 (system)")
    expect(why).to_contain_text(f"{lost} tokens read again")
    expect(why).to_contain_text('The first token that differs was "1" (id 16) and is now "2" (id 17)')
    expect(why.locator("del")).to_have_text("1")
    expect(why.locator("ins")).to_have_text("2")
    prompt = page.get_by_role("group", name="Text of the prompt")
    expect(prompt.locator(".ink-rerendered").first).to_be_visible()
    before = page.evaluate(
        "[...document.querySelector('.break-mark').parentElement.children]"
        ".map((e) => e.matches('.break-mark') ? '\\u0001' : e.matches('.message-mark') ? '' : e.textContent)"
        ".join('').split('\\u0001')[0]"
    )
    assert before.endswith("Today's date: 2026-11-2"), before[-60:]
    states = page.get_by_role("list", name="Colours of the prompt")
    expect(states).to_contain_text("re-rendered")
    expect(states).to_contain_text("new")


def test_replayed_tokens_are_distinguished(open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    session = sessions["good"]
    last = turns(server, session)[-1]
    page = open_page(f"#/sessions/{session}/turns/{last['id']}/prompt")
    replayed = page.locator(".prompt .ink-replayed")
    expect(replayed.first).to_contain_text("First I list the files.")
    assert replayed.count() >= 8
    expect(page.locator(".prompt .ink-rerendered")).to_have_count(0)
    expect(page.get_by_role("region", name="Cache of this prompt")).to_contain_text(
        f"{last['tokens']['cached']:,}"
    )
    open_good = open_page(f"#/sessions/{session}")
    expect(open_good.get_by_text("Every prompt continued the one before.")).to_be_visible()


def test_tokens_beside_the_events(open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    session = sessions["good"]
    turn = turns(server, session)[1]
    page = open_page(f"#/sessions/{session}/turns/{turn['id']}")
    written = page.get_by_role("group", name="Tokens of the turn")
    expect(written).to_contain_text("I read colorsys.py whole before I change it")
    wire = page.get_by_role("table", name="Events")
    expect(wire).to_contain_text("message_start")
    assert int(wire.get_attribute("aria-rowcount") or 0) == len(
        traffic.api(server, f"turns/{turn['id']}")["wire"]
    )
    for _ in range(6):
        page.keyboard.press("j")
    expect(page.locator(".token.is-lit").first).to_be_visible()
    expect(page.locator(".event-detail pre")).to_contain_text("thinking_delta")
    call = page.get_by_role("list", name="Tool calls")
    expect(call).to_contain_text("Read")
    expect(call).to_contain_text(re.compile(r"dispatched at \d+ ms, ran \d"))


def test_the_end_of_a_turn_is_in_its_time(open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    session = sessions["good"]
    turn = turns(server, session)[-1]

    def end_late(route: Any) -> None:
        """An answer whose body took long to make, and to send, after its last token."""
        answer = route.fetch()
        found = answer.json()
        found["turn"]["times"]["total_ms"] *= 9
        route.fulfill(response=answer, json=found)

    page = open_page()
    page.route("**/inspect/api/turns/*", end_late)
    page.evaluate("address => { location.hash = address }", f"#/sessions/{session}/turns/{turn['id']}")
    expect(page.locator(".turn-end")).to_be_attached()
    assert checks.overflowing(page) == []


def test_a_request_that_was_sent_again_is_folded(open_page: OpenPage, server: Server) -> None:
    traffic.repeated_request(server, "repeated")
    page = open_page(f"#/sessions/{traffic.session_id(server, 'repeated')}")
    rows = page.get_by_role("treegrid", name="Turns").get_by_role("rowheader")
    expect(rows).to_have_count(1)
    page.get_by_role("button", name="Unfold 1 retry").click()
    expect(rows).to_have_count(2)
    expect(rows.nth(1)).to_contain_text("retry")


def test_log_probabilities_are_a_shade(open_page: OpenPage, server: Server) -> None:
    traffic.turn_with_logprobs(server, "shaded")
    session = traffic.session_id(server, "shaded")
    page = open_page(f"#/sessions/{session}/turns/{turns(server, session)[0]['id']}")
    switch = page.get_by_label("shade by log-probability")
    expect(switch).not_to_be_checked()
    expect(page.locator(".token[class*=shade-]")).to_have_count(0)
    page.keyboard.press("s")
    expect(switch).to_be_checked()
    expect(page.locator(".token[class*=shade-]").first).to_contain_text("The")


def test_two_turns_side_by_side(open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    page = open_page(f"#/sessions/{sessions['broken']}")
    expect(page.get_by_role("treegrid", name="Turns")).to_be_visible()
    for key in ("j", "x"):
        page.keyboard.press(key)
    expect(page.get_by_text("Comparing turn 1.")).to_be_visible()
    for key in ("b", "x"):
        page.keyboard.press(key)
    expect(page.get_by_role("heading", level=1)).to_have_text("Difference")
    messages = page.get_by_role("region", name="Messages")
    expect(messages.locator("del").first).to_have_text("21")
    expect(messages.locator("ins").first).to_have_text("22")
    expect(page.get_by_role("region", name="Tools")).to_contain_text("2 tools are the same")


def test_texts_are_never_markup(open_page: OpenPage, server: Server, sessions: Sessions) -> None:
    session = sessions["hostile"]
    first = turns(server, session)[0]
    for address in ("", f"/turns/{first['id']}", f"/turns/{first['id']}/prompt"):
        page = open_page(f"#/sessions/{session}{address}")
        expect(page.get_by_role("heading", level=1)).to_be_visible()
        if address:
            expect(page.locator("main")).to_contain_text("<img src=x onerror=alert(1)>")
        if address.endswith("prompt"):
            page.keyboard.press("r")
            expect(page.get_by_role("region", name="Raw request")).to_contain_text("</script><img src=x")
        assert page.evaluate("[document.scripts.length, document.images.length]") == [1, 0]
        assert "taken" not in page.title()


@pytest.mark.parametrize("texts", [True, False], ids=["with texts", "without texts"])
@pytest.mark.parametrize("name", ["broken", "hostile"])
def test_an_exported_file_opens_alone(
    name: str, texts: bool, open_page: OpenPage, sessions: Sessions, tmp_path: Path
) -> None:
    page = open_page(f"#/sessions/{sessions[name]}")
    page.get_by_text("Export", exact=True).click()
    with page.expect_download() as download:
        page.get_by_role("button", name="With texts" if texts else "Without texts").click()
    file = tmp_path / "session.html"
    download.value.save_as(file)
    source = file.read_text(encoding="utf-8")
    assert ("look after the modules" in source.lower()) == (texts and name == "broken")
    asked: list[str] = []
    alone = open_page("", at=file.as_uri(), offline=True)
    alone.on("request", lambda request: asked.append(request.url))
    expect(alone.get_by_role("treegrid", name="Turns")).to_be_visible()
    expect(alone.get_by_role("banner")).to_contain_text("exported")
    alone.keyboard.press("b" if name == "broken" else "j")
    alone.keyboard.press("p")
    expect(alone.get_by_role("heading", name="Rendered prompt")).to_be_visible()
    if name == "broken":
        expect(alone.get_by_role("region", name="Why the prompt broke")).to_contain_text(
            "a date or a time that changed"
        )
    if texts:
        marks = ".break-mark" if name == "broken" else ".prompt"
        expect(alone.locator(marks)).to_be_visible()
    else:
        expect(alone.locator("main")).to_contain_text("Texts are not kept")
    alone.keyboard.press("p")
    expect(alone.get_by_role("heading", name="What the model wrote")).to_be_visible()
    assert [url for url in asked if not url.startswith("file:")] == []


def test_without_texts_and_with_a_key(
    open_page: OpenPage, start_server: Callable[[tuple[str, ...]], Server]
) -> None:
    server = start_server(("--inspect", "--api-key", "open-sesame"))
    page = open_page(at=f"{server.url}/inspect", expected="401")
    expect(page.get_by_text("This server wants an API key.")).to_be_visible()
    expect(page.get_by_label("API key")).to_be_focused()
    expect(page.get_by_role("alert")).to_have_count(0)
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("alert")).to_have_text("It refuses the key that was given.")
    page.get_by_label("API key").fill("open-sesame")
    page.get_by_role("button", name="Open").click()
    expect(page.get_by_text("No session yet.")).to_be_visible()
    agent = traffic.Agent(server, "quiet", key="open-sesame")
    agent.ask("A secret question", traffic.answer("A secret answer"))
    agent.close()
    page.get_by_role("link", name="Claude Code quiet").click()
    expect(page.get_by_role("treegrid", name="Turns")).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Start the server with --inspect --inspect-content")).to_be_visible()
    expect(page.get_by_role("region", name="What the model wrote").get_by_role("row")).not_to_have_count(0)
    assert "secret" not in page.content()
    direct = open_page("#key=open-sesame&to=/sessions", at=f"{server.url}/inspect")
    expect(direct.get_by_role("link", name="Claude Code quiet")).to_be_visible()
    assert "open-sesame" not in direct.url


def test_what_does_not_exist_is_reported_in_words(open_page: OpenPage) -> None:
    page = open_page("#/sessions/s0000000000000000", expected="404")
    expect(page.get_by_role("alert")).to_contain_text("s0000000000000000")
    page = open_page("#/nowhere")
    expect(page.get_by_text("There is nothing at this address.")).to_be_visible()
