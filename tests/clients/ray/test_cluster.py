"""Two replicas under Ray Serve: requests over HTTP and gRPC while replicas are killed, scaled and stopped."""

import asyncio
import itertools
import json
import re
import signal
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.error import HTTPError, URLError

import grpc
import httpx
import psutil
import pytest
from waiting import until, wait_until
from wire.http_get import fetch

import penstock.v1 as pb
from penstock.clients import AsyncClient
from penstock.clients.errors import RequestFailed
from penstock.clients.ray import app
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("default")]

APP = "penstock"
ARGS = {
    "model": "demo",
    "kv_cache_memory_bytes": "64M",
    "num_cpus": 1,
    "health_check_period_s": 1,
    "graceful_shutdown_timeout_s": 60,
}
PROMPT, MAX_TOKENS, LONG = "The kernel is", 64, 15_000
WORKERS, ATTEMPTS, PAUSE_S = 3, 400, 0.1

Answer = Callable[[], Awaitable[str]]


class Retryable(Exception):
    """What a client should answer by another try."""


@pytest.fixture
def deploy(ray_cluster: Any) -> Iterator[Callable[..., None]]:
    """Runs the application with arguments, and removes it at the end, with its processes."""
    from ray import serve

    def run(**args: Any) -> None:
        serve.run(app({**ARGS, **args}), name=APP)

    yield run
    children = ray_cluster.children()
    serve.delete(APP)
    wait_until(lambda: not any(map(psutil.Process.is_running, children)))


def num_running() -> int:
    from ray import serve

    application = serve.status().applications[APP]
    states = application.deployments["penstock"].replica_states if application.status == "RUNNING" else {}
    return int(states.get("RUNNING", 0))


async def wait_for(condition: Callable[[], bool]) -> None:
    """Waits for a condition that takes a while to find out."""
    await asyncio.to_thread(wait_until, condition)


# ------------------------------------------------------------------------------------------------------------- clients


def start(max_tokens: int = MAX_TOKENS) -> pb.GenerationStart:
    return pb.GenerationStart(
        text=PROMPT, sampling=pb.SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    )


def body(max_tokens: int = MAX_TOKENS) -> dict[str, Any]:
    given = {"model": "demo", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True}
    return {**given, "max_tokens": max_tokens}


@asynccontextmanager
async def clients(ray_cluster: Any) -> AsyncIterator[dict[str, Answer]]:
    """A request of each kind, which returns its text, and raises Retryable."""
    async with (
        httpx.AsyncClient(base_url=ray_cluster.http, timeout=httpx.Timeout(300)) as http,
        grpc.aio.insecure_channel(ray_cluster.target) as channel,
        AsyncClient(ray_cluster.target) as client,
    ):

        async def over_http() -> str:
            text, is_whole = "", False
            try:
                async with http.stream("POST", "/v1/completions", json=body()) as response:
                    if response.status_code >= 500:
                        raise Retryable(f"HTTP {response.status_code}")
                    assert response.status_code == 200, await response.aread()
                    async for line in response.aiter_lines():
                        if line == "data: [DONE]":
                            is_whole = True
                        elif line:
                            event = json.loads(line.removeprefix("data: "))
                            if "error" in event:
                                raise Retryable(f"HTTP event {event['error']['code']}")
                            text += event["choices"][0]["text"]
            except httpx.TransportError as error:
                raise Retryable(f"HTTP {type(error).__name__}") from error
            assert is_whole, "a response that breaks off must not look complete"
            return text

        async def over_grpc() -> str:
            stub = GenerationServiceStub(channel)
            try:
                parts = [part async for part in stub.GenerateOne(pb.GenerateOneRequest(start=start()))]
                return "".join(delta.text for part in parts for delta in part.deltas)
            except grpc.aio.AioRpcError as error:
                raise Retryable(f"gRPC {error.code().name}") from error

        async def unary() -> str:
            try:
                response = await GenerationServiceStub(channel).Complete(pb.CompleteRequest(start=start()))
            except grpc.aio.AioRpcError as error:
                raise Retryable(f"unary {error.code().name}") from error
            return response.choices[0].text

        async def multiplexed() -> str:
            try:
                return (await client.complete(PROMPT, max_tokens=MAX_TOKENS, temperature=0, ignore_eos=True)).text
            except RequestFailed as error:
                raise Retryable(f"Generate {error.code.name}") from error

        yield {"http": over_http, "grpc": over_grpc, "unary": unary, "multiplexed": multiplexed}


class Load:
    """Requests of all kinds, one after another in each worker; each is tried until it succeeds."""

    def __init__(self, kinds: dict[str, Answer], expected: str) -> None:
        self._kinds = kinds
        self._expected = expected
        self.num_ended: Counter[str] = Counter()
        self.errors: Counter[str] = Counter()
        self._is_over = False

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keeps the workers busy until the block ends."""
        async with asyncio.TaskGroup() as group:
            for kind, _ in itertools.product(self._kinds, range(WORKERS)):
                group.create_task(self._work(kind))
            yield
            self._is_over = True

    async def _work(self, kind: str) -> None:
        while not self._is_over:
            assert await self._answer(self._kinds[kind]) == self._expected
            self.num_ended[kind] += 1

    async def _answer(self, answer: Answer) -> str:
        for _ in range(ATTEMPTS):
            try:
                return await answer()
            except Retryable as error:
                self.errors[str(error)] += 1
                await asyncio.sleep(PAUSE_S)
        raise AssertionError(f"no try succeeded: {self.errors}")

    async def all_end_more(self) -> None:
        """Waits until a few more requests of every kind have ended."""
        goal = {kind: self.num_ended[kind] + 2 * WORKERS for kind in self._kinds}
        await until(lambda: all(self.num_ended[kind] >= least for kind, least in goal.items()))


# --------------------------------------------------------------------------------------------------------------- tests


async def replaced(ray_cluster: Any, kill: Callable[[psutil.Process], None]) -> None:
    """Kills one of two children, or the replica around it, and waits until there are two again."""
    victim = ray_cluster.children()[0]
    kill(victim)
    await wait_for(lambda: not victim.is_running() and len(ray_cluster.children()) == num_running() == 2)


async def test_every_request_ends_while_replicas_are_killed(ray_cluster: Any, deploy: Callable[..., None]) -> None:
    await asyncio.to_thread(deploy, num_replicas=2)
    async with clients(ray_cluster) as kinds:
        expected = await kinds["grpc"]()
        load = Load(kinds, expected)
        async with load.running():
            await load.all_end_more()
            assert not load.errors
            for kill in (lambda child: child.kill(), lambda child: child.parent().send_signal(signal.SIGKILL)):
                await replaced(ray_cluster, kill)
                await load.all_end_more()
    print(load.num_ended, load.errors)
    codes = {error.split()[-1] for error in load.errors}
    assert codes <= {"UNAVAILABLE", "INTERNAL", "500", "503", "service_unavailable", "RemoteProtocolError", "ReadError"}


def num_cancelled(child: psutil.Process) -> float:
    """How many requests of a child ended by cancellation, by its metrics."""
    for connection in child.net_connections("tcp4"):
        if connection.status == psutil.CONN_LISTEN:
            with suppress(HTTPError, URLError, OSError, ValueError):
                page = fetch(f"127.0.0.1:{connection.laddr.port}")
                found = re.findall(r'^penstock_requests_total\{.*code="CANCELLED".*\} (\S+)', page, re.MULTILINE)
                return sum(map(float, found))
    raise AssertionError("no metrics")


async def test_a_client_that_leaves_cancels_its_request(ray_cluster: Any, deploy: Callable[..., None]) -> None:
    await asyncio.to_thread(deploy, num_replicas=1)
    (child,) = ray_cluster.children()

    async def cancelled(number: int) -> None:
        await wait_for(lambda: num_cancelled(child) >= number)

    async with (
        httpx.AsyncClient(base_url=ray_cluster.http, timeout=httpx.Timeout(300)) as http,
        grpc.aio.insecure_channel(ray_cluster.target) as channel,
        AsyncClient(ray_cluster.target) as client,
    ):
        async with http.stream("POST", "/v1/completions", json=body(LONG)) as response:
            assert await anext(response.aiter_lines())
        await cancelled(1)
        call = GenerationServiceStub(channel).GenerateOne(pb.GenerateOneRequest(start=start(LONG)))
        assert await call.read()
        call.cancel()
        await cancelled(2)
        async with client.generate(PROMPT, max_tokens=LONG, ignore_eos=True) as request:
            assert await request.take()
        await cancelled(3)
        async with client.generate(PROMPT, max_tokens=LONG, ignore_eos=True) as request:
            assert await request.take()
            await client.close()  # and with it the stream
        await cancelled(4)


async def test_a_replica_that_is_stopped_finishes_its_requests(ray_cluster: Any, deploy: Callable[..., None]) -> None:
    from ray import serve

    num_tokens = LONG // 4  # a busy machine computes them within graceful_shutdown_timeout_s
    await asyncio.to_thread(deploy, num_replicas=1)
    (child,) = ray_cluster.children()
    async with grpc.aio.insecure_channel(ray_cluster.target) as channel:
        parts = aiter(GenerationServiceStub(channel).GenerateOne(pb.GenerateOneRequest(start=start(num_tokens))))
        assert (await anext(parts)).HasField("accepted")
        deleting = asyncio.create_task(asyncio.to_thread(serve.delete, APP))
        *_, last = [part async for part in parts]
        assert last.finished.usage.output_tokens == num_tokens
        await deleting
    wait_until(lambda: not child.is_running())


async def test_replicas_follow_the_load(ray_cluster: Any, deploy: Callable[..., None]) -> None:
    scaling = {"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0.5}
    scaling |= {"downscale_delay_s": 0.5, "metrics_interval_s": 0.5, "look_back_period_s": 1}
    await asyncio.to_thread(deploy, autoscaling_config=scaling)
    assert len(ray_cluster.children()) == 1
    async with clients(ray_cluster) as kinds:
        load = Load(kinds, await kinds["http"]())
        async with load.running():
            await wait_for(lambda: num_running() == 2)
            await load.all_end_more()
    await wait_for(lambda: len(ray_cluster.children()) == 1)


async def test_a_replica_that_cannot_start_shows_the_log_of_its_child(ray_cluster: Any) -> None:
    from ray import serve

    with pytest.raises(RuntimeError):
        await asyncio.to_thread(serve.run, app({**ARGS, "model": "/nowhere"}), name=APP)
    assert "/nowhere: no such directory" in serve.status().applications[APP].deployments["penstock"].message
    serve.delete(APP)
