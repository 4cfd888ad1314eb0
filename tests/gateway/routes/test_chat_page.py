"""The chat page: what it may do by its policy, and at work in a browser, on the demo model."""

import base64
import hashlib
import json
import os
import re
import shutil
from importlib.resources import files
from pathlib import Path

import httpx
import pytest

from penstock.clients.gateway.routes.chat_page import content_security_policy

HTML = files("penstock.clients.gateway").joinpath("page.html").read_text(encoding="utf-8")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MAX_SCREENSHOT_BYTES = 200_000


def directives(policy):
    return {name: sources for name, *sources in (directive.split() for directive in policy.split(";"))}


def test_the_policy_lets_exactly_what_stands_in_the_page_run():
    policy = directives(content_security_policy(HTML))
    assert policy["default-src"] == ["'none'"]
    for kind in ("script", "style"):
        (inline,) = re.findall(rf"<{kind}>(.*?)</{kind}>", HTML, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[f"{kind}-src"] == [f"'sha256-{digest}'"]
    assert policy["connect-src"] == ["'self'"]
    assert policy["trusted-types"] == ["'none'"]
    assert not any("unsafe" in source for sources in policy.values() for source in sources)


def test_the_page_contacts_no_other_host_and_renders_no_text_as_markup():
    assert not re.findall(r"https?://", HTML)
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Storage|cookie", HTML)
    assert not re.findall(r"<[^>]+\son\w+=", HTML), "a handler in an attribute, which the policy refuses"


def test_it_is_served_with_its_policy(scripted):
    response = httpx.get(f"{scripted}/", timeout=120)
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.headers["content-security-policy"] == content_security_policy(HTML)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.text == HTML


@pytest.fixture
def complaints():
    """What the browser's console says is wrong."""
    return []


@pytest.fixture
def open_page(complaints):
    """Opens the page in headless Chromium. Without a browser the test fails: whoever runs it is to look at the page."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        pytest.fail("no Chromium here (Debian: apt-get install chromium)")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=30_000)
    with sync_playwright() as playwright:
        # A container's root, and what else has no sandbox of its own, gets none from Chromium.
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])

        def open_page(address):
            page = browser.new_page(viewport={"width": 1100, "height": 720}, color_scheme="light")
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
            page.goto(f"{address}/")
            return page

        yield open_page
        browser.close()


def figures(answer):
    """What stands below an answer, by name."""
    found = answer.locator("[data-figure]")
    return {each.get_attribute("data-figure"): each.locator("b").inner_text() for each in found.all()}


def ask(page, question):
    """Sends a question; the answer's place on the page."""
    page.get_by_label("Message").fill(question)
    page.get_by_label("Message").press("Enter")
    return page.locator("article").last


@pytest.mark.soak
def test_an_answer_streams_and_its_figures_are_those_of_the_service(start_serving, open_page, complaints, tmp_path):
    from playwright.sync_api import expect

    with start_serving() as served:
        page = open_page(served.http)
        expect(page.get_by_label("Model")).to_have_value("demo")
        page.get_by_label("System prompt").fill("You answer questions about Unix.")
        page.get_by_label("Max tokens").fill("64")
        page.get_by_label("Seed").fill("2")
        page.get_by_label("Temperature").fill("0.5")
        sent = []
        page.on("request", lambda request: sent.append(request.post_data_json))
        first = ask(page, "What is a kernel?")
        expect(first.locator("[data-figure=ended]")).to_be_visible()
        told = figures(first)
        assert int(told["output"]) <= 64
        assert told["cached"] == "0"
        # There is no rate where a browser that was busy got all at once.
        assert set(told) - {"rate"} == {"first-token", "output", "prompt", "cached", "ended"}
        assert (sent[-1]["temperature"], sent[-1]["max_tokens"], sent[-1]["seed"]) == (0.5, 64, 2)

        second = ask(page, "And what is a shell?")
        expect(second.locator("[data-figure=ended]")).to_be_visible()
        assert [message["role"] for message in sent[-1]["messages"]] == ["system", "user", "assistant", "user"]
        assert int(figures(second)["cached"]) > 0, "the conversation so far comes from the prefix cache"
        picture = Path(os.environ.get("PENSTOCK_SCREENSHOT") or tmp_path / "page.png")
        page.screenshot(path=picture)
        assert picture.stat().st_size < MAX_SCREENSHOT_BYTES
        assert complaints == []


@pytest.mark.soak
def test_an_answer_is_stopped_and_what_came_of_it_stays(demo, open_page):
    from playwright.sync_api import expect

    def go_on(route):
        route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))

    page = open_page(demo.http)
    expect(page.get_by_label("Model")).to_have_value("demo")
    page.route("**/v1/chat/completions", go_on)
    answer = ask(page, "What is a kernel?")
    expect(answer.locator("[data-figure=rate]")).to_be_visible()
    assert float(figures(answer)["rate"]) > 0
    page.get_by_role("button", name="Stop").click()
    expect(answer.locator("[data-figure=ended]")).to_contain_text("stop button")
    text = answer.locator(".text").inner_text()
    assert text
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    assert answer.locator(".text").inner_text() == text


@pytest.mark.soak
def test_what_a_model_writes_is_text(scripted, open_page, complaints):
    from playwright.sync_api import expect

    page = open_page(scripted)
    expect(page.get_by_label("Model")).to_have_value("gpt-4o")
    markup = "<b>bold</b><img src=x onerror='document.title=1'>"
    answer = ask(page, f"SAY <think>so <i>be</i> it</think>{markup}")
    expect(answer.locator("[data-figure=ended]")).to_be_visible()
    expect(answer.locator(".text")).to_have_text(markup)
    expect(answer.locator("details")).to_contain_text("so <i>be</i> it")
    assert page.locator("article img, article b:not([data-figure] b), article i").count() == 0
    assert page.title() == "penstock"
    assert complaints == []
    refused = page.evaluate("try { document.body.innerHTML = 'x'; 'written' } catch (error) { error.name }")
    assert refused == "TypeError", "the policy refuses what the page never does"


@pytest.mark.soak
def test_an_error_is_shown_and_the_question_is_restored(scripted, open_page):
    from playwright.sync_api import expect

    page = open_page(scripted)
    expect(page.get_by_label("Model")).to_have_value("gpt-4o")
    page.get_by_label("Top p").fill("0")
    answer = ask(page, "SAY hello")
    expect(answer.locator(".wrong")).to_contain_text("top_p")
    expect(page.get_by_label("Message")).to_have_value("SAY hello")
    page.get_by_label("Top p").fill("")
    answer = ask(page, "SAY hello")
    expect(answer.locator(".text")).to_have_text("hello")


@pytest.mark.soak
def test_the_key_goes_with_every_request_and_is_kept_nowhere(start_serving, open_page, tmp_path):
    from playwright.sync_api import expect

    key = "a-key-of-the-page"
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{hashlib.sha256(key.encode()).hexdigest()} people\n")
    with start_serving(f"--api-keys-file={keys}") as served:
        page = open_page(served.http)
        expect(page.get_by_role("status")).to_contain_text("API key")
        page.get_by_label("Key").fill(key)
        page.get_by_label("Key").press("Tab")
        expect(page.get_by_label("Model")).to_have_value("demo")
        page.get_by_label("Max tokens").fill("4")
        expect(ask(page, "Hello?").locator("[data-figure=ended]")).to_be_visible()
        assert page.context.storage_state() == {"cookies": [], "origins": []}
        page.reload()
        expect(page.get_by_label("Key")).to_have_value("")
