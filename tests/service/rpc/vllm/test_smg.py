"""smg, the real gateway, in front of real services: OpenAI's API, ends of all kinds, and routing by prefix."""

import asyncio
import json
import random
import signal
from contextlib import AsyncExitStack

import grpc
import psutil
import pytest
from serve_process import serving, target_of
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub
from smg_process import running_smg
from waiting import until

from penstock.clients import AsyncClient
from penstock.clients.chat_messages import ChatMessage
from penstock.scheduler.testing.fake_executor import FakeExecutor

QUESTION = [{"role": "user", "content": "What does a kernel do?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
FLAGS = ("--contracts=vllm", "--port=0", "--metrics-listen=off", "--admin-listen=off", "--kv-cache-memory-bytes=64M")
ENDLESS = {"max_tokens": 12_000, "ignore_eos": True}


class Replica:
    """A service behind smg."""

    def __init__(self, process, target):
        self.process = psutil.Process(process.pid)
        self.target = target
        self.channel = grpc.aio.insecure_channel(target)
        self.stub = VllmEngineStub(self.channel)

    async def num_live(self):
        return (await self.stub.GetServerInfo(vllm.GetServerInfoRequest())).active_requests

    def worker(self):
        """Its worker's process."""
        [worker] = [child for child in self.process.children() if "penstock.models.worker" in " ".join(child.cmdline())]
        return worker


@pytest.fixture
async def replicas(request):
    """As many services as the parameter."""
    async with AsyncExitStack() as stack:
        starting = [asyncio.to_thread(stack.enter_context, serving("demo", *FLAGS)) for _ in range(request.param)]
        found = [Replica(process, target_of(greeting)) for process, greeting in await asyncio.gather(*starting)]
        for replica in found:
            stack.push_async_callback(replica.channel.close)
        yield found


async def post(http, path, **body):
    response = await http.post(path, json={"model": "demo", "temperature": 0, **body})
    assert response.status_code == 200, response.text
    return response.json()


async def events_of(response):
    async for line in response.aiter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


async def text_of(http, **body):
    """The text of a streamed chat."""
    body = {"model": "demo", "temperature": 0, "stream": True, "messages": QUESTION, **body}
    text = ""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for event in events_of(response):
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
    return text


async def check_api(http):
    chat = await post(http, "/v1/chat/completions", messages=QUESTION, max_tokens=12, logprobs=True, n=2)
    first, second = (choice["message"]["content"] for choice in chat["choices"])
    assert first == second
    assert chat["usage"]["completion_tokens"] == 24
    assert len(chat["choices"][0]["logprobs"]["content"]) == 12
    assert await text_of(http, max_tokens=12) == first
    stopped = await post(http, "/v1/chat/completions", messages=QUESTION, max_tokens=12, stop=[first[4:8]])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["message"]["content"] == first[:4]
    completion = await post(http, "/v1/completions", prompt="Once upon a time", max_tokens=8)
    assert completion["choices"][0]["text"]
    assert completion["usage"]["completion_tokens"] == 8
    response = await post(http, "/v1/responses", input=QUESTION[0]["content"], max_output_tokens=12)
    assert response["output"][0]["content"][0]["text"] == first
    vector = await post(http, "/v1/embeddings", input="a text")
    assert len(vector["data"][0]["embedding"]) == 256
    answer = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": answer}}
    shaped = await post(http, "/v1/chat/completions", messages=QUESTION, response_format=schema, max_tokens=200)
    if shaped["choices"][0]["finish_reason"] == "stop":
        assert json.loads(shaped["choices"][0]["message"]["content"])["a"] in (1, 2)
    called = await post(
        http, "/v1/chat/completions", messages=QUESTION, tools=[WEATHER], tool_choice="required", max_tokens=100
    )
    [call] = called["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "weather"
    assert "city" in json.loads(call["function"]["arguments"])
    refused = await http.post("/v1/completions", json={"model": "demo", "prompt": "a", "max_tokens": 2, "logprobs": 21})
    assert refused.status_code == 400


async def live(replicas):
    return sum([await replica.num_live() for replica in replicas])


async def wait_for(replicas, number):
    while await live(replicas) != number:  # noqa: ASYNC110 - the services send no event
        await asyncio.sleep(0.01)


async def check_cancels(http, replicas):
    """A client that disconnects: during a stream, smg sends Abort; during a whole answer, smg resets the call."""
    body = {"model": "demo", "messages": QUESTION, **ENDLESS}
    async with http.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        async for _ in events_of(response):
            await wait_for(replicas, 1)
            break
    await wait_for(replicas, 0)
    waiting = asyncio.create_task(http.post("/v1/chat/completions", json=body))
    await wait_for(replicas, 1)
    waiting.cancel()
    await wait_for(replicas, 0)


async def check_a_killed_worker(http, replica):
    """Its stream ends with the same tokens as without the failure."""
    body = {"max_tokens": 600, "ignore_eos": True}
    expected = await text_of(http, **body)
    streaming = asyncio.create_task(text_of(http, **body))
    await wait_for([replica], 1)
    worker = replica.worker()
    worker.send_signal(signal.SIGKILL)
    assert await streaming == expected
    assert replica.worker().pid != worker.pid


@pytest.mark.parametrize("replicas", [1], indirect=True)
async def test_openais_api_cancels_and_a_killed_worker(replicas, tmp_path):
    async with running_smg(tmp_path, *(f"grpc://{replica.target}" for replica in replicas)) as http:
        await check_api(http)
        await check_cancels(http, replicas)
        await check_a_killed_worker(http, *replicas)


def prompt(rng):
    """A conversation's long beginning."""
    return [{"role": "system", "content": "".join(rng.choice("abcdefghij ") for _ in range(400))}]


def letter(history, sampling):
    return ord("a") + len(history) % 26


async def test_requests_reach_the_replica_that_holds_their_prefix(start_engine, tmp_path):
    """Each replica caches some prefixes before smg connects, so smg knows them only from the events."""
    engines = [await start_engine(FakeExecutor(vocab_size=258, next_token=letter), model_name="demo") for _ in range(2)]
    rng = random.Random(5)
    prompts = [prompt(rng) for _ in range(8)]
    holders = [number % 2 for number in range(8)]
    async with running_smg(tmp_path, *(f"grpc://{engine.service.target}" for engine in engines)) as http:
        for messages, holder in zip(prompts, holders, strict=True):
            text = "<|turn|>system\n" + messages[0]["content"]
            ids = [257, *text.removeprefix("<|turn|>").encode()]
            await engines[holder].output(ids, max_tokens=1)
        await until(lambda: all(engine.service.engine.stats().requests == 0 for engine in engines))
        await asyncio.sleep(0.3)  # wait for the events to arrive
        num_right = 0
        for number in range(40):
            index = rng.randrange(8)
            before = [engine.service.engine.stats().finished for engine in engines]
            question = {"role": "user", "content": f"question {number}"}
            await post(http, "/v1/chat/completions", messages=[*prompts[index], question], max_tokens=2)
            reached = [e.service.engine.stats().finished - b for e, b in zip(engines, before, strict=True)]
            num_right += reached.index(1) == holders[index]
        assert num_right >= 38, f"{num_right} of 40 reached the replica with their prefix"


@pytest.mark.soak
@pytest.mark.parametrize("replicas", [2], indirect=True)
async def test_of_200_requests_at_least_95_percent_reach_their_prefix(replicas, tmp_path, capsys):
    rng = random.Random(6)
    words = ["time", "river", "stone", "cloud", "green", "house", "winter", "paper", "engine", "light", "garden"]
    prompts = [[{"role": "system", "content": " ".join(rng.choices(words, k=200))}] for _ in range(20)]
    for number, messages in enumerate(prompts):
        async with AsyncClient(replicas[number % 2].target) as client:
            await client.complete([ChatMessage(role="system", content=messages[0]["content"])], max_tokens=1)
    limit = asyncio.Semaphore(4)
    async with running_smg(tmp_path, *(f"grpc://{replica.target}" for replica in replicas)) as http:

        async def is_cached(number):
            question = {"role": "user", "content": f"question {number}"}
            async with limit:
                answer = await post(
                    http, "/v1/chat/completions", messages=[*prompts[number % 20], question], max_tokens=4
                )
            usage = answer["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"] > 0.8 * usage["prompt_tokens"]

        num_cached = sum(await asyncio.gather(*map(is_cached, rng.sample(range(200), 200))))
    with capsys.disabled():
        print(f"\n{num_cached} of 200 requests reached the replica that holds their prefix")
    assert num_cached >= 190
