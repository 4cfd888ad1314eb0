"""HEAD, OPTIONS, methods that a path lacks, and other spellings of paths."""

import pytest

from penstock.clients.gateway.errors import ErrorBody
from penstock.clients.gateway.paths import canonical_path

GETS = [
    "/health", "/ping", "/version", "/metrics", "/v1/models", "/v1/models/bytes", "/", "/docs", "/docs/swagger-ui.css",
    "/openapi.json",
]  # fmt: skip
POSTS = [
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/embeddings", "/v1/classify", "/v1/rerank",
    "/v1/score", "/tokenize", "/detokenize",
]  # fmt: skip
VARY = {"date", "x-request-id"}


@pytest.mark.parametrize("path", [*GETS, "/v1/models/other", "/nothing", "/v1/completions"])
async def test_head_has_the_headers_of_get_and_no_body(gateway, path):
    got, head = await gateway.http.get(path), await gateway.http.head(path)
    assert head.status_code == got.status_code
    assert head.content == b""
    assert head.headers.keys() == got.headers.keys()
    assert head.headers["x-request-id"]
    if path != "/metrics":  # which counts this very request
        ours, theirs = ({k: v for k, v in each.headers.items() if k not in VARY} for each in (head, got))
        assert ours == theirs


@pytest.mark.parametrize("path", [*GETS, *POSTS])
async def test_options_lists_the_methods(gateway, path):
    response = await gateway.http.options(path)
    assert response.status_code == 204
    assert response.content == b""
    methods = {"GET", "HEAD"} if path in GETS else {"POST"}
    if path == "/ping":
        methods |= {"POST"}
    assert set(response.headers["allow"].split(", ")) == methods | {"OPTIONS"}


async def test_options_of_no_path_is_404(gateway):
    assert (await gateway.http.options("/nothing")).status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/completions", "OPTIONS, POST"),
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
        ("DELETE", "/ping", "GET, HEAD, OPTIONS, POST"),
        ("PUT", "/v1/chat/completions/", "OPTIONS, POST"),
        ("POST", "/openapi.json", "GET, HEAD, OPTIONS"),
    ],
)
async def test_an_unsupported_method_is_refused_with_the_allowed_ones(gateway, method, path, allow):
    response = await gateway.http.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == allow
    assert allow in ErrorBody.model_validate(response.json()).error.message


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("/embeddings", "/v1/embeddings"),
        ("/responses", "/v1/responses"),
        ("/classify", "/v1/classify"),
        ("/score", "/v1/score"),
        ("/rerank", "/v1/rerank"),
        ("/v2/rerank", "/v1/rerank"),
        ("/v2/rerank/", "/v1/rerank"),
        ("/models", "/v1/models"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/v1/tokenize", "/tokenize"),
        ("/v1/detokenize", "/detokenize"),
        ("/v1/health", "/health"),
        ("/v1/ping", "/ping"),
        ("/v1/version", "/version"),
        ("/v1/models/", "/v1/models"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/health/", "/health"),
        ("/docs/", "/docs"),
        ("/", "/"),
        ("//", "/"),
        ("", "/"),
        ("*", "*"),
        ("/v1/models/chat", "/v1/models/chat"),
        ("/v1/nothing", "/v1/nothing"),
    ],
)
def test_other_spellings_of_paths(path, meant):
    assert canonical_path(path) == meant


async def test_other_spellings_are_served_and_counted_as_the_path(gateway):
    for path in ("/v1/completions", "/completions", "/v1/completions/"):
        response = await gateway.post(path, prompt="a", max_tokens=1)
        assert response.status_code == 200
    for path in ("/models", "/v1/models/", "/models/bytes"):
        assert (await gateway.http.get(path)).status_code == 200
    assert (await gateway.post("/v1/tokenize", prompt="ab")).json()["count"] == 2
    labels = {"route": "/v1/completions", "code": "200"}
    registry = gateway.app.state.gateway_metrics.registry
    assert registry.get_sample_value("penstock_gateway_requests_total", labels) == 3
