"""Calls from web pages of other origins."""

import pytest

from penstock.clients.gateway.origins import read_origins

COMPLETIONS = "/v1/completions"
OURS, OTHER = "https://app.example.com", "https://evil.example.com"


def preflight(origin):
    return {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization, content-type, x-stainless-os",
    }


async def test_by_default_no_page_may_call(gateway):
    response = await gateway.http.options(COMPLETIONS, headers=preflight(OURS))
    assert not [name for name in response.headers if name.startswith("access-control")]
    response = await gateway.post(COMPLETIONS, headers={"Origin": OURS}, prompt="a", max_tokens=1)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("access-control")]


async def test_pages_of_an_origin_that_is_named_may_call(start_gateway):
    gateway = await start_gateway(allowed_origins=(OURS,))
    response = await gateway.http.options(COMPLETIONS, headers=preflight(OURS))
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == OURS
    assert "POST" in response.headers["access-control-allow-methods"]
    assert "authorization" in response.headers["access-control-allow-headers"]
    assert "Origin" in response.headers["vary"]
    response = await gateway.http.options(COMPLETIONS, headers=preflight(OTHER))
    assert response.status_code == 400
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    ("path", "fields", "status"),
    [
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1}, 200),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 1, "stream": True}, 200),
        (COMPLETIONS, {"prompt": 5}, 400),
        (COMPLETIONS, {"prompt": "a" * 3000}, 413),
        ("/v1/models", {}, 405),
        ("/nothing", {}, 404),
    ],
)
async def test_every_answer_has_the_headers_errors_too(start_gateway, path, fields, status):
    gateway = await start_gateway(allowed_origins=(OURS,), max_body_bytes=2000)
    for origin, expected in ((OURS, OURS), (OTHER, None), (None, None)):
        headers = {"Origin": origin} if origin else {}
        response = await gateway.post(path, headers=headers, **fields)
        assert response.status_code == status
        assert response.headers.get("access-control-allow-origin") == expected
        assert response.headers["vary"] == "Origin"
        if expected:
            exposed = response.headers["access-control-expose-headers"]
            assert {"X-Request-Id", "X-Penstock-Resume-Ticket"} <= set(exposed.split(", "))


async def test_a_star_is_any_origin(start_gateway):
    gateway = await start_gateway(allowed_origins=("*",))
    response = await gateway.http.get("/v1/models", headers={"Origin": OTHER})
    assert response.headers["access-control-allow-origin"] == "*"


@pytest.mark.parametrize(
    ("text", "origins"),
    [
        ("*", ("*",)),
        ("https://A.example", ("https://a.example",)),
        ("https://a.example, http://localhost:3000,", ("https://a.example", "http://localhost:3000")),
        ('["*"]', ("*",)),
        ('["https://a.example", "null"]', ("https://a.example", "null")),
        ("", ()),
    ],
)
def test_origins_are_read(text, origins):
    assert read_origins(text) == origins


@pytest.mark.parametrize("text", ["a.example", "https://a.example/", "https://a b", '["x"', "https://*.example"])
def test_what_is_no_origin_is_refused(text):
    with pytest.raises(ValueError, match="must be"):
        read_origins(text)
