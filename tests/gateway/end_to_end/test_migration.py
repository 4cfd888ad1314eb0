"""Two live services, one of which is killed under its streams: each ends with the tokens that it would have had, over
gRPC and over HTTP."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import openai
import pytest
from serve_process import serving, target_of

import penstock.v1 as pb
from penstock.clients import AsyncClient, RequestFailed
from penstock.clients.events import Completion, Delta, collect
from penstock.clients.requests import build_start
from penstock.v1.generation_pb2_grpc import GenerationServiceStub

SERVE = ("demo", "--port=0", "--dtype=float32", "--max-model-len=1024", "--threads=1", "--kv-cache-memory-bytes=64M")
STORY = "Once upon a time, in a town by the sea, there was a"
CHAT: Any = [{"role": "user", "content": "Tell me a long story about the sea."}]
SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 100, "maximum": 99999}, "minItems": 100}
REQUESTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "greedy": (STORY, {"temperature": 0.0, "seed": 1}),
    "sampled": (STORY, {"seed": 11}),
    "two choices": (STORY, {"n": 2, "seed": 5, "presence_penalty": 1.0, "frequency_penalty": 0.5}),
    "stop strings": (STORY, {"seed": 4, "stop": ["\u2603 never", "e q"]}),
    "log-probabilities": (STORY, {"seed": 9, "logprobs": 2, "repetition_penalty": 1.1}),
    "constrained": (CHAT, {"seed": 3, "ignore_eos": False, "constraint": {"json_schema": SCHEMA}}),
    "parsed": (CHAT, {"seed": 8, "parse_reasoning": True}),
    "only text": (CHAT, {"seed": 6, "format": "text"}),
}
MAX_TOKENS = 200
NUM_BEFORE = 20
"""Tokens that each request has when its replica is killed."""


@pytest.fixture(scope="module")
def survivor() -> Iterator[str]:
    with serving(*SERVE) as (_, greeting):
        yield target_of(greeting)


@pytest.fixture
def victim() -> Iterator[tuple[Any, str]]:
    with serving(*SERVE) as (process, greeting):
        yield process, target_of(greeting)


def start_of(name: str) -> Any:
    prompt, options = REQUESTS[name]
    return build_start(prompt, {"max_tokens": MAX_TOKENS, "ignore_eos": True, **options})


def state(completion: Completion) -> Any:
    """What may not depend on replicas."""
    usage = completion.usage
    return completion.choices, usage.prompt_tokens, usage.output_tokens, completion.finished.seed


async def run(client: AsyncClient, name: str, note: Callable[[str], None] = lambda name: None) -> Any:
    """The whole output of a request, whose deltas are noted."""
    request, events = client.send(start_of(name)), []
    async with request:
        while some := await request.take():
            for event in some:
                if isinstance(event, Delta):
                    note(name)
            events += some
    return state(collect(events, REQUESTS[name][1].get("n", 1)))


async def test_tokens_that_no_output_can_begin_with(survivor: str) -> None:
    """Forged ones: the constraint refuses them in band, and all else goes on."""
    start = start_of("constrained")
    async with grpc.aio.insecure_channel(survivor) as channel:
        stub = GenerationServiceStub(channel)
        call: Any = stub.GenerateOne(pb.GenerateOneRequest(start=start))
        start.resume_from.ticket = (await call.read()).accepted.resume_ticket
        call.cancel()
        start.resume_from.choices.add(token_ids=range(40))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            async for _ in stub.GenerateOne(pb.GenerateOneRequest(start=start)):
                pass
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # GRAMMAR
        del start.resume_from.choices[:]
        start.resume_from.choices.add()
        messages = [message async for message in stub.GenerateOne(pb.GenerateOneRequest(start=start))]
        assert messages[-1].finished.usage.output_tokens > 20


HTTP: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 3},
    "two choices": {"n": 2, "seed": 4, "logprobs": True, "top_logprobs": 2},
    "stop": {"seed": 5, "stop": ["\u2603 never", "e q"], "stream_options": {"include_usage": True}},
    "JSON": {"seed": 6, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
}


def without_ids(chunk: Any) -> Any:
    """A chunk without what differs from run to run: the ids of the request, the time, and the cached tokens."""
    plain = chunk.model_dump(exclude={"id", "created"})
    (plain.get("usage") or {}).pop("prompt_tokens_details", None)
    return plain


def joined(chunks: list[Any]) -> Any:
    """The whole answer, however it was divided into chunks."""
    texts: dict[int, str] = {}
    logprobs: dict[int, list[Any]] = {}
    rest = []
    for chunk in map(without_ids, chunks):
        for choice in chunk["choices"]:
            index, content = choice["index"], choice["delta"].pop("content", None)
            texts[index] = texts.get(index, "") + (content or "")
            logprobs.setdefault(index, []).extend((choice.pop("logprobs", None) or {}).get("content") or [])
            rest += [(index, choice["delta"].get("role"), choice["finish_reason"])] if choice["finish_reason"] else []
        rest += [chunk["usage"]] if chunk.get("usage") else []
    return texts, logprobs, sorted(map(str, rest))


async def ask(client: openai.AsyncOpenAI, name: str, note: Callable[[str], None] = lambda name: None) -> Any:
    options = {"max_tokens": MAX_TOKENS, **HTTP[name]}
    ignore = {} if name == "JSON" else {"ignore_eos": True}
    chunks = []
    stream: Any = await client.chat.completions.create(
        model="demo", messages=CHAT, stream=True, extra_body=ignore, **options
    )
    async for chunk in stream:
        chunks.append(chunk)
        note(name)
    return joined(chunks)


@asynccontextmanager
async def clients(
    target: str, http_before: Callable[..., Any]
) -> AsyncIterator[tuple[AsyncClient, openai.AsyncOpenAI, httpx.AsyncClient]]:
    """A client of the services, one of a gateway in front of them, and one for the gateway's other pages."""
    options: dict[str, Any] = {"api_key": "none", "max_retries": 0, "timeout": 120}
    async with (
        AsyncClient(target) as client,
        http_before(target) as (_, http),
        openai.AsyncOpenAI(base_url=f"{http.base_url}/v1", **options) as api,
    ):
        yield client, api, http


async def test_streams_go_on(survivor: str, victim: tuple[Any, str], http_before: Callable[..., Any]) -> None:
    process, target = victim
    async with clients(survivor, http_before) as (client, api, _):
        undisturbed = {name: await run(client, name) for name in REQUESTS}
        undisturbed_http = {name: await ask(api, name) for name in HTTP}
    counts: Counter[str] = Counter()

    def note(name: str) -> None:
        counts[name] += 1
        if len(counts) == len(REQUESTS) + len(HTTP) and min(counts.values()) >= NUM_BEFORE:
            process.kill()

    async with clients(f"{target},{survivor}", http_before) as (client, api, http):
        outcomes, outcomes_http = await asyncio.gather(
            asyncio.gather(*(run(client, name, note) for name in REQUESTS)),
            asyncio.gather(*(ask(api, name, lambda name: note(f"HTTP {name}")) for name in HTTP)),
        )
        for name, outcome in zip(REQUESTS, outcomes, strict=True):
            assert outcome == undisturbed[name], name
        for name, outcome in zip(HTTP, outcomes_http, strict=True):
            assert outcome == undisturbed_http[name], name
        assert client.num_moves
        page = (await http.get("/metrics")).text
        [moves] = [line for line in page.splitlines() if line.startswith("penstock_gateway_moves_total ")]
        assert float(moves.split()[1])
        assert (await client.complete(STORY, max_tokens=3)).usage.output_tokens == 3
        assert (await ask(api, "greedy")) == undisturbed_http["greedy"]
    async with AsyncClient(target) as alone:
        with pytest.raises(RequestFailed):
            await alone.complete(STORY)
