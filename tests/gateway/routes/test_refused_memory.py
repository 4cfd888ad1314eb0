"""What the gateway and the service behind it refuse leaves nothing behind, without the cycle collector's help: bodies
as large as they may be, refused for each reason, by every route."""

import asyncio
import gc
import json
from collections.abc import Callable, Iterator

import pytest
from memory import held_bytes_counter

MIB = 1 << 20
MAX_BODY_BYTES = 2 * MIB
"""Less than by default, since all of it is sent hundreds of times."""
ROOM = MAX_BODY_BYTES - 512
NUM_TIMES, NUM_TRIES = 4, 20
MOST_BYTES = 64 << 10
"""That each may leave behind."""
BUFFER_BYTES = 3 * MIB
"""What connections on which large bodies came keep, more or less. Bodies that stay are ``NUM_TIMES`` of 2 MiB."""
MOST_GROWN_BYTES = NUM_TIMES * MOST_BYTES + BUFFER_BYTES
TEXT = "x y " * (ROOM // 4)

ASKED: dict[str, Callable[[str], dict[str, object]]] = {
    "/v1/chat/completions": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/v1/completions": lambda text: {"prompt": text},
    "/v1/embeddings": lambda text: {"input": text},
    "/v1/classify": lambda text: {"input": text},
    "/v1/rerank": lambda text: {"query": "x", "documents": [text]},
    "/v1/score": lambda text: {"text_1": "x", "text_2": text},
    "/v1/responses": lambda text: {"input": text},
    "/v1/responses/input_tokens": lambda text: {"input": text},
    "/v1/messages": lambda text: {"messages": [{"role": "user", "content": text}], "max_tokens": 1},
    "/v1/messages/count_tokens": lambda text: {"messages": [{"role": "user", "content": text}]},
    "/tokenize": lambda text: {"prompt": text},
    "/detokenize": lambda text: {"tokens": [9999] * (len(text) // 8)},
}
"""A good request of every route. A route that is missing here fails the test."""

COUNTED = {"/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens"}
"""These take a prompt of any length that their answer has room for."""

Sent = tuple[bytes, str]
"""A body, and a part of the refusal."""


def as_json(**fields: object) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def malformed() -> dict[str, Sent]:
    """By reason: what no route takes."""
    return {
        "no JSON": (b'{"model": "' + b"x" * ROOM, "not valid JSON"),
        "no UTF-8": (b'{"model": "' + b"\xff" * ROOM + b'"}', "UTF-8"),
        "no object": (b'"' + b"x" * ROOM + b'"', "valid dictionary"),
        "too many elements": (b'{"x": [' + b"1," * (ROOM // 2) + b"1]}", "values"),
        "too deep": (b'{"x": ' + b"[" * ROOM, "nested too deeply"),
        "too large": (b'{"model": "' + b"x" * (MAX_BODY_BYTES + MIB) + b'"}', "send less at once"),
        "nothing asked": (as_json(model="x" * ROOM), "error"),
    }


def refused(path: str) -> dict[str, Sent]:
    """By reason: what a route refuses for what it holds."""
    good = ASKED[path]
    found = {
        "another model": (as_json(model="x" * ROOM, **good("x" * 16)), "model"),
        "an unknown field": (as_json(model="bytes", nonsense=TEXT, **good("x" * 16)), "nonsense"),
        "a field of another type": (as_json(**good("x" * 16) | {"model": {"x": TEXT}}), "valid string"),
        "a field that is not supported": (as_json(background=TEXT, **good("x" * 16)), "background"),
    }
    if path not in COUNTED:
        found["what the service refuses"] = (as_json(**good(TEXT)), "error")
    if "chat" in path or path in ("/v1/completions", "/v1/messages", "/v1/responses"):
        found["refused before a stream"] = (as_json(stream=True, **good(TEXT)), "error")
    if "chat" in path:
        found["a role"] = (as_json(messages=[{"role": "x", "content": TEXT}]), "role")
        found["a constraint"] = (as_json(guided_regex="(" * 9 + TEXT, **good("x")), "error")
    if "responses" in path:
        found["a stored item"] = (as_json(input=[{"type": "item_reference", "id": TEXT}]), "item_reference")
    return found


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
async def gateway(start_gateway):
    return await start_gateway(max_body_bytes=MAX_BODY_BYTES)


class Sender:
    """Sends bodies, the same ones again and again: the client's garbage has them too."""

    def __init__(self, gateway) -> None:
        self._http = gateway.http
        self._held_bytes = held_bytes_counter()

    async def grown(self, path: str, body: bytes, part: str, kind: str = "application/json") -> int:
        """How many bytes remain of refusals."""
        await self._refuse(1, path, body, part, kind)
        before = await self._settled()
        await self._refuse(NUM_TIMES, path, body, part, kind)
        # gRPC's buffers hold up to 6 MiB after large messages. Further ones change that; with these a leak grows.
        for _ in range(NUM_TRIES):
            if (grown := await self._settled() - before) <= MOST_GROWN_BYTES:
                break
            await self._refuse(1, path, body, part, kind)
        return grown

    async def _refuse(self, num_times: int, path: str, body: bytes, part: str, kind: str) -> None:
        for _ in range(num_times):
            response = await self._http.post(path, content=body, headers={"content-type": kind})
            assert response.status_code >= 400, path
            assert part in response.text, path
            del response

    async def _settled(self) -> int:
        """What is held once buffers for large messages are gone."""
        for _ in range(4):
            await self._http.post("/v1/completions", content=b"x")
            await asyncio.sleep(0.01)
        return self._held_bytes()


def check(grown: dict[str, int]) -> None:
    assert {name: num_bytes for name, num_bytes in grown.items() if num_bytes > MOST_GROWN_BYTES} == {}


def test_every_route_is_walked(gateway):
    paths = {path for path, methods in gateway.app.openapi()["paths"].items() if "post" in methods}
    assert paths == {*ASKED, "/ping", "/v1/responses/{response_id}/cancel"}  # which answer whatever is sent


LIKE_OTHERS = ("/v1/classify", "/v1/completions", "/v1/embeddings", "/v1/messages/count_tokens", "/v1/score")
"""Routes whose bodies take the same path as those of another one."""


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.soak) if path in LIKE_OTHERS else path for path in ASKED]
)
async def test_no_route_keeps_what_it_refuses(gateway, without_collector, path):
    sender = Sender(gateway)
    check({reason: await sender.grown(path, *sent) for reason, sent in refused(path).items()})


@pytest.mark.parametrize(
    "path",
    ["/v1/chat/completions", *(pytest.param(path, marks=pytest.mark.soak) for path in ASKED if "chat" not in path)],
)
async def test_no_route_keeps_what_is_malformed(gateway, without_collector, path):
    """One function reads the bodies of all routes, so the other routes are tried in the long tests."""
    sender = Sender(gateway)
    check({reason: await sender.grown(path, *sent) for reason, sent in malformed().items()})


@pytest.mark.parametrize(
    "path",
    [
        path if path in ("/v1/chat/completions", "/tokenize") else pytest.param(path, marks=pytest.mark.soak)
        for path in ASKED
        if path != "/detokenize"  # whose tokens take fewer bytes there
    ],
)
async def test_what_is_too_long_for_a_message_to_the_service_is_not_kept(start_gateway, without_collector, path):
    sender = Sender(await start_gateway(max_body_bytes=6 * MIB))
    body = as_json(**ASKED[path]("x y " * (5 * MIB // 4)))
    check({"long": await sender.grown(path, body, "error")})


@pytest.mark.soak
async def test_what_is_too_long_for_a_message_from_the_service_is_not_kept(start_gateway, without_collector):
    sender = Sender(await start_gateway(max_body_bytes=6 * MIB))
    path = "/v1/responses/input_tokens"
    body = as_json(**ASKED[path]("x y " * (3 * MIB // 4)))
    check({"tokens": await sender.grown(path, body, "786,432 tokens at once")})


async def test_nothing_is_kept_of_a_body_that_no_route_reads(gateway, without_collector):
    sender, body = Sender(gateway), b"x" * ROOM
    check(
        {
            "no path": await sender.grown("/nothing", body, "no such path"),
            "no method": await sender.grown("/v1/models", body, "does not support"),
            "no type": await sender.grown("/tokenize", body, "as JSON", "text/plain"),
        }
    )
