"""Services with fake workers behind a proxy, each with its own load."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.streaming.outbox import HEARTBEAT_S
from penstock.service.text.tokenizer import Tokenizer
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

NUM_ROWS = 40
LOADS = (32, 8)
"""The rows in use by long requests that do not pass through the proxy: one replica has four times as many as the
other."""
AT_ONCE = 4


@dataclass(frozen=True)
class Replica:
    """A running service."""

    engine: Engine
    target: str
    metrics_target: str
    """The address of its metrics and probes."""


@asynccontextmanager
async def replicas(tokenizer: Tokenizer, *loads: int, heartbeat_s: float = HEARTBEAT_S) -> AsyncIterator[list[Replica]]:
    """Starts a service for each of ``loads``."""
    async with AsyncExitStack() as stack:
        running = []
        for load in loads:
            executor = FakeExecutor(
                vocab_size=tokenizer.vocab_size,
                next_token=lambda history, sampling: 97,
                seconds_per_step=0.01,
                num_blocks=1 << 14,
            )
            scheduler = SchedulerConfig(max_num_seqs=NUM_ROWS)
            engine = Engine(executor, scheduler)
            config = ServerConfig(
                "fake", "127.0.0.1:0", metrics_listen="127.0.0.1:0", scheduler=scheduler, heartbeat_s=heartbeat_s
            )
            server = Server(config, engine, lambda: tokenizer)
            target = await server.start()
            stack.push_async_callback(server.stop)
            assert server.metrics_target is not None
            running.append(Replica(engine, target, server.metrics_target))
            if not load:
                continue
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
            stream = GenerationServiceStub(channel).Generate()
            start = pb.GenerationStart(ref=1, text="hi", sampling=_sampling(4000, n=load))
            await stream.write(pb.GenerateRequest(start=start))
            while engine.load().running < load:  # noqa: ASYNC110 - the engine sends no event
                await asyncio.sleep(0.01)
        yield running


async def share_of_second(
    proxy: str, running: list[Replica], num_requests: int, has_begun: Callable[[], Awaitable[bool]] | None = None
) -> float:
    """Sends short requests through the proxy, a few at once, and returns the second replica's share of them. Requests
    before ``has_begun`` do not count."""
    async with grpc.aio.insecure_channel(proxy) as channel:
        complete = GenerationServiceStub(channel).Complete

        async def send(number: int) -> None:
            for _ in range(number):
                await complete(
                    pb.CompleteRequest(start=pb.GenerationStart(text="hi", sampling=_sampling(1))), timeout=60
                )

        while has_begun is not None and not await has_begun():
            await asyncio.gather(*(send(1) for _ in range(AT_ONCE)))
        before = [replica.engine.stats().finished for replica in running]
        await asyncio.gather(*(send(num_requests // AT_ONCE) for _ in range(AT_ONCE)))
        first, second = (replica.engine.stats().finished - had for replica, had in zip(running, before, strict=True))
        return second / (first + second)


def _sampling(max_tokens: int, n: int = 1) -> pb.SamplingParams:
    return pb.SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)
