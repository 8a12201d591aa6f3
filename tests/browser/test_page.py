"""The page in Chromium, against a real server: what a person sees and does."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter

import httpx
import pytest

from tenure.serve.auth import Keys
from tests.serve.live import serving

pytestmark = pytest.mark.browser

SCREENSHOTS = os.environ.get("TENURE_SCREENSHOTS")
"""A folder for pictures of what the tests saw."""

MARKUP = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def chromium():
    found = os.environ.get("TENURE_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        why = "no Chromium: install Debian's package chromium, or name one in TENURE_CHROMIUM"
        pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        # Without the sandbox, which root cannot have; the pages are our own.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def live():
    with serving() as live:
        yield live


@pytest.fixture(scope="module")
def session(live):
    """The id of an agent's session far past its budget, with marks and a plan."""
    long = "INFO shard check passed and the next shard is checked in its turn. " * 12
    messages = [
        {"role": "system", "content": "You are a helpful assistant.", "pin": "hard", "span": "rules"},
        {"role": "user", "content": "Note: the limit is 48.", "span": "limits", "step": "read"},
        {"role": "user", "content": long, "region": "retrieved", "span": "a/b c?#"},
        {"role": "user", "content": f"{MARKUP} \u202egnirts", "span": MARKUP},
        {"role": "user", "content": "What is the limit?", "step": "answer", "reads": ["limits"]},
    ]
    reply = ask(live, messages)
    return reply["usage"]["tenure"]["session_id"], messages, reply


def ask(live, messages, **fields):
    body = {"model": "tiny", "messages": messages, "max_tokens": 8, **fields}
    reply = httpx.post(f"{live.url}/v1/chat/completions", json=body, timeout=60)
    assert reply.status_code == 200, reply.text
    return reply.json()


@contextmanager
def opened(chromium, live, path="", *, name=None, **options):
    """A page that must neither complain nor ask anyone but its server."""
    options.setdefault("viewport", {"width": 1280, "height": 900})
    context = chromium.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(10_000)
    complaints: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: complaints.append(dialog.message))
    page.on(
        "console",
        lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None,
    )
    page.on(
        "request",
        lambda request: None if request.url.startswith(live.url) else complaints.append(request.url),
    )
    page.goto(f"{live.url}/{path}")
    yield page
    if SCREENSHOTS and name:
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png", full_page=True)
    context.close()
    assert complaints == []


def tile(page, name):
    return page.locator(".tile", has_text=name).locator(".big")


def pick(page, span):
    """Walk over the spans with the keyboard until one is picked."""
    canvas = page.get_by_role("slider", name="Spans of the session")
    canvas.focus()
    page.keyboard.press("Home")
    for _ in range(50):
        if (canvas.get_attribute("aria-valuetext") or "").startswith(f"{span}, "):
            return
        page.keyboard.press("ArrowRight")
    pytest.fail(f"{span!r} was not reached")


def test_a_session_is_shown_and_follows_what_happens(chromium, live, session):
    from playwright.sync_api import expect

    name, messages, reply = session
    with opened(chromium, live, name="session") as page:
        page.get_by_role("heading", name=name).wait_for()
        assert page.get_by_role("status").first.inner_text() == "live"
        view = httpx.get(f"{live.url}/v1/sessions/{name}/memory").json()
        assert tile(page, "Tokens so far").inner_text() == f"{view['tokens']:,}"
        assert tile(page, "In the cache").inner_text() == f"{view['resident']:,} of {view['budget']:,}"
        assert page.locator("#lost").inner_text().startswith("budget")
        assert page.locator("#plan li[data-state=done]").count() >= 1
        answer = {"role": "assistant", "content": reply["choices"][0]["message"]["content"]}
        messages += [answer, {"role": "user", "content": "And what else?", "span": "more"}]
        session[2].update(ask(live, messages))
        grown = httpx.get(f"{live.url}/v1/sessions/{name}/memory").json()["tokens"]
        assert grown > view["tokens"]
        expect(tile(page, "Tokens so far")).to_have_text(f"{grown:,}", timeout=10_000)
        assert "read or written" in page.locator("#log").inner_text()


def test_the_keyboard_reaches_every_span_and_its_text(chromium, live, session):
    with opened(chromium, live, f"#{session[0]}", name="picked") as page:
        page.get_by_role("heading", name=session[0]).wait_for()
        pick(page, "limits")
        page.get_by_role("heading", name="limits").wait_for()
        page.get_by_text("Note: the limit is 48.").wait_for()
        said = page.locator("#detail").inner_text()
        assert "Resident" in said
        assert "Rotary positions" in said
        page.keyboard.press("+")
        page.locator("#overview").wait_for(state="visible")
        page.keyboard.press("0")
        page.locator("#overview").wait_for(state="hidden")
        page.keyboard.press("Escape")
        page.locator("#detail").wait_for(state="hidden")
        # From the top, Tab comes by everything that can be used.
        page.reload()
        page.get_by_role("heading", name=session[0]).wait_for()
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        seen = set()
        for _ in range(40):
            page.keyboard.press("Tab")
            seen.add(
                page.evaluate("(document.activeElement.id || document.activeElement.textContent).trim()")
            )
        assert {"theme", "in", "canvas", "Spans as a table", "log"} <= seen


def test_texts_of_users_stay_texts(chromium, live, session):
    with opened(chromium, live, f"#{session[0]}", name="markup") as page:
        page.get_by_role("heading", name=session[0]).wait_for()
        pick(page, MARKUP)
        page.locator("#detail pre").wait_for()
        assert MARKUP in page.locator("#detail-title").inner_text()
        assert MARKUP in page.locator("#detail pre").inner_text()
        assert "\u202e" not in page.locator("#detail pre").inner_text()
        page.get_by_text("Spans as a table").click()
        page.get_by_role("button", name=MARKUP).wait_for()
        page.get_by_role("button", name="a/b c?#").click()
        page.locator("#detail pre", has_text="INFO shard check").wait_for()
        assert page.locator("img").count() == 0
        assert "owned" not in page.title()


def test_a_phone_shows_all_of_it(chromium, live, session):
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    with opened(chromium, live, f"#{session[0]}", name="phone", **phone) as page:
        page.get_by_role("heading", name=session[0]).wait_for()
        assert page.evaluate("document.scrollingElement.scrollWidth <= window.innerWidth")
        page.locator("#canvas").scroll_into_view_if_needed()
        page.locator("#canvas").tap(position={"x": 160, "y": 60})
        page.locator("#detail").wait_for(state="visible")
        assert page.evaluate("document.scrollingElement.scrollWidth <= window.innerWidth")
        small = page.evaluate(
            """[...document.querySelectorAll("button")].filter((one) => one.checkVisibility())
               .map((one) => one.getBoundingClientRect()).filter((box) => box.height < 26 || box.width < 24).length"""
        )
        assert small == 0


def test_colours_follow_the_system_and_the_choice(chromium, live, session):
    back = "getComputedStyle(document.body).backgroundColor"
    with opened(chromium, live, color_scheme="dark", name="dark") as page:
        dark = page.evaluate(back)
        page.emulate_media(color_scheme="light")
        light = page.evaluate(back)
        assert dark != light
        button = page.locator("#theme")
        button.click()
        assert button.get_attribute("aria-label") == "Colours: light"
        button.click()
        assert page.evaluate(back) == dark
        page.reload()
        assert page.evaluate(back) == dark
        page.locator("#theme").click()
        assert page.evaluate(back) == light


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(chromium, live, session, scheme):
    from axe_playwright_python.sync_playwright import Axe

    with opened(chromium, live, f"#{session[0]}", color_scheme=scheme, name=f"axe-{scheme}") as page:
        page.get_by_role("heading", name=session[0]).wait_for()
        pick(page, "limits")
        page.locator("#detail pre").wait_for()
        page.get_by_text("Spans as a table").click()
        found = Axe().run(page).response["violations"]
        told = [
            (
                one["id"],
                one["help"],
                [node["target"] for node in one["nodes"]][:3],
                one["nodes"][0]["any"][:1],
            )
            for one in found
        ]
        assert told == []


def test_a_server_that_goes_away_is_told_and_comes_back(chromium, live, session):
    context = chromium.new_context()
    page = context.new_page()
    page.goto(live.url)
    page.locator("#link[data-state=live]").wait_for()
    context.set_offline(True)
    page.locator("#link[data-state=lost]").wait_for()
    assert page.locator("#link").inner_text() == "no connection"
    assert page.get_by_role("heading", name=session[0]).is_visible()  # what is known stays
    context.set_offline(False)
    page.locator("#link[data-state=live]").wait_for()
    context.close()


def test_five_thousand_spans_stay_usable(chromium, live):
    name = ask(live, [{"role": "user", "content": "Many spans."}])["usage"]["tenure"]["session_id"]

    def fill():
        session = live.state.store.get("", name).session
        session.append({"role": "user", "content": "Here they come."})
        for number in range(5000):
            session.queue_ids([10 + number % 300] * 3, span=f"s-{number}")
            if number % 50 == 49:
                session.engine.drain([session])

    live.state.worker.call(fill).result(120)
    with opened(chromium, live, f"#{name}", name="many") as page:
        page.get_by_role("heading", name=name).wait_for()
        assert re.match(r"5,00\d spans", page.locator(".tile .sub").first.inner_text())
        began = perf_counter()
        page.locator("#canvas").focus()
        for _ in range(20):
            page.keyboard.press("ArrowRight")
        assert (perf_counter() - began) / 20 < 0.2, "a key press is answered at once"
        assert "spans," in page.locator("#canvas").get_attribute("aria-valuetext")
        for _ in range(6):
            page.get_by_role("button", name="Zoom in").click()
        page.locator("#overview").wait_for(state="visible")
        page.get_by_text("Spans as a table").click()
        page.get_by_role("button", name="s-", exact=False).first.wait_for()
        page.locator("#rows button").first.filter(has_not_text="…").wait_for()
        drawn = page.evaluate("document.querySelectorAll('*').length")
        assert drawn < 1500


def test_keys_are_asked_for_and_kept_apart(chromium, tmp_path):
    path = tmp_path / "keys.json"
    keys = {name: Keys(path).add(name) for name in ("alice", "bert")}
    with serving(keys=path) as live:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "Mine."}], "max_tokens": 2}
        head = {"Authorization": f"Bearer {keys['alice']}"}
        reply = httpx.post(f"{live.url}/v1/chat/completions", json=body, headers=head, timeout=30)
        name = reply.json()["usage"]["tenure"]["session_id"]
        context = chromium.new_context()
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.goto(live.url)
        field = page.get_by_label("Key", exact=True)
        field.wait_for()
        field.fill("tenure-wrong")
        field.press("Enter")
        page.get_by_text("This key is not accepted.").wait_for()
        field.fill(keys["alice"])
        page.get_by_role("button", name="Use").click()
        page.get_by_role("heading", name=name).wait_for()
        assert page.locator("#model").inner_text() == "tiny"
        page.reload()
        page.get_by_role("heading", name=name).wait_for()  # the tab keeps the key
        assert keys["alice"] not in page.content()
        page.get_by_role("button", name="Key").click()
        field.fill(keys["bert"])
        field.press("Enter")
        page.get_by_role("heading", name="No session yet").wait_for()
        assert name not in page.content()
        page.get_by_role("button", name="Key").click()
        page.get_by_role("button", name="Forget").click()
        page.get_by_role("heading", name="API key").wait_for()
        assert page.evaluate("sessionStorage.length") == 0
        context.close()


def test_a_parked_session_can_be_brought_back(chromium, live, session):
    assert httpx.post(f"{live.url}/v1/sessions/{session[0]}/park").status_code == 200
    context = chromium.new_context()
    page = context.new_page()
    page.set_default_timeout(10_000)
    page.goto(f"{live.url}/#{session[0]}")
    page.get_by_text("The session is parked").wait_for()
    assert "parked" in page.locator("#sessions").inner_text()
    page.get_by_role("button", name="Bring it back").click()
    page.locator(".tile").first.wait_for()
    assert page.locator("#canvas").is_visible()
    context.close()


def test_without_a_session_the_page_says_how_to_begin(chromium):
    with serving() as live, opened(chromium, live, name="empty") as page:
        page.get_by_role("heading", name="No session yet").wait_for()
        command = page.locator("#empty-code").inner_text()
        assert f"{live.url}/v1/chat/completions" in command
        assert '"model": "tiny"' in command
