"""The server as a whole: what it says of itself, and how it goes down."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from graphlib import TopologicalSorter
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app import server as server_module
from penstock.service.app.running_service import SERVICES
from penstock.v1 import generation_pb2_grpc, orca

Status = health_pb2.HealthCheckResponse
ENDLESS = 4000


def endless(seconds_per_step=0.005):
    return FakeExecutor(
        vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=seconds_per_step
    )


def start(ref=1, max_tokens=ENDLESS):
    return pb.GenerationStart(ref=ref, text="hi", sampling=pb.SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def frame(ref=1, max_tokens=ENDLESS):
    return pb.GenerateRequest(start=start(ref, max_tokens))


async def to_its_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


class TestItself:
    """Reflection, the model and the tokenizer."""

    @pytest.mark.parametrize("version", ["v1", "v1alpha"])
    async def test_reflection_describes_every_service_that_it_lists(self, start_service, version):
        service = await start_service()
        request = reflection_pb2.ServerReflectionRequest
        path = f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo"
        call = service.channel.stream_stream(
            path, request.SerializeToString, reflection_pb2.ServerReflectionResponse.FromString
        )()
        await call.write(request(list_services=""))
        names = {found.name for found in (await call.read()).list_services_response.service}
        reflections = {f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")}
        assert names == {*SERVICES, "grpc.health.v1.Health", orca.SERVICE, *reflections}
        for name in names:
            await call.write(request(file_containing_symbol=name))
            found = (await call.read()).file_descriptor_response.file_descriptor_proto
            files = {file.name: file for file in map(descriptor_pb2.FileDescriptorProto.FromString, found)}
            pool = descriptor_pool.DescriptorPool()
            for file in TopologicalSorter({file.name: file.dependency for file in files.values()}).static_order():
                pool.Add(files[file])
            assert pool.FindServiceByName(name).methods
        await call.done_writing()

    async def test_the_model(self, start_service):
        scheduler = SchedulerConfig(max_num_seqs=7, max_queued_requests=9)
        service = await start_service(scheduler=scheduler)
        model = (await service.model.GetModel(pb.GetModelRequest())).model
        assert (model.name, model.architecture, model.backend, model.dtype) == ("bytes", "fake", "fake", "float32")
        assert (model.quantization, model.kv_cache_dtype) == ("none", "float32")
        assert (model.vocab_size, model.max_model_len, list(model.eos_token_ids)) == (258, 4096, [256])
        assert (model.limits.max_num_seqs, model.limits.max_queued_requests, model.limits.kv_block_size) == (7, 9, 16)
        assert model.limits.max_num_batched_tokens == 2048
        assert model.has_chat_template
        assert {"chat", "prefix_caching"} <= set(model.features)
        assert model.version

    async def test_the_rows_of_a_step_are_those_that_its_budget_has_tokens_for(self, start_service):
        service = await start_service(scheduler=SchedulerConfig(max_num_seqs=7, max_num_batched_tokens=5))
        limits = (await service.model.GetModel(pb.GetModelRequest())).model.limits
        assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (5, 5)

    async def test_the_tokenizer(self, start_service, details_of):
        stub = (await start_service()).tokenizer
        text = "hé <|end|>"
        ids = list((await stub.Tokenize(pb.TokenizeRequest(text=text))).token_ids)
        assert ids == list(text.encode())
        assert (await stub.Detokenize(pb.DetokenizeRequest(token_ids=[*ids, 256]))).text == text
        shown = pb.DetokenizeRequest(token_ids=[256], include_special_tokens=True)
        assert (await stub.Detokenize(shown)).text == "<|end|>"
        described = await stub.DescribeTokens(pb.DescribeTokensRequest(token_ids=[97, 0xC3, 256]))
        assert [(token.text, token.is_special) for token in described.tokens] == [
            (b"a", False),
            (b"\xc3", False),
            (b"<|end|>", True),
        ]
        chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
        rendered = await stub.RenderChat(pb.RenderChatRequest(chat=chat))
        assert rendered.text == "<|turn|>user\nhi<|end|><|turn|>assistant\n"
        assert list(rendered.token_ids) == [257, *b"user\nhi", 256, 257, *b"assistant\n"]
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Detokenize(pb.DetokenizeRequest(token_ids=[0] * 5000 + [258]))
        assert details_of(error.value)["BadRequest"].field_violations[0].field == "token_ids[5000]"

    @pytest.mark.parametrize("name", ["Complete", "Tokenize"])
    async def test_a_message_that_is_too_large_or_no_protobuf(self, start_service, name):
        service = await start_service()
        where = "GenerationService" if name == "Complete" else "TokenizerService"
        call = service.channel.unary_unary(f"/penstock.v1.{where}/{name}")
        for raw, code in (
            (b"\xff\xff\xff", grpc.StatusCode.INVALID_ARGUMENT),
            (bytes(9 << 20), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call(raw)
            assert error.value.code() is code

    async def test_a_method_that_is_not_there(self, start_service):
        service = await start_service()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.channel.unary_unary("/penstock.v1.GenerationService/Nothing")(b"")
        assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED

    @pytest.mark.soak
    async def test_silent_clients_that_ping_are_not_cut_off(self, start_service):
        """A default server sends GOAWAY too_many_pings after 40 s of this."""
        service = await start_service(heartbeat_s=3600)
        options = [("grpc.keepalive_time_ms", 10_000), ("grpc.http2.max_pings_without_data", 0)]
        async with grpc.aio.insecure_channel(service.target, options=options) as channel:
            call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate()
            await call.write(pb.GenerateRequest(cancel=pb.GenerationCancel()))
            await asyncio.sleep(60)
            await call.write(frame(1, max_tokens=3))
            assert (await call.read()).accepted


class TestGoingDown:
    """SIGTERM, and what it is to whom."""

    async def test_running_requests_have_their_grace(self, start_service, new_reading):
        service = await start_service(endless())
        call = service.generation.Generate()
        await call.write(frame(1, max_tokens=30))
        reading = await new_reading().read_until(call, lambda r: r.outcomes[1].deltas > 0)
        stopping = asyncio.create_task(service.server.stop(grace_s=10))
        await asyncio.sleep(0)
        await call.write(frame(2))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await reading.read(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reading.outcomes[1].finished[0].reason == pb.FINISH_REASON_LENGTH
        assert len(reading.outcomes[1].text) == 30
        assert reading.outcomes[2].finished[0].status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        await stopping

    async def test_the_end_of_the_grace(self, start_service, new_reading):
        service = await start_service(endless())
        call = service.generation.Generate()
        await call.write(frame(1))
        reading = await new_reading().read_until(call, lambda r: r.outcomes[1].deltas > 0)
        single = service.generation.GenerateOne(pb.GenerateOneRequest(start=start()))
        await single.read()
        whole = service.generation.Complete(pb.CompleteRequest(start=start()))
        stopping = asyncio.create_task(service.server.stop(grace_s=0.2))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await reading.read(call)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        [finished] = reading.outcomes[1].finished
        assert finished.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert finished.usage.output_tokens > 0
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await to_its_end(single)
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await whole
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await asyncio.wait_for(stopping, HANGS_S)

    async def test_readers_that_stall_hold_nothing_up(self, start_service):
        service = await start_service(endless(seconds_per_step=0.0005))
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(service.target, options=options) as channel:
            call: Any = channel.stream_stream("/penstock.v1.GenerationService/Generate")()
            request = start()
            request.output.logprobs = 20
            await call.write(pb.GenerateRequest(start=request).SerializeToString())
            await asyncio.sleep(0.5)
            await asyncio.wait_for(service.server.stop(grace_s=0.1), HANGS_S)
            call.cancel()

    async def test_stop_is_safe_to_call_twice(self, start_service):
        service = await start_service()
        await asyncio.gather(service.server.stop(), service.server.stop())
        await service.server.stop()

    async def test_balancers_have_their_delay(self, start_service, monkeypatch):
        """New requests are taken while health says already that there should be none."""
        monkeypatch.setattr(server_module, "calm_collector", lambda: None)
        service = await start_service(drain_delay_s=3600.0)
        serving = asyncio.create_task(service.server.main_loop())
        await asyncio.sleep(0)
        service.server.request_stop()
        health = health_pb2_grpc.HealthStub(service.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING
        answer = await service.generation.Complete(pb.CompleteRequest(start=start(max_tokens=3)))
        assert answer.finished.status.code == 0
        assert not serving.done()
        service.server.request_stop()  # a second signal
        await asyncio.wait_for(serving, 120)
        await service.server.stop()

    async def test_reliability_figure_8_sigterm_under_100_streams(self, tmp_path, new_reading):
        """Figure 8, and Shown by 7: the demo model's service, as `penstock serve` runs it."""
        arguments = ["demo", "--listen={listen}", f"--shutdown-grace={GRACE_S}", "--kv-cache-memory-bytes=128M"]
        command = f"from penstock.service.app.command import main; sys.exit(main({arguments}))"
        readings = await sigterm(command, f"unix:{tmp_path / 's'}", new_reading, short=4)
        check_ends(readings)

    async def test_reliability_figure_8_sigterm_lets_those_finish_who_can(self, tmp_path, new_reading):
        """Figure 8: half of the requests end by themselves while the service waits; a second signal ends the others."""
        command = f"directory = pathlib.Path({str(tmp_path)!r}); {FAKE_SERVICE}"
        readings = await sigterm(command, f"unix:{tmp_path / 's'}", new_reading, short=60, waits=True)
        check_ends(readings)
        assert all(reading.outcomes[1].finished[0].status.code == 0 for reading in readings[:50])


def check_ends(readings):
    """Each request ended once: as it should, or because the service went down."""
    for reading in readings:
        [finished] = reading.outcomes[1].finished
        if finished.status.code:
            assert finished.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
        else:
            assert finished.reason == pb.FINISH_REASON_LENGTH


async def sigterm(command, listen, new_reading, short, waits=False):
    """Runs a service, and ends it under 100 streams, of which half have requests of ``short`` tokens. ``waits``: a
    second signal ends the service, once these have ended."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-c", NOTES_TIME + command.replace("{listen}", listen), stdout=subprocess.PIPE
    )
    try:
        async with grpc.aio.insecure_channel(listen) as channel:
            await asyncio.wait_for(channel.channel_ready(), 120)
            readings = await under_streams(channel, process, new_reading, short, waits)
        assert await asyncio.wait_for(process.wait(), HANGS_S) == 0
        return readings
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def under_streams(channel, process, new_reading, short, waits):
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    watcher = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
    assert (await watcher.read()).status == Status.SERVING
    calls = [stub.Generate(iter([frame(1, max_tokens=short if number < 50 else ENDLESS)])) for number in range(99)]
    single = stub.GenerateOne(pb.GenerateOneRequest(start=start()))
    readings = [new_reading() for _ in calls]
    for call, reading in zip(calls, readings, strict=True):
        await reading.read_until(call, lambda r: r.outcomes[1].deltas > 0)
    await single.read()
    sent = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    assert (await watcher.read()).status == Status.NOT_SERVING
    while not (line := await process.stdout.readline()).startswith(b"not ready"):
        pass
    assert float(line.split()[2]) >= sent
    if waits:
        for call, reading in zip(calls[:50], readings, strict=False):
            await reading.read(call)
        os.kill(process.pid, signal.SIGTERM)
    ends = await asyncio.gather(
        *[reading.read(call) for call, reading in zip(calls[50 * waits :], readings[50 * waits :], strict=True)],
        return_exceptions=True,
    )
    errors = [end for end in ends if isinstance(end, BaseException)]
    assert {error.code() for error in errors if isinstance(error, grpc.aio.AioRpcError)} == {
        grpc.StatusCode.UNAVAILABLE
    }
    assert all(isinstance(error, grpc.aio.AioRpcError) for error in errors)
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await to_its_end(single)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    return readings


GRACE_S = 2.0
HANGS_S = 120.0
"""The grace and two seconds are what is promised; but a machine that runs tests may stand still for some."""
# By the clock that both processes share: when the service said that it is not ready, by its own account.
NOTES_TIME = """
import asyncio, pathlib, sys, time
from penstock.service.rpc.health import Health

set_ready = Health.set_ready

def noted(self, ready):
    if self.is_ready and not ready:
        print("not ready", time.monotonic(), flush=True)
    set_ready(self, ready)

Health.set_ready = noted
"""
FAKE_SERVICE = """
import tokenizers
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.text.tokenizer import Tokenizer

async def main():
    vocab = {chr(ord("a") + index): index for index in range(26)}
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[])).save(str(directory / "tokenizer.json"))
    executor = FakeExecutor(
        vocab_size=26, num_blocks=30000, next_token=lambda history, sampling: 0, seconds_per_step=0.01
    )
    config = ServerConfig(model_name="fake", listen="{listen}", grace_s=3600.0)
    server = Server(config, Engine(executor), lambda: Tokenizer(directory))
    assert await server.run()

asyncio.run(main())
"""
