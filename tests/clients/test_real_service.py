"""The clients against the service itself, on a real socket, over a fake worker: the two agree on the contract."""

import asyncio
import hashlib
import json
import threading

import grpc
import pytest
import tokenizers
from letters import letters, next_letter
from tokenizers import decoders, models, pre_tokenizers

from penstock.clients import AsyncClient, Client, Delta, Finished, FinishReason, FrameRefused, RequestFailed
from penstock.clients.bench.grpc_target import GrpcCaller
from penstock.clients.bench.lengths import Uniform
from penstock.clients.bench.runner import run
from penstock.clients.bench.workload import DEFAULT_OPTIONS, ClosedLoop, OpenLoop, RandomLoad
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.requests import Options
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.auth.identity import AllowAll
from penstock.service.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant {% endif %}"
)


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory):
    """Id i is byte i; 256 ends an output, 257 begins a turn."""
    directory = tmp_path_factory.mktemp("tokenizer")
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(256 + rank): byte for rank, byte in enumerate(others)}
    library = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<|end|>", "<|turn|>"])
    library.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>", "chat_template": TEMPLATE}))
    return Tokenizer(directory)


class RealService:
    def __init__(self, tokenizer, seconds_per_step=0.0, authenticator=None, **scheduler):
        self._tokenizer = tokenizer
        self._authenticator = authenticator or AllowAll()
        self._scheduler = SchedulerConfig(**scheduler)
        self._seconds_per_step = seconds_per_step
        self.target = ""

    async def __aenter__(self):
        executor = FakeExecutor(vocab_size=258, next_token=next_letter, seconds_per_step=self._seconds_per_step)
        self.engine = Engine(executor, self._scheduler)
        config = ServerConfig(
            model_name="bytes",
            listen=self.target or "127.0.0.1:0",
            scheduler=self._scheduler,
            authenticator=self._authenticator,
        )
        self.server = Server(config, self.engine, lambda: self._tokenizer)
        self.target = await self.server.start()
        return self

    async def __aexit__(self, *_):
        await self.server.stop()

    async def idle(self):
        def in_use():
            stats = self.engine.stats()
            return stats.running or stats.waiting or stats.kv_usage

        async with asyncio.timeout(120):
            while in_use():  # noqa: ASYNC110 - the engine tells nobody
                await asyncio.sleep(0.002)


@pytest.fixture
async def real(byte_tokenizer):
    async with RealService(byte_tokenizer) as service:
        yield service


@pytest.fixture
async def client(real):
    async with AsyncClient(real.target) as client:
        yield client


async def test_a_request_from_its_start_to_its_end(client):
    await client.wait_ready(10)
    events = [event async for event in client.generate("hello", max_tokens=30, seed=3)]
    text = "".join(event.text for event in events if isinstance(event, Delta))
    assert text == letters(5, 30)
    assert isinstance(events[-1], Finished)
    assert (events[-1].reason, events[-1].seed) == (FinishReason.LENGTH, 3)
    assert events[-1].usage.output_tokens == 30
    assert events[-1].timings.total_ms > 0


async def test_stop_strings_choices_and_ids(client):
    answer = await client.complete([104, 105], stop="h", max_tokens=30, n=2)
    assert [choice.text for choice in answer.choices] == [letters(2, 5)] * 2
    assert answer.choices[1].token_ids == [ord(c) for c in letters(2, 6)]
    assert answer.choices[0].end.stop == "h"


async def test_the_tokenizer_and_the_model(client):
    assert (await client.model()).name == "bytes"
    assert await client.detokenize(await client.tokenize("héllo")) == "héllo"
    rendered = await client.render_chat([{"role": "user", "content": "hi"}])
    assert rendered.text == "<|turn|>user hi<|end|><|turn|>assistant "
    answer = await client.complete([{"role": "user", "content": "hi"}], max_tokens=3)
    assert answer.usage.prompt_tokens == len(rendered.token_ids)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (Options(temperature=-1), "temperature"),
        (Options(top_p=-1), "top_p"),
        (Options(max_tokens=0), "max_tokens"),
        (Options(stop_token_ids=[258]), "stop_token_ids"),
        (Options(tenant="other"), "tenant"),
    ],
)
async def test_a_refusal_names_the_field_and_fails_only_its_request(client, options, field):
    running = client.generate("on and on")
    await running.take()
    with pytest.raises(RequestFailed) as caught:
        await client.complete("hi", **options)
    failure = caught.value
    assert failure.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED)
    assert field in failure.message or any(field in name for name, _ in failure.violations)
    assert failure.request_id
    assert await running.take()
    running.leave()


async def test_a_request_that_goes_on_from_another(client):
    first = await client.complete([{"role": "user", "content": "hi"}], max_tokens=3, retain_ms=1000)
    assert first.finished.may_continue
    new = [{"role": "user", "content": "ho"}]
    turn = await client.complete(new, continue_from=first.request_id, max_tokens=3)
    rendered = await client.render_chat(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": first.text}, *new]
    )
    assert turn.usage.prompt_tokens == len(rendered.token_ids)
    with pytest.raises(RequestFailed, match="NOT_FOUND: no context of that request is kept"):
        await client.complete(new, continue_from="gone")


async def test_updates(client):
    async with client.generate("on and on") as request:
        await request.take()
        request.update(max_tokens=0, priority=1)
        refused = None
        while refused is None:
            refused = next((event for event in await request.take() if isinstance(event, FrameRefused)), None)
        assert refused.failure.violations[0][0] == "max_tokens"
        request.update(max_tokens=1)
        answer = await request.completion()
    assert answer.finish_reason is FinishReason.LENGTH


async def test_keys(byte_tokenizer, tmp_path, load_keys):
    keys = tmp_path / "keys"
    mine, gateway = (hashlib.sha256(key).hexdigest() for key in (b"mine", b"gateway"))
    keys.write_text(f"sha256:{mine} me\nsha256:{gateway} gate act-for-others\n")
    async with RealService(byte_tokenizer, authenticator=load_keys(keys)) as real:
        for key in [None, "wrong"] * 10:  # often, since the refusal races with the request's being written
            async with AsyncClient(real.target, api_key=key) as client:
                failures = await asyncio.gather(*(client.complete("hi") for _ in range(4)), return_exceptions=True)
            for failure in failures:
                assert isinstance(failure, RequestFailed)
                assert failure.code is grpc.StatusCode.UNAUTHENTICATED
                assert "Bearer" in failure.message
        async with AsyncClient(real.target, api_key="mine") as client:
            assert (await client.complete("hi", max_tokens=1)).text
            with pytest.raises(RequestFailed, match="PERMISSION_DENIED"):
                await client.complete("hi", tenant="other")
        async with AsyncClient(real.target, api_key="gateway") as client:
            assert (await client.complete("hi", max_tokens=1, tenant="other")).text


async def test_leaving_and_deadlines_free_everything(client, real):
    async for event in client.generate("on and on"):
        if isinstance(event, Delta):
            break
    async with client.generate("on and on") as request:
        await request.take()
    await real.idle()
    assert (await client.complete("still here", max_tokens=2)).usage.output_tokens == 2


async def test_a_deadline_is_the_services(byte_tokenizer):
    async with RealService(byte_tokenizer, seconds_per_step=0.01) as real, AsyncClient(real.target) as client:
        for timeout in (0.1, 1.0, 10.0):  # longer where a busy machine begins later
            with pytest.raises(RequestFailed) as caught:
                await client.complete("on and on", timeout=timeout)
            assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
            if caught.value.finished and caught.value.finished.usage.output_tokens:
                break
        assert caught.value.finished
        assert caught.value.finished.reason is FinishReason.DEADLINE
        assert caught.value.finished.usage.output_tokens > 0
        await real.idle()


async def test_256_requests_on_one_stream(client, real):
    answers = await asyncio.gather(*(client.complete("x" * (i % 40 + 1), max_tokens=20) for i in range(256)))
    assert [answer.text for answer in answers] == [letters(i % 40 + 1, 20) for i in range(256)]
    await real.idle()


async def test_a_full_queue_gives_a_retryable_failure_with_a_delay(byte_tokenizer):
    limits = {"max_num_seqs": 1, "max_queued_requests": 1}
    async with RealService(byte_tokenizer, seconds_per_step=0.01, **limits) as real, AsyncClient(real.target) as client:
        requests = [client.generate(f"on and on {i}") for i in range(8)]
        results = await asyncio.gather(*(request.take() for request in requests), return_exceptions=True)
        refusals = [result for result in results if isinstance(result, RequestFailed)]
        assert len(refusals) >= 6
        for refusal in refusals:
            assert refusal.code is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert refusal.retryable
            assert refusal.retry_after
            assert refusal.reason


async def test_a_service_that_stops_and_comes_back(byte_tokenizer):
    real = RealService(byte_tokenizer, seconds_per_step=0.005)
    async with real:
        client = AsyncClient(real.target)
        running = client.generate("on and on")
        await running.take()
    with pytest.raises(RequestFailed) as caught:
        await running.completion()
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    async with real:
        await client.wait_ready(20)
        assert (await client.complete("back", max_tokens=4)).text == letters(4, 4)
    await client.close()


async def test_a_closed_client_leaves_nothing_behind(byte_tokenizer):
    async with RealService(byte_tokenizer, seconds_per_step=0.001) as real:
        async with AsyncClient(real.target) as client:
            requests = [client.generate(f"on and on {i}") for i in range(20)]
            for request in requests:
                await request.take()
        with pytest.raises(RequestFailed):
            await requests[0].completion()
        await real.idle()


@pytest.fixture
def real_on_a_thread(byte_tokenizer):
    real, ready, stop = RealService(byte_tokenizer), threading.Event(), []

    async def main():
        loop, done = asyncio.get_running_loop(), asyncio.Event()
        stop.append(lambda: loop.call_soon_threadsafe(done.set))
        async with real:
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(120)
    yield real
    stop[0]()
    thread.join()


def test_the_synchronous_client(real_on_a_thread):
    with Client(real_on_a_thread.target) as client:
        assert client.complete("hello", max_tokens=5).text == letters(5, 5)
        assert "".join(piece.text for piece in client.stream("hello", max_tokens=5)) == letters(5, 5)
        with client.open_prompt("he", max_tokens=5) as request:
            request.append("llo")
            request.commit()
            assert request.completion().text == letters(5, 5)
        (old := client.generate("hello")).take()
        (new := client.generate("hello", max_tokens=5)).supersede(old)
        assert (new.completion().text, old.completion().finished.superseded) == (letters(5, 5), True)


def test_the_tools(tool, real_on_a_thread, tmp_path):
    target = real_on_a_thread.target
    done = tool.run("chat", "--target", target, text="/set max_tokens=5\nhi\nho\n/stats\n")
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 2), done.stderr
    assert "all: 2 answers, 10 tokens" in done.stderr
    lines = [{"id": i, "prompt": "x" * (i + 1), "max_tokens": 4} for i in range(50)]
    lines += [
        {"id": "bad", "prompt": "x", "temperature": -1},
        {"id": "ids", "prompt_token_ids": [300], "max_tokens": 4},
    ]
    (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = tool.run("generate", "--target", target, "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert done.returncode == 1
    records = {record["id"]: record for record in map(json.loads, (tmp_path / "out").read_text().splitlines())}
    assert all(records[i]["text"] == letters(i + 1, 4) for i in range(50))
    assert records["bad"]["error"]["code"] == records["ids"]["error"]["code"] == "INVALID_ARGUMENT"
    assert "temperature" in records["bad"]["error"]["message"]


def small_load(num_requests=30, **known):
    shape = {"arrivals": ClosedLoop(8), "prompt_tokens": Uniform(5, 40), "output_tokens": Uniform(1, 20)}
    return RandomLoad(vocab_size=256, num_requests=num_requests, **{**shape, **known})


@pytest.mark.parametrize("num_streams", [1, 3, None])
async def test_the_load_generator(real, num_streams):
    async with GrpcCaller(ConnectionOptions(real.target), num_streams=num_streams) as caller:
        report = await run(small_load(), caller)
    assert report.failures == {}
    for record in report.records:
        request = record.request
        assert "".join(map(chr, record.token_ids)) == letters(len(request.prompt_token_ids), request.max_tokens)
        assert record.prompt_tokens == len(request.prompt_token_ids)
        assert record.output_tokens == sum(record.message_tokens) == request.max_tokens
        assert record.finish_reason == "length"
        assert record.request_id
        assert record.sent_s < record.message_s[0] <= record.message_s[-1] <= record.ended_s
    await real.idle()


async def test_the_load_generator_continues_conversations_or_sends_them_again(real):
    load = small_load(9, turns=3, prompt_tokens=Uniform(20, 20), output_tokens=Uniform(10, 10))
    asked = []
    for resend in (False, True):
        async with GrpcCaller(ConnectionOptions(real.target), resend_context=resend) as caller:
            report = await run(load, caller)
            first, second = (next(r for r in report.records if r.request.number == number) for number in (0, 1))
            start = caller._start(second.request, [first])
            assert start.continue_from == ("" if resend else first.request_id)
            assert len(start.token_ids.ids) == (50 if resend else 20)
        assert report.failures == {}
        asked.append({record.request.number: (record.prompt_tokens, record.token_ids) for record in report.records})
    assert asked[0] == asked[1]
    assert {number % 3: told[0] for number, told in asked[0].items()} == {0: 20, 1: 50, 2: 80}


@pytest.mark.parametrize("num_streams", [1, None])
async def test_the_load_generator_counts_refusals_by_name(byte_tokenizer, num_streams):
    limits = {"max_num_seqs": 1, "max_queued_requests": 1}
    async with (
        RealService(byte_tokenizer, seconds_per_step=0.005, **limits) as real,
        GrpcCaller(ConnectionOptions(real.target), num_streams=num_streams) as caller,
    ):
        report = await run(small_load(20, arrivals=OpenLoop(2000)), caller)
        told = await run(small_load(1, options={**DEFAULT_OPTIONS, "top_p": 2}), caller)
    assert report.ok
    assert report.failures["RESOURCE_EXHAUSTED QUEUE_FULL"] >= 10
    refused = next(record for record in report.records if not record.is_ok)
    assert refused.retry_after_s
    assert "waiting" in refused.error
    assert told.records[0].status == "INVALID_ARGUMENT"
    assert "top_p" in told.records[0].error


@pytest.mark.parametrize("num_streams", [1, None])
async def test_the_load_generators_deadlines_and_early_end(byte_tokenizer, num_streams):
    async with RealService(byte_tokenizer, seconds_per_step=0.01) as real:
        long = small_load(4, output_tokens=Uniform(4000, 4000), prompt_tokens=Uniform(5, 5))
        async with GrpcCaller(ConnectionOptions(real.target), num_streams=num_streams, timeout_s=0.1) as caller:
            report = await run(long, caller)
        assert report.failures == {"DEADLINE_EXCEEDED DEADLINE": 4}
        assert all(record.output_tokens and record.prompt_tokens == 5 for record in report.records)
        assert {record.finish_reason for record in report.records} == {"deadline"}  # told by its Finished alone
        stop = asyncio.Event()
        async with GrpcCaller(ConnectionOptions(real.target), num_streams=num_streams) as caller:
            asyncio.get_running_loop().call_later(0.1, stop.set)
            report = await run(long, caller, stop=stop)
            assert report.failures == {"INTERRUPTED": 4}
            await real.idle()  # it ended them at the service too


async def test_the_load_generator_goes_on_when_the_service_comes_back(byte_tokenizer):
    real = RealService(byte_tokenizer, seconds_per_step=0.002)
    async with real:
        caller = GrpcCaller(ConnectionOptions(real.target))
        running = asyncio.create_task(run(small_load(8, output_tokens=Uniform(4000, 4000)), caller))
        while not real.engine.stats().running:  # noqa: ASYNC110 - the engine tells nobody
            await asyncio.sleep(0.005)
    failures = (await running).failures
    assert sum(failures.values()) == 8
    assert all(status.startswith("UNAVAILABLE") for status in failures)
    async with real, AsyncClient(real.target) as client:
        await client.wait_ready(20)
        report = await run(small_load(20), caller)
        assert len(report.ok) == 20
    await caller.close()
