"""The status page in headless Chromium, on the demo model under load."""

import asyncio
import os
import random
import shutil
import threading
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

import pytest
from serve_process import serving, target_of
from waiting import wait_until

from penstock.clients import AsyncClient
from penstock.clients.errors import PenstockError

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
MAX_SCREENSHOT_BYTES = 200_000
MARKUP = "<b>bold</b><img src=x onerror='document.title=1'>"
KEYS = {"acme": "a" * 40, "zenith": "z" * 40, "operators": "o" * 40}
FLAGS = ["--port=0", "--admin-http-port=0", "--metrics-listen=off", "--log-level=error"]
PROMPTS = ("The kernel is", "A shell is", "What a scheduler does:", "A page of memory is")


@pytest.fixture
def complaints():
    """What the browser's console says is wrong, except for a status that a test provokes."""
    return []


@pytest.fixture
def open_page(complaints):
    """Opens the page in headless Chromium. Without a browser the test fails."""
    browser_path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser_path is None:
        pytest.fail("no Chromium here (Debian: apt-get install chromium)")
    from playwright.sync_api import expect, sync_playwright

    def note(said):
        if said.type == "error" and "Failed to load resource" not in said.text:
            complaints.append(said.text)

    expect.set_options(timeout=60_000)
    with sync_playwright() as playwright:
        # A container's root, and what else has no sandbox of its own, gets none from Chromium.
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])

        def open_page(url, width=1180, height=900):
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme="light")
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", note)
            page.goto(url)
            return page

        yield open_page
        browser.close()


@pytest.fixture
def keys_file(tmp_path):
    """The keys of two tenants and an operator."""
    path = tmp_path / "keys"
    lines = (f"sha256:{sha256(key.encode()).hexdigest()} {tenant}" for tenant, key in KEYS.items())
    path.write_text("".join(f"{line}{' admin' if line.endswith('operators') else ''}\n" for line in lines))
    return path


@contextmanager
def load(target, requests, **options):
    """Keeps requests running, for each tenant as many as ``requests`` says: another one follows each that ends."""
    rng = random.Random(1)
    loop = asyncio.new_event_loop()

    async def one(client, number, max_tokens):
        while True:
            given = {"max_tokens": max_tokens(), "client_request_id": f"job-{number}", "ignore_eos": True} | options
            with suppress(PenstockError):  # it was cancelled
                await client.complete(PROMPTS[number % len(PROMPTS)], **given)

    async def all_of(tenant, number):
        async with AsyncClient(target, api_key=KEYS.get(tenant)) as client:
            await asyncio.gather(*(one(client, each, lambda: rng.randint(100, 900)) for each in range(number)))

    async def main():
        await asyncio.gather(*(all_of(tenant, number) for tenant, number in requests.items()))

    task = loop.create_task(main())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([task])))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join()
        loop.close()


def url_of(greeting):
    (line,) = (line for line in greeting.splitlines() if line.startswith("Status page for operators: "))
    return line.rpartition(" ")[2]


def log_in(page, key=KEYS["operators"]):
    page.get_by_label("Key").fill(key)
    page.get_by_role("button", name="Log in").click()


@pytest.mark.soak
def test_an_operator_logs_in_sees_the_load_and_cancels_a_request(keys_file, open_page, complaints, tmp_path):
    from playwright.sync_api import expect

    memory = "--kv-cache-memory-bytes=49M"  # so little that requests wait and are preempted
    with (
        serving(*FLAGS, memory, "--max-num-seqs=16", f"--api-keys-file={keys_file}") as (_, greeting),
        load(target_of(greeting), {"acme": 14, "zenith": 6}),
    ):
        page = open_page(url_of(greeting))
        log_in(page, KEYS["acme"])
        expect(page.get_by_role("alert").filter(has_text="right to administer")).to_be_visible()
        log_in(page)
        expect(page.locator("#state")).to_have_text("SERVING")
        (cookie,) = page.context.cookies()
        assert (cookie["httpOnly"], cookie["sameSite"], cookie["expires"]) == (True, "Strict", -1)
        assert page.context.storage_state()["origins"] == []

        rows = page.locator("#requests tr")
        expect(rows).to_have_count(20)
        expect(page.locator("#tenants tr")).to_have_count(2)
        latency = page.locator("#windows tr").filter(has_text="between tokens, p99").locator("td").nth(1)
        expect(latency).to_contain_text("ms")
        picture = os.environ.get("PENSTOCK_SCREENSHOT")
        if picture:
            expect(page.locator("#uptime")).to_contain_text("0:01:", timeout=120_000)  # the graph has a past
        shot = Path(picture or tmp_path / "page.png")
        page.screenshot(path=shot)
        assert shot.stat().st_size < MAX_SCREENSHOT_BYTES

        wanted = rows.first.locator(".id").inner_text()
        page.get_by_label(f"Cancel {wanted}").click()
        expect(page.get_by_role("dialog")).to_contain_text(wanted)
        page.get_by_role("button", name="Cancel the request").click()
        expect(page.locator("#outcome")).to_have_text(f"{wanted} was cancelled.")
        expect(rows.filter(has_text=wanted)).to_have_count(0)

        page.get_by_role("button", name="Log out").click()
        expect(page.get_by_label("Key")).to_be_visible()
        assert complaints == []


@pytest.mark.soak
def test_many_requests_are_on_pages_and_their_names_are_text(open_page, complaints):
    from playwright.sync_api import expect

    with (
        serving(*FLAGS, "--kv-cache-memory-bytes=64M") as (_, greeting),
        load(target_of(greeting), {"default": 60}, client_request_id=MARKUP, max_tokens=1500),
    ):
        page = open_page(url_of(greeting))
        rows = page.locator("#requests tr")
        expect(rows).to_have_count(50)
        expect(rows.first).to_contain_text(MARKUP)
        assert page.locator("#requests img, #requests b").count() == 0
        page.get_by_role("button", name="Next").click()
        expect(page.locator("#page-number")).to_have_text("page 2")
        expect(rows).to_have_count(10)
        page.get_by_role("button", name="Previous").click()
        expect(rows).to_have_count(50)
        refused = page.evaluate("try { document.body.innerHTML = 'x'; 'written' } catch (error) { error.name }")
        assert refused == "TypeError", "the policy refuses what the page never does"
        assert [said for said in complaints if "TrustedHTML" not in said] == []


@pytest.mark.soak
def test_a_narrow_screen_scrolls_only_its_tables(open_page):
    from playwright.sync_api import expect

    with (
        serving(*FLAGS, "--kv-cache-memory-bytes=64M") as (_, greeting),
        load(target_of(greeting), {"default": 2}, client_request_id="x" * 64),
    ):
        page = open_page(url_of(greeting), width=360, height=700)
        expect(page.locator("#requests tr")).to_have_count(2)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.soak
def test_a_service_that_is_gone_is_seen_and_comes_back(open_page):
    from playwright.sync_api import expect

    with serving(*FLAGS, "--kv-cache-memory-bytes=64M") as (process, greeting):
        url = url_of(greeting)
        page = open_page(url)
        expect(page.locator("#state")).to_have_text("SERVING")
        process.kill()
        process.wait()
        gone = page.get_by_role("alert").filter(has_text="No status for")
        expect(gone).to_be_visible()
        expect(page).to_have_title("gone · penstock")
        port = url.rstrip("/").rpartition(":")[2]
        wait_until(lambda: not page.evaluate("fetch('page.css').then(() => true, () => false)"))
    again = [flag for flag in FLAGS if not flag.startswith("--admin-http-port")]
    with serving(*again, f"--admin-http-port={port}", "--kv-cache-memory-bytes=64M"):
        expect(gone).to_be_hidden()
        expect(page.locator("#state")).to_have_text("SERVING")
