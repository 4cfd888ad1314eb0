"""``/docs``: Swagger UI from local files, its policy, and what it needs of the API's description."""

import base64
import hashlib
import re
import shutil
from html.parser import HTMLParser
from importlib.resources import files
from urllib.parse import urljoin

import numpy as np
import pytest

from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.models.checkpoint.classification_head import ClassificationHead
from penstock.models.checkpoint.info import HeadActivation

KEY = "a-key-of-the-page"
STATIC = files("fastapi_offline").joinpath("static")
TYPES = {
    "/docs/swagger-ui.css": "text/css; charset=utf-8",
    "/docs/swagger-ui-bundle.js": "text/javascript; charset=utf-8",
    "/openapi.json": "application/json",
}


class Page(HTMLParser):
    """Collects what a page loads, its scripts, and its elements' attributes."""

    def __init__(self, html):
        super().__init__()
        self.addresses, self.scripts, self.attributes = set(), [], set()
        self._is_script = False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self._is_script = tag == "script" and "src" not in dict(attrs)
        self.attributes |= {name for name, _ in attrs}
        self.addresses |= {value for name, value in attrs if name in ("href", "src")}

    def handle_data(self, data):
        if self._is_script:
            self.scripts.append(data)

    def handle_endtag(self, tag):
        self._is_script = False


@pytest.fixture(scope="module")
def described():
    """The API's description."""
    return create_app(GatewaySettings()).openapi()


@pytest.mark.parametrize("prefix", ["", "/llm"])
@pytest.mark.parametrize("slash", ["", "/"])
async def test_all_that_the_page_loads_is_served_below_any_prefix(gateway, prefix, slash):
    html = (await gateway.http.get(f"/docs{slash}")).text
    assert "//" not in html, "no address of another server"
    addresses = Page(html).addresses - {"data:,"}
    found = {urljoin(f"http://x{prefix}/docs{slash}", address).partition("?")[0] for address in addresses}
    assert found == {f"http://x{prefix}{path}" for path in TYPES}
    for address in addresses:
        path = urljoin(f"/docs{slash}", address)
        answer = await gateway.http.get(path)
        assert answer.status_code == 200
        name = path.partition("?")[0]
        assert answer.headers["content-type"] == TYPES[name]
        if name.startswith("/docs/"):
            assert answer.content == STATIC.joinpath(name.removeprefix("/docs/")).read_bytes()
            assert answer.headers["content-length"] == str(len(answer.content))
            assert answer.headers["cache-control"] == "public, max-age=31536000, immutable"
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
    assert not re.search(r'@import|url\((?!"?data:)', STATIC.joinpath("swagger-ui.css").read_text())


@pytest.mark.parametrize("name", ["redoc.standalone.js", "favicon.png", "../core.py", "..%2fcore.py"])
async def test_no_other_file_of_the_package_is_served(gateway, name):
    assert (await gateway.http.get(f"/docs/{name}")).status_code == 404


async def test_the_policy_lets_only_the_scripts_of_the_page_run(gateway):
    answer = await gateway.http.get("/docs")
    page = Page(answer.text)
    (script,) = page.scripts
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert answer.headers["content-security-policy"].split("; ") == [
        "default-src 'none'",
        f"script-src 'self' 'sha256-{digest}'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    assert not any(name.startswith("on") for name in page.attributes), "a handler, which the policy refuses"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_the_files_are_as_public_as_the_page(start_gateway):
    gateway = await start_gateway(allowed_hosts=AllowedHosts("127.0.0.1"))
    for path in ("/docs", *TYPES):
        assert (await gateway.http.get(path)).status_code == 200
        assert (await gateway.http.get(path, headers={"Host": "evil.example"})).status_code == 421


async def test_operations_that_require_a_key_are_described_so(start_gateway, tmp_path, load_keys, described):
    keys = tmp_path / "keys"
    keys.write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} people\n")
    gateway = await start_gateway(service={"authenticator": load_keys(keys)})
    (scheme,) = described["components"]["securitySchemes"].items()
    assert scheme[0] == "key"
    assert (scheme[1]["type"], scheme[1]["scheme"]) == ("http", "bearer")
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            answer = await gateway.http.request(method, path)
            assert operation.get("security") == ([{"key": []}, {}] if answer.status_code == 401 else None), path
    for path in ("/docs", *TYPES):
        assert (await gateway.http.get(path)).status_code == 200


def test_the_errors_of_messages_have_anthropics_format(described):
    for path, has_key in (("/v1/messages", True), ("/v1/messages/count_tokens", False)):
        responses = described["paths"][path]["post"]["responses"]
        errors = {status: each["content"]["application/json"] for status, each in responses.items() if status >= "400"}
        names = {each["schema"]["$ref"].rpartition("/")[2] for each in errors.values()}
        assert (names, "409" in errors) == ({"AnthropicErrorBody"}, has_key)


async def test_every_body_has_an_example_that_is_accepted(start_gateway, described):
    weight, bias = np.zeros((1, 8), np.float32), np.zeros(1, np.float32)
    head = ClassificationHead(weight, bias, ("relevant",), HeadActivation.SIGMOID)
    gateway = await start_gateway(service={"head": head})
    bodies = {
        path: operation["requestBody"]["content"]["application/json"]
        for path, operations in described["paths"].items()
        for operation in operations.values()
        if "requestBody" in operation
    }
    assert len(bodies) == 12
    for path, body in bodies.items():
        answer = await gateway.post(path, **body["example"])
        assert answer.status_code == 200, answer.text


def test_statuses_are_those_that_the_gateway_returns(described):
    """FastAPI describes 422, which is 400 here."""
    statuses = {status for operations in described["paths"].values() for each in operations.values()
                for status in each["responses"]}  # fmt: skip
    assert "400" in statuses
    assert "422" not in statuses
    assert "ValidationError" not in str(described)


def test_paths_start_next_to_the_description(described):
    (server,) = described["servers"]
    assert urljoin("http://x/llm/openapi.json", server["url"]) == "http://x/llm/"


@pytest.mark.soak
def test_a_request_is_tried_out_with_a_key(start_scripted, load_keys, tmp_path):
    """In headless Chromium, below a prefix: the console has no complaint, and no request goes elsewhere."""
    from playwright.sync_api import expect, sync_playwright

    browser_path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser_path is None:
        pytest.fail("no Chromium here (Debian: apt-get install chromium)")
    keys, complaints, asked = tmp_path / "keys", [], []
    keys.write_text(f"sha256:{hashlib.sha256(KEY.encode()).hexdigest()} people\n")
    with start_scripted(authenticator=load_keys(keys)) as base, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", lambda request: asked.append(request.url))
        page.route("**/llm/**", lambda route: route.continue_(url=route.request.url.replace("/llm/", "/", 1)))
        page.goto(f"{base}/llm/docs?url=https://evil.example/openapi.json&configUrl=https://evil.example/config.json")
        expect(page.locator(".opblock")).to_have_count(14, timeout=60_000)
        page.get_by_role("button", name="Authorize").first.click()
        page.locator(".auth-container input").fill(KEY)
        page.locator(".auth-container").get_by_role("button", name="Apply credentials").click()
        page.locator(".modal-ux").get_by_role("button", name="Close").first.click()
        operation = page.locator(".opblock", has=page.locator("[data-path='/v1/chat/completions']"))
        operation.locator(".opblock-summary-control").click()
        operation.get_by_role("button", name="Try it out").click()
        operation.get_by_role("button", name="Execute").click()
        answer = operation.locator(".live-responses-table .response")
        expect(answer.locator(".response-col_status")).to_contain_text("200", timeout=60_000)
        expect(answer).to_contain_text("chat.completion")
        for each in page.locator(".opblock:not(.is-open) .opblock-summary-control").all()[::-1]:
            each.click()  # from the last to the first: an open one no longer matches
        page.locator(".models .json-schema-2020-12-accordion").first.click()
        expect(page.locator(".opblock.is-open")).to_have_count(14)
        page.screenshot(path=tmp_path / "page.png")
        assert complaints == []
        assert f"{base}/llm/v1/chat/completions" in asked
        assert all(address.startswith((f"{base}/llm/", "data:")) for address in asked), asked
        assert page.context.storage_state() == {"cookies": [], "origins": []}
        browser.close()
