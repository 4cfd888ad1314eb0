"""A well-behaved tenant: requests at steady times, each streamed and read at once; when its tokens came."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import grpc
import httpx

from hostile_bench.live_service import VICTIM_KEY, LiveService
from penstock.clients.bench_report import quantile
from penstock.v1 import generation_pb2 as pb
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

NUM_TOKENS = 32
_TIMEOUT_S = 60.0
_PROMPT = "The kernel of an operating system is"
LONG_PROMPT = "spaces between  words " * 2000 + " " * 30_000
"""74 KB, and few tokens: above the size from which a prompt waits for a thread that all tenants share."""


@dataclass
class Seen:
    """Of all requests of a phase, in seconds."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Why requests failed."""

    def add(self, began: float, times: list[float]) -> None:
        """A request whose tokens came at these times."""
        self.first_s.append(times[0] - began)
        self.gaps_s += [later - earlier for earlier, later in pairwise(times)]

    def quantiles(self) -> tuple[float, float, float, float]:
        """To the first token p50 and p99, between tokens p50 and p99."""
        first, gaps = sorted(self.first_s), sorted(self.gaps_s)
        first_50, first_99 = (quantile(first, share) if first else float("inf") for share in (0.5, 0.99))
        gap_50, gap_99 = (quantile(gaps, share) if gaps else float("inf") for share in (0.5, 0.99))
        return first_50, first_99, gap_50, gap_99


class Way(Protocol):
    """How the victim calls."""

    async def times(self) -> list[float]:
        """Makes a request; when its tokens came. Raises GrpcError, httpx.HTTPError and ValueError."""
        ...

    async def close(self) -> None:
        """Ends its connections."""
        ...


class ByGrpc:
    """Over the service's own port."""

    def __init__(self, service: LiveService, prompt: str = _PROMPT) -> None:
        self._channel = grpc.aio.insecure_channel(service.grpc)
        self._generate = GenerationServiceStub(self._channel).GenerateOne
        sampling = pb.Sampling(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        if prompt is LONG_PROMPT:
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=prompt)])
            self._request = pb.GenerateOneRequest(start=pb.Start(chat=chat, sampling=sampling))
        else:
            self._request = pb.GenerateOneRequest(start=pb.Start(text=prompt, sampling=sampling))

    async def times(self) -> list[float]:
        metadata = (("authorization", f"Bearer {VICTIM_KEY}"),)
        call = self._generate(self._request, metadata=metadata, timeout=_TIMEOUT_S)
        return [time.perf_counter() async for reply in call if reply.deltas]

    async def close(self) -> None:
        await self._channel.close()


class ByHttp:
    """Over the HTTP gateway."""

    def __init__(self, service: LiveService) -> None:
        self._client = httpx.AsyncClient(base_url=f"http://{service.http}", timeout=_TIMEOUT_S, trust_env=False)
        self._body = json.dumps(
            {"prompt": _PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0, "stream": True}
        )

    async def times(self) -> list[float]:
        headers = {"Authorization": f"Bearer {VICTIM_KEY}", "Content-Type": "application/json"}
        times = []
        async with self._client.stream("POST", "/v1/completions", content=self._body, headers=headers) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if '"error"' in line:
                    raise ValueError(line)
                if line.startswith("data: {"):
                    times.append(time.perf_counter())
        return times

    async def close(self) -> None:
        await self._client.aclose()


async def capacity(way: Way, at_once: int, seconds: float) -> float:
    """Requests a second that are answered where so many run at a time."""
    until, num_done = time.perf_counter() + seconds, 0

    async def again_and_again() -> None:
        nonlocal num_done
        while time.perf_counter() < until:
            await way.times()
            num_done += 1

    await asyncio.gather(*(again_and_again() for _ in range(at_once)))
    return num_done / seconds


async def load(way: Way, rate: float, seconds: float) -> Seen:
    """``rate`` requests a second for some time, and what was seen once all of them have ended."""
    seen = Seen()

    async def one() -> None:
        began = time.perf_counter()
        try:
            times = await way.times()
        except (grpc.aio.AioRpcError, httpx.HTTPError, ValueError) as error:
            seen.lost.append(error.code().name if isinstance(error, grpc.aio.AioRpcError) else type(error).__name__)
        else:
            seen.add(began, times) if times else seen.lost.append("no token")

    tasks = []
    for _ in range(max(1, int(rate * seconds))):
        tasks.append(asyncio.create_task(one()))
        await asyncio.sleep(1 / rate)
    await asyncio.gather(*tasks)
    return seen
