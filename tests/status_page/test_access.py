"""Access to the page's figures and to cancelling, and the headers that browsers get."""

import asyncio
import socket

import pytest
from starlette.datastructures import Headers

from penstock.clients.gateway.errors import GatewayError
from penstock.clients.status_page.browser import POLICY, check_same_origin, cookie_names
from penstock.clients.status_page.sessions import IDLE_S, MAX_LIFE_S, MAX_SESSIONS, OperatorSessions

OPERATOR, TENANT = "o" * 40, "t" * 40
REQUEST = {"request_id": "R" * 26}


def code(response):
    return response.status_code, response.json()["error"]["code"]


async def test_without_keys_this_machine_sees_the_status(start_page):
    page = await start_page()
    response = await page.status()
    assert response.status_code == 200
    assert response.json()["stats"]["state"] == "serving"
    assert response.json()["has_session"] is False


async def test_every_response_has_the_policy(start_page):
    page = await start_page(has_keys=True)
    for path, status in (("/", 200), ("/page.js", 200), ("/page.css", 200), ("/api/status", 401), ("/no", 404)):
        response = await page.http.get(path)
        assert response.status_code == status, path
        assert response.headers["content-security-policy"] == POLICY
        assert response.headers["x-frame-options"] == "DENY"
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["referrer-policy"] == "no-referrer"
        assert response.headers["cache-control"] == "no-store"
    assert "unsafe" not in POLICY
    assert (await page.http.delete("/")).headers["x-frame-options"] == "DENY"


async def test_a_key_that_may_administer_opens_a_session_and_stays_out_of_the_browser(start_page, caplog):
    page = await start_page(has_keys=True)
    assert code(await page.status()) == (401, "login_required")
    assert code(await page.log_in("wrong")) == (401, "invalid_key")
    assert code(await page.log_in(TENANT)) == (403, "admin_denied")
    assert code(await page.status()) == (401, "login_required")
    response = await page.log_in()
    assert response.status_code == 200
    cookie = response.headers["set-cookie"]
    assert cookie.startswith(f"penstock-status-{page.http.base_url.port}=")
    assert {"httponly", "samesite=strict", "path=/"} <= {part.strip().lower() for part in cookie.split(";")}
    assert "secure" not in cookie.lower()
    assert "expires" not in cookie.lower()
    status = await page.status()
    assert status.json()["has_session"] is True
    assert OPERATOR not in cookie + status.text + str(status.headers) + caplog.text


async def test_over_https_the_cookie_is_secure_and_of_this_host_alone(start_page):
    page = await start_page(has_keys=True)
    host = f"127.0.0.1:{page.http.base_url.port}"
    cookie = (await page.log_in(origin=f"https://{host}")).headers["set-cookie"]
    assert cookie.startswith(f"__Host-penstock-status-{page.http.base_url.port}=")
    assert "Secure" in cookie
    session = cookie.partition(";")[0]
    assert (await page.http.get("/api/status", headers={"cookie": session})).status_code == 200


async def test_a_revoked_key_ends_its_session_with_the_next_call(start_page):
    page = await start_page(has_keys=True)
    await page.log_in()
    token = await page.token()
    page.keys.keep(TENANT)
    assert code(await page.post("/api/cancel", REQUEST, x_csrf_token=token)) == (401, "invalid_key")
    page.keys.keep(OPERATOR, TENANT)
    assert code(await page.status()) == (401, "login_required")


async def test_after_a_logout_the_cookie_is_worth_nothing(start_page):
    page = await start_page(has_keys=True)
    await page.log_in()
    cookies = dict(page.http.cookies)
    assert (await page.post("/api/logout", {}, x_csrf_token=await page.token())).status_code == 200
    page.http.cookies.update(cookies)
    assert code(await page.status()) == (401, "login_required")


FORGED = [
    ({"x_csrf_token": ""}, "invalid_csrf_token"),
    ({"x_csrf_token": "a" * 43}, "invalid_csrf_token"),
    ({"origin": ""}, "cross_origin"),
    ({"origin": "null"}, "cross_origin"),
    ({"origin": "http://127.0.0.1:1"}, "cross_origin"),
    ({"origin": "https://evil.example"}, "cross_origin"),
    ({"sec_fetch_site": "cross-site"}, "cross_origin"),
    ({"sec_fetch_site": "same-site"}, "cross_origin"),
]


@pytest.mark.parametrize("has_keys", [True, False])
async def test_what_another_site_sends_cancels_nothing(start_page, has_keys):
    page = await start_page(has_keys)
    if has_keys:
        await page.log_in()
    live, token = await page.start(), await page.token()
    body = {"request_id": live.request_id}
    for headers, refusal in FORGED:
        for path, sent in (("/api/cancel", body), ("/api/logout", {})):
            response = await page.post(path, sent, **({"x_csrf_token": token} | headers))
            assert code(response) == (403, refusal), (path, headers)
    assert [each["request_id"] for each in (await page.status()).json()["requests"]] == [live.request_id]
    assert (await page.post("/api/cancel", body, x_csrf_token=token)).json() == {"was_live": True}


async def test_the_token_of_one_session_is_none_in_another(start_page):
    page = await start_page(has_keys=True)
    await page.log_in()
    first = await page.token()
    page.http.cookies.clear()
    await page.log_in()
    assert first != await page.token()
    assert code(await page.post("/api/cancel", REQUEST, x_csrf_token=first)) == (403, "invalid_csrf_token")


async def test_a_login_from_another_site_is_refused(start_page):
    page = await start_page(has_keys=True)
    assert code(await page.log_in(origin="https://evil.example")) == (403, "cross_origin")
    form = await page.http.post("/api/login", data={"key": OPERATOR}, headers={"origin": page.origin})
    assert form.status_code == 415


async def test_a_foreign_host_is_refused_where_there_are_no_keys(start_page):
    foreign = {"host": "rebound.example"}
    open_page, keyed = await start_page(), await start_page(has_keys=True)
    assert code(await open_page.http.get("/api/status", headers=foreign)) == (421, "invalid_host")
    sent = foreign | {"origin": "http://rebound.example"}
    assert code(await open_page.http.post("/api/cancel", json=REQUEST, headers=sent)) == (421, "invalid_host")
    assert code(await keyed.http.get("/api/status", headers=foreign)) == (401, "login_required")


async def test_a_page_that_other_machines_reach_serves_only_with_keys(start_page):
    page, keyed = await start_page(is_exposed=True), await start_page(has_keys=True, is_exposed=True)
    for response in (await page.status(), await page.log_in(), await page.post("/api/cancel", REQUEST)):
        assert code(response) == (403, "exposed")
    await keyed.log_in()
    assert (await keyed.status()).status_code == 200


async def test_a_body_has_a_limit_of_size_and_of_time(start_page):
    page = await start_page(body_timeout_s=0.05)
    assert (await page.log_in("k" * (17 << 10))).status_code == 413
    with socket.create_connection(("127.0.0.1", page.http.base_url.port)) as slow:
        head = f"POST /api/login HTTP/1.1\r\nhost: 127.0.0.1:{page.http.base_url.port}\r\norigin: {page.origin}\r\n"
        slow.sendall(f"{head}content-type: application/json\r\ncontent-length: 9\r\n\r\n{{".encode())
        answer = await asyncio.to_thread(slow.recv, 1 << 16)
    assert answer.startswith(b"HTTP/1.1 408 ")


async def test_a_body_that_is_no_login_is_refused(start_page):
    page = await start_page()
    bodies: list[object] = [{}, {"key": ""}, {"key": "two words"}, {"key": 1}, {"key": "k", "more": 1}, [], "k"]
    for body in bodies:
        assert (await page.post("/api/login", body)).status_code == 400, body


@pytest.mark.parametrize(
    ("origin", "host", "is_same"),
    [
        ("http://a.example", "a.example", True),
        ("http://a.example", "a.example:80", True),
        ("https://a.example", "A.example:443", True),
        ("https://a.example", "a.example:80", False),
        ("http://[::1]:8001", "[::1]:8001", True),
        ("http://a.example:8001", "a.example", False),
        ("http://a.example.evil", "a.example", False),
        ("null", "null", False),
        ("http://", "", False),
        ("http://a:b", "a:b", False),
        ("file://a", "a", False),
    ],
)
def test_origins(origin, host, is_same):
    headers = Headers({"origin": origin, "host": host})
    if is_same:
        assert check_same_origin(headers) == origin
    else:
        with pytest.raises(GatewayError, match="does not come from this page"):
            check_same_origin(headers)


def test_each_port_has_its_own_cookie():
    assert cookie_names("localhost:8001") == ("__Host-penstock-status-8001", "penstock-status-8001")
    assert cookie_names("ops.example.com") == ("__Host-penstock-status", "penstock-status")
    assert cookie_names("[::1]") == ("__Host-penstock-status", "penstock-status")
    assert cookie_names("a:1; x=2") == ("__Host-penstock-status", "penstock-status")


def test_a_session_ends_when_it_is_idle_and_when_it_is_old():
    now = 0.0
    sessions = OperatorSessions(lambda: now)
    idle, used = sessions.open("a"), sessions.open("b")
    while now < MAX_LIFE_S - IDLE_S / 2:
        now += IDLE_S / 2
        assert (found := sessions.find(used)) is not None
        assert found.key == "b"
    assert sessions.find(idle) is None
    now += IDLE_S / 2
    assert sessions.find(used) is None
    assert sessions.find("") is None


def test_the_session_that_was_unused_for_longest_gives_way():
    sessions = OperatorSessions()
    first, second = sessions.open("a"), sessions.open("b")
    for number in range(MAX_SESSIONS - 2):
        sessions.open(str(number))
    assert sessions.find(first) is not None
    sessions.open("one more")
    assert sessions.find(second) is None
    assert sessions.find(first) is not None
