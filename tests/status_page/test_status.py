"""What the page's API reports and does: statistics, pages of live requests, and a cancellation of the right one."""

import re
from importlib.resources import files

import pytest

import penstock.v1 as pb

FILES = {
    name: files("penstock.clients.status_page").joinpath(name).read_text(encoding="utf-8")
    for name in ("page.html", "page.css", "page.js")
}
MARKUP = "<img src=x onerror='document.title=1'>"


async def test_the_statistics_are_those_of_the_service(start_page):
    page = await start_page()
    for _ in range(3):
        await page.start()
    stats = (await page.status()).json()["stats"]
    assert stats["live_requests"] == 3
    assert [tenant["live_requests"] for tenant in stats["tenants"]] == [3]
    assert stats["last_10s"]["duration"] <= stats["last_60s"]["duration"]


async def test_each_live_request_is_on_one_page(start_page):
    page = await start_page()
    started = [(await page.start()).request_id for _ in range(5)]
    found, token = [], ""
    for size in (2, 2, 1):
        answer = (await page.status(page_size=2, page_token=token)).json()
        assert len(answer["requests"]) == size
        found += [live["request_id"] for live in answer["requests"]]
        token = answer["next_page_token"]
    assert (found, token) == (started, "")


async def test_a_page_that_is_none_is_refused(start_page):
    page = await start_page()
    queries = [{"page_size": size} for size in ("0", "201", "x", "")]
    for query in [*queries, {"page_token": "x" * 300}, {"page_token": "QUJD"}]:
        assert (await page.status(**query)).status_code == 400, query


@pytest.mark.parametrize("has_keys", [True, False])
async def test_a_cancellation_ends_the_named_request_and_no_other(start_page, has_keys):
    page = await start_page(has_keys)
    if has_keys:
        await page.log_in()
    first, second, third = [await page.start() for _ in range(3)]
    token = await page.token()
    body = {"request_id": second.request_id}
    assert (await page.post("/api/cancel", body, x_csrf_token=token)).json() == {"was_live": True}
    assert (await second.end()).reason == pb.FINISH_REASON_CANCELLED
    assert (await page.post("/api/cancel", body, x_csrf_token=token)).json() == {"was_live": False}
    live = [each["request_id"] for each in (await page.status()).json()["requests"]]
    assert live == [first.request_id, third.request_id]


async def test_what_a_caller_named_its_request_is_data(start_page):
    page = await start_page()
    await page.start(MARKUP)
    response = await page.status()
    assert response.headers["content-type"] == "application/json"
    assert [live["client_request_id"] for live in response.json()["requests"]] == [MARKUP]


async def test_a_service_that_is_gone_is_reported(start_page):
    page = await start_page()
    assert (await page.status()).status_code == 200
    await page.server.stop()
    response = await page.status()
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "service_unavailable"
    assert "does not answer" in response.json()["error"]["message"]
    assert (await page.http.get("/")).status_code == 200


async def test_the_files_are_served_as_they_are(start_page):
    page = await start_page()
    for path, name, kind in (
        ("/", "page.html", "html"),
        ("/page.css", "page.css", "css"),
        ("/page.js", "page.js", "javascript"),
    ):
        response = await page.http.get(path)
        assert response.text == FILES[name]
        assert response.headers["content-type"] == f"text/{kind}; charset=utf-8"


def test_the_page_contacts_no_other_host_and_renders_no_text_as_markup():
    script, page = FILES["page.js"], FILES["page.html"]
    assert not re.findall(r"https?://", "".join(FILES.values()))
    assert not re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Storage|cookie", script)
    assert not re.findall(r"<[^>]+\s(on\w+|style)=", page), "what the policy refuses"
    assert not re.findall(r"<script>|<style>|style\.", page + script)
    assert set(re.findall(r'(?:src|href)="([^"]+)"', page)) == {"data:,", "page.css", "page.js"}


def test_the_script_names_only_elements_that_are_there():
    named = set(re.findall(r'byId\("([\w-]+)"\)', FILES["page.js"]))
    assert named <= set(re.findall(r'id="([\w-]+)"', FILES["page.html"]))
