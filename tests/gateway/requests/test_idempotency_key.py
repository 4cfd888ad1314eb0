"""The header Idempotency-Key: a repetition is refused with the other request's id, unless the first try failed."""

import asyncio

import httpx
import openai
import pytest
from waiting import until

PATHS = {
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3},
}
ENDLESS = 3000


def keyed(key):
    return {"Idempotency-Key": key}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
async def test_a_repetition_is_refused_with_the_others_id(gateway, path, stream):
    first = await gateway.post(path, headers=keyed("k"), **PATHS[path], stream=stream)
    assert first.status_code == 200
    second = await gateway.post(path, headers=keyed("k"), **PATHS[path])
    assert second.status_code == 409
    error = second.json()["error"]
    assert error["type"] == "invalid_request_error"
    if path != "/v1/messages":  # Anthropic's format has no more
        assert (error["param"], error["code"]) == ("Idempotency-Key", "duplicate_request")
    assert error["message"].startswith(f"Idempotency-Key: request {first.headers['x-request-id']} ")
    assert second.headers["x-request-id"] not in ("", first.headers["x-request-id"])
    assert (await gateway.post(path, headers=keyed("other"), **PATHS[path])).status_code == 200
    assert (await gateway.post(path, **PATHS[path])).status_code == 200


@pytest.mark.parametrize("path", PATHS)
async def test_an_invalid_key_names_the_header(gateway, path):
    for keys in ([""], ["x" * 129], ["ö"], ["a\tb"], ["a", "a"]):
        headers = [("Idempotency-Key", key.encode("latin-1")) for key in keys]
        response = await gateway.http.post(path, json=PATHS[path], headers=headers)
        error = response.json()["error"]
        assert (response.status_code, error.get("param", "Idempotency-Key")) == (400, "Idempotency-Key")
        assert error["message"].startswith("Idempotency-Key: ")
    assert (await gateway.post(path, headers=keyed("x" * 128), **PATHS[path])).status_code == 200


async def test_several_prompts_have_no_key(gateway):
    response = await gateway.post("/v1/completions", headers=keyed("k"), prompt=["a", "b"], max_tokens=1)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert (await gateway.post("/v1/completions", headers=keyed("k"), prompt=["a"], max_tokens=1)).status_code == 200


class LosesFirstConnection(httpx.AsyncHTTPTransport):
    """Sends the first request, and drops the connection once the service is computing it."""

    def __init__(self, gateway):
        super().__init__()
        self.gateway = gateway
        self.num_requests = 0

    async def handle_async_request(self, request):
        self.num_requests += 1
        if self.num_requests > 1:
            return await super().handle_async_request(request)
        sending = asyncio.create_task(super().handle_async_request(request))
        await until(lambda: self.gateway.engine.stats().output_tokens)
        sending.cancel()
        await asyncio.wait([sending])
        raise httpx.ReadError("the connection is lost", request=request)


async def test_openais_client_repeats_a_request_whose_first_try_failed(start_gateway, monkeypatch):
    """Repeats it with the same key, which is free again: the gateway cancels the request of a lost connection."""
    gateway = await start_gateway(seconds_per_step=0.002)
    monkeypatch.setattr(openai.AsyncOpenAI, "_calculate_retry_timeout", lambda *_: 0.05)
    transport = LosesFirstConnection(gateway)
    async with (
        httpx.AsyncClient(transport=transport, timeout=120) as http,
        openai.AsyncOpenAI(base_url=gateway.base, api_key="none", http_client=http) as client,
    ):
        answer = await client.chat.completions.create(
            model="bytes",
            messages=[{"role": "user", "content": "x"}],
            max_completion_tokens=30,
            extra_headers=keyed("k"),
            extra_body={"ignore_eos": True},
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 30
        assert transport.num_requests >= 2
        with pytest.raises(openai.ConflictError) as error:
            await client.with_options(max_retries=0).completions.create(
                model="bytes", prompt="x", extra_headers=keyed("k")
            )
    assert (error.value.param, error.value.code) == ("Idempotency-Key", "duplicate_request")
