"""A well-behaved tenant: requests at a steady rate, each streamed and read at once, with the times of its tokens."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

import grpc
import httpx

import penstock.v1 as pb
from hostile_bench.live_service import VICTIM_KEY, LiveService
from penstock.clients.bench.report import quantile
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

NUM_TOKENS = 32
_TIMEOUT_S = 60.0
_PROMPT = "The kernel of an operating system is"
LONG_PROMPT = "spaces between  words " * 2000 + " " * 30_000
"""74 KB, but few tokens: long enough for the threads that tokenize the long prompts of all tenants."""


@dataclass
class Seen:
    """What the victim saw, in seconds."""

    first_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    """Why requests failed."""

    def add(self, began: float, times: list[float]) -> None:
        """Adds a request whose tokens came at these times."""
        self.first_s.append(times[0] - began)
        self.gaps_s += [later - earlier for earlier, later in pairwise(times)]

    def join(self, other: "Seen") -> None:
        """Adds what was seen in another phase."""
        self.first_s += other.first_s
        self.gaps_s += other.gaps_s
        self.lost += other.lost

    def as_json(self) -> dict[str, dict[str, float | int | None]]:
        """The number of samples and their p50 and p99 in milliseconds, to the first token and between tokens."""
        return {"first_token": _figures(self.first_s), "between_tokens": _figures(self.gaps_s)}


def _figures(samples_s: list[float]) -> dict[str, float | int | None]:
    ordered = sorted(samples_s)
    p50, p99 = ((quantile(ordered, share) * 1e3 if ordered else None) for share in (0.5, 0.99))
    return {"num_samples": len(ordered), "p50_ms": p50, "p99_ms": p99}


class Way(Protocol):
    """How the victim calls."""

    async def times(self) -> list[float]:
        """Makes a request; returns when its tokens came. Raises AioRpcError, httpx.HTTPError and ValueError."""
        ...

    async def close(self) -> None:
        """Closes its connections."""
        ...


class ByGrpc:
    """Over the service's own port."""

    def __init__(self, service: LiveService, prompt: str = _PROMPT) -> None:
        self._channel = grpc.aio.insecure_channel(service.grpc)
        self._generate = GenerationServiceStub(self._channel).GenerateOne
        sampling = pb.SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, temperature=0.0)
        if prompt is LONG_PROMPT:
            chat = pb.Chat(messages=[pb.ChatMessage(role="user", content=prompt)])
            self._request = pb.GenerateOneRequest(start=pb.GenerationStart(chat=chat, sampling=sampling))
        else:
            self._request = pb.GenerateOneRequest(start=pb.GenerationStart(text=prompt, sampling=sampling))

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
                elif line == "data: [DONE]":
                    return times
        raise ValueError("the stream broke off")

    async def close(self) -> None:
        await self._client.aclose()


def by_long_prompts(service: LiveService) -> Way:
    """Calls over gRPC with long prompts."""
    return ByGrpc(service, LONG_PROMPT)


async def capacity(way: Way, at_once: int, seconds: float) -> float:
    """Returns how many requests a second are answered if ``at_once`` of them run at a time."""
    began, num_done = time.perf_counter(), 0

    async def repeat() -> None:
        nonlocal num_done
        while time.perf_counter() < began + seconds:
            await way.times()
            num_done += 1

    await asyncio.gather(*(repeat() for _ in range(at_once)))
    return num_done / (time.perf_counter() - began)


async def load(way: Way, rate: float, seconds: float) -> Seen:
    """Sends ``rate`` requests a second for some time; returns what was seen when all of them have ended."""
    seen = Seen()

    async def request() -> None:
        began = time.perf_counter()
        try:
            times = await way.times()
        except grpc.aio.AioRpcError as error:
            seen.lost.append(f"{error.code().name}: {error.details()}")
        except (httpx.HTTPError, ValueError) as error:
            seen.lost.append(f"{type(error).__name__}: {error}")
        else:
            seen.add(began, times) if times else seen.lost.append("no token")

    began = time.perf_counter()
    tasks = []
    for index in range(max(1, round(rate * seconds))):
        await asyncio.sleep(began + index / rate - time.perf_counter())
        tasks.append(asyncio.create_task(request()))
    await asyncio.sleep(max(0.0, began + seconds - time.perf_counter()))
    await asyncio.gather(*tasks)
    return seen
