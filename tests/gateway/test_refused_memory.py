"""What the gateway and the service behind it refuse leaves nothing behind, without the cycle collector's help: bodies
as large as they may be, refused for each reason, by every route."""

import asyncio
import gc
import json
from collections.abc import Iterator

import pytest
from memory import held_bytes_counter

from penstock.clients.gateway.settings import GatewaySettings

MIB = 1 << 20
MAX_BODY_BYTES = GatewaySettings.max_body_bytes
NUM_TIMES = 4
MOST_BYTES = 64 << 10
"""That each may leave behind."""
BUFFER_BYTES = 40 * MIB
"""What connections on which large bodies came keep, more or less: a body that stays is 16 MiB, each time."""
TEXT = "x y " * (MIB - 4096)


def as_json(**fields: object) -> bytes:
    return json.dumps(fields).encode()


PROMPTS: dict[str, dict[str, object]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": TEXT}]},
    "/v1/completions": {"prompt": TEXT},
    "/v1/embeddings": {"input": TEXT},
    "/v1/responses": {"input": TEXT},
    "/v1/responses/input_tokens": {"input": TEXT, "temperature": "hot"},
    "/tokenize": {"prompt": TEXT, "add_special_tokens": "perhaps"},
    "/detokenize": {"tokens": [9999] * MIB},
}
"""What a route refuses for what it asks."""


def bodies(path: str) -> dict[str, bytes]:
    """By reason."""
    room = MAX_BODY_BYTES - 256
    found = {
        "no JSON": b'{"model": "' + b"x" * room,
        "no UTF-8": b'{"model": "' + b"\\xff" * room + b'"}',
        "no object": b'"' + b"x" * room + b'"',
        "too many elements": b'{"x": [' + b"1," * (room // 2) + b"1]}",
        "too deep": b'{"x": ' + b"[" * room,
        "another model": as_json(model="x" * room),
        "an unknown field": as_json(model="bytes", nonsense="x" * room),
        "too large": b'{"model": "' + b"x" * (MAX_BODY_BYTES + MIB) + b'"}',
    }
    asked = PROMPTS.get(path)
    if asked is not None:
        found["what it asks"] = as_json(model="bytes", **asked)
        found["a field of another type"] = as_json(model={"x": TEXT}, **asked)
    return found


@pytest.fixture
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.xfail(strict=False, reason="/tokenize and /v1/embeddings still keep about 1.5 MB for each refusal")
async def test_no_route_keeps_what_it_refuses(gateway, without_collector):
    held_bytes = held_bytes_counter()
    paths = [path for path, methods in gateway.app.openapi()["paths"].items() if "post" in methods]
    paths.remove("/ping")  # answers whatever is sent
    assert set(PROMPTS) <= set(paths)

    async def refuse(path: str, sent: dict[str, bytes], num_times: int) -> None:
        for body in sent.values():
            for _ in range(num_times):
                response = await gateway.http.post(path, content=body, headers={"content-type": "application/json"})
                assert response.status_code >= 400, path
                del response

    async def settled() -> int:
        for _ in range(4):
            await gateway.http.post("/v1/completions", content=b"x")
            await asyncio.sleep(0.01)
        return held_bytes()

    grown = {}
    for path in paths:
        sent = bodies(path)  # the same ones each time: the client's garbage has them too
        await refuse(path, sent, 1)
        before = await settled()
        await refuse(path, sent, NUM_TIMES)
        grown[path] = await settled() - before
    most = NUM_TIMES * len(bodies(next(iter(PROMPTS)))) * MOST_BYTES + BUFFER_BYTES
    assert {path: num_bytes for path, num_bytes in grown.items() if num_bytes > most} == {}
