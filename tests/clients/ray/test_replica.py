"""A replica without Ray: it passes requests on to its child unchanged and at once, and ends soon after it."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import httpx
import pytest
import pytest_asyncio
from google.rpc.status_pb2 import Status
from starlette.requests import Request
from waiting import until

import penstock.v1 as pb
from penstock.clients.ray import replica as replica_module
from penstock.clients.ray.grpc_forwarding import CallFailed
from penstock.clients.ray.replica import ServeReplica

pytestmark = pytest.mark.asyncio(loop_scope="module")

FLAGS = ["--model=demo", "--kv-cache-memory-bytes=64M"]
COMPLETION = {"model": "demo", "prompt": "The kernel is", "max_tokens": 8, "temperature": 0}
LONG = {**COMPLETION, "max_tokens": 15_000, "ignore_eos": True}
"""Seconds of work for the child."""


class Context:
    """What a call of Serve's gRPC proxy brings along."""

    def __init__(self, *metadata: tuple[str, str]) -> None:
        self._metadata = list(metadata)
        self.code: grpc.StatusCode | None = None
        self.details = ""
        self.trailers: dict[str, Any] = {}

    def invocation_metadata(self) -> list[tuple[str, str]]:
        return self._metadata

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, trailing_metadata: list[tuple[str, Any]]) -> None:
        self.trailers = dict(trailing_metadata)


class Exchange:
    """One HTTP request as Serve makes it: an ASGI call in a task, which it cancels when the client disconnects."""

    def __init__(self, replica: ServeReplica, path: str, body: object = None, root_path: str = "") -> None:
        self._body = b"" if body is None else json.dumps(body).encode()
        headers = [(b"host", b"localhost:8000"), (b"connection", b"keep-alive, x-hop"), (b"x-hop", b"1")]
        if body is not None:
            headers += [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(self._body))]
        self._scope = {
            "type": "http",
            "method": "GET" if body is None else "POST",
            "path": root_path + path,
            "raw_path": (root_path + path).encode(),
            "root_path": root_path,
            "query_string": b"",
            "headers": headers,
        }
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.task = asyncio.create_task(self._run(replica))

    async def _run(self, replica: ServeReplica) -> None:
        request = Request(self._scope, self._receive)
        response = await replica(request)
        await response(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        return {"type": "http.request", "body": self._body, "more_body": False}

    async def _send(self, message: Any) -> None:
        self.sent.put_nowait(message)

    async def whole(self) -> tuple[int, dict[str, str], bytes]:
        """The status, the headers and the body."""
        await self.task
        start, *parts = (self.sent.get_nowait() for _ in range(self.sent.qsize()))
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, b"".join(part["body"] for part in parts)


@asynccontextmanager
async def started() -> AsyncIterator[ServeReplica]:
    replica = ServeReplica.__new__(ServeReplica)
    await replica.__init__(FLAGS, 120.0)  # type: ignore[misc]  # Serve makes it in these two steps
    try:
        yield replica
    finally:
        await asyncio.to_thread(replica.__del__)
        await replica._session.close()
        await replica._channel.close()


@pytest.fixture(scope="module", autouse=True)
def exits() -> "Any":
    """The statuses with which replicas ended the process."""
    statuses: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replica_module, "os", SimpleNamespace(_exit=statuses.append))
        yield statuses


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def replica() -> AsyncIterator[ServeReplica]:
    async with started() as replica:
        yield replica


def gateway(replica: ServeReplica) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=replica._gateway, timeout=120)


async def ended(replica: ServeReplica, code: str) -> float:
    """How many requests ended with a status."""
    async with gateway(replica) as client:
        metrics = (await client.get("/metrics")).text
    lines = [
        line for line in metrics.splitlines() if line.startswith("penstock_requests_total") and f'"{code}"' in line
    ]
    return sum(float(line.split()[-1]) for line in lines)


async def test_a_response_is_that_of_the_gateway(replica: ServeReplica) -> None:
    async with gateway(replica) as client:
        direct = await client.post("/v1/completions", json=COMPLETION)
    status, headers, body = await Exchange(replica, "/v1/completions", COMPLETION).whole()
    assert (status, json.loads(body)["choices"]) == (200, direct.json()["choices"])
    assert headers["content-type"] == "application/json"
    assert headers["content-length"] == str(len(body))
    assert headers["x-request-id"]
    assert not {"date", "server", "transfer-encoding", "connection"} & headers.keys()


async def test_the_prefix_of_the_application_is_removed(replica: ServeReplica) -> None:
    status, _, body = await Exchange(replica, "/v1/models", root_path="/llm").whole()
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "demo")


async def test_an_error_is_that_of_the_gateway(replica: ServeReplica) -> None:
    status, _, body = await Exchange(replica, "/v1/completions", {**COMPLETION, "max_tokens": -1}).whole()
    assert (status, json.loads(body)["error"]["param"]) == (400, "max_tokens")


async def test_chunks_are_not_held_back_and_a_disconnect_cancels(replica: ServeReplica) -> None:
    before = await ended(replica, "CANCELLED")
    exchange = Exchange(replica, "/v1/completions", {**LONG, "stream": True})
    assert (await exchange.sent.get())["status"] == 200
    assert (await exchange.sent.get())["body"].startswith(b"data: {")
    assert not exchange.task.done()
    exchange.task.cancel()
    while await ended(replica, "CANCELLED") == before:  # noqa: ASYNC110 - another process counts
        await asyncio.sleep(0.02)


def start(**sampling: Any) -> pb.GenerationStart:
    return pb.GenerationStart(text="The kernel is", sampling=pb.SamplingParams(temperature=0, **sampling))


async def test_calls_of_all_kinds_reach_the_child(replica: ServeReplica) -> None:
    whole = await replica.Complete(pb.CompleteRequest(start=start(max_tokens=8)), Context())
    parts: list[Any] = [
        each async for each in await replica.GenerateOne(pb.GenerateOneRequest(start=start(max_tokens=8)), Context())
    ]
    assert "".join(delta.text for part in parts for delta in part.deltas) == whole.choices[0].text

    async def requests() -> AsyncIterator[pb.GenerateRequest]:
        for ref in (1, 2):
            request = pb.GenerateRequest(start=start(max_tokens=8))
            request.start.ref = ref
            yield request

    texts = {1: "", 2: ""}
    async for response in await replica.Generate(requests(), Context()):
        for delta in response.deltas:  # type: ignore[attr-defined]
            texts[delta.ref] += delta.text
    assert set(texts.values()) == {whole.choices[0].text}
    model = await replica.GetModel(pb.GetModelRequest(), Context())
    assert model.model.name == "demo"
    tokens = await replica.Tokenize(pb.TokenizeRequest(text="kernel"), Context())
    text = await replica.Detokenize(pb.DetokenizeRequest(token_ids=tokens.token_ids), Context())
    assert text.text == "kernel"


async def test_a_unary_call_keeps_the_details_of_its_status(replica: ServeReplica) -> None:
    context = Context(("user-agent", "test"), ("grpc-accept-encoding", "gzip"), ("traceparent", "no trace"))
    response = await replica.Complete(pb.CompleteRequest(start=start(top_p=2.0)), context)
    assert response == pb.CompleteResponse()
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    status = Status.FromString(context.trailers["grpc-status-details-bin"])
    assert status.message == context.details
    assert "top_p" in context.details


async def test_a_stream_ends_with_the_status_of_the_child(replica: ServeReplica) -> None:
    context = Context()
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT"):
        async for _ in await replica.GenerateOne(pb.GenerateOneRequest(start=start(top_p=2.0)), context):
            pass
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "top_p" in context.details


async def test_a_stream_that_is_closed_early_is_cancelled(replica: ServeReplica) -> None:
    before = await ended(replica, "CANCELLED")
    request = pb.GenerateOneRequest(start=start(max_tokens=15_000, ignore_eos=True))
    stream: Any = await replica.GenerateOne(request, Context())
    assert await anext(stream)
    await stream.aclose()
    while await ended(replica, "CANCELLED") == before:  # noqa: ASYNC110 - another process counts
        await asyncio.sleep(0.02)


async def test_the_end_of_the_child_ends_its_requests_with_retryable_errors_and_then_the_replica(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "FLUSH_S", 0.0)
    async with started() as replica:
        await replica.check_health()
        streamed = Exchange(replica, "/v1/completions", {**LONG, "stream": True})
        whole = Exchange(replica, "/v1/completions", LONG)
        context = Context()
        request = pb.GenerateOneRequest(start=start(max_tokens=15_000, ignore_eos=True))
        stream: Any = await replica.GenerateOne(request, context)
        assert await anext(stream)
        assert (await streamed.sent.get())["status"] == 200
        assert replica._process is not None
        os.kill(replica._process._process.pid, signal.SIGKILL)
        with pytest.raises(CallFailed):
            async for _ in stream:
                pass
        assert context.code is grpc.StatusCode.UNAVAILABLE
        await streamed.task
        bodies = [streamed.sent.get_nowait()["body"] for _ in range(streamed.sent.qsize())]
        # The gateway, if it outlives the service for a moment, reports the error itself and ends with [DONE].
        events = b"".join(bodies).removesuffix(b"data: [DONE]\n\n").strip()
        last = json.loads(events.rpartition(b"data: ")[2])
        assert last["error"]["code"] == "service_unavailable"
        assert (await whole.whole())[0] == 503
        status, headers, _ = await Exchange(replica, "/v1/models").whole()
        assert (status, headers["retry-after"], headers["x-should-retry"]) == (503, "1", "true")
        with pytest.raises(grpc.aio.AioRpcError):
            await replica.check_health()
        await until(lambda: exits)
    assert exits == [1]
