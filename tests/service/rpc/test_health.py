"""Health and heartbeats report the state of the engine: its worker dies, is replaced or cannot be replaced."""

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from letters import begin
from waiting import until

import penstock.v1 as pb
from penstock.clients.health import LIVENESS
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.app.running_service import SERVICES

Status = health_pb2.HealthCheckResponse
HANGS_S = 120.0
"""The promise is shorter, but a machine that runs tests may stand still for some seconds."""


async def health_of(channel, service=""):
    return (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))).status


async def test_health(start_service):
    service = await start_service()
    for name in ("", LIVENESS, *SERVICES):
        assert await health_of(service.channel, name) == Status.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await health_of(service.channel, "nothing")
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_reliability_figure_4_health_follows_the_worker(start_service, details_of):
    service = await start_service()
    service.executor.may_start.clear()
    watchers = [
        health_pb2_grpc.HealthStub(service.channel).Watch(health_pb2.HealthCheckRequest(service=name))
        for name in ("", SERVICES[0], "")
    ]
    assert [(await watcher.read()).status for watcher in watchers] == [Status.SERVING] * 3
    watchers.pop().cancel()  # one that leaves takes nothing from the others
    service.executor.die()
    async with asyncio.timeout(HANGS_S):
        assert [(await watcher.read()).status for watcher in watchers] == [Status.NOT_SERVING] * 2
    assert await health_of(service.channel, LIVENESS) == Status.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.generation.Complete(pb.CompleteRequest(start=begin().start))
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert details_of(error.value)["RetryInfo"].retry_delay.ToMilliseconds() == 1000
    service.executor.may_start.set()
    assert [(await watcher.read()).status for watcher in watchers] == [Status.SERVING] * 2
    await service.generation.Complete(pb.CompleteRequest(start=begin(max_tokens=3).start))


async def test_a_state_change_is_reported_on_streams(start_service):
    service = await start_service()
    call = service.generation.Generate()
    await call.write(pb.GenerateRequest(cancel=pb.GenerationCancel()))
    await until(lambda: service.server._running.generation._outboxes)
    service.engine.drain()
    message = await call.read()
    assert message.heartbeat.state == pb.SERVICE_STATE_DRAINING
    assert service.engine.state is EngineState.DRAINING


async def test_streams_report_and_survive_a_worker_replacement(start_service, new_reading):
    service = await start_service()
    service.executor.may_start.clear()
    call = service.generation.Generate()
    await call.write(pb.GenerateRequest(cancel=pb.GenerationCancel()))
    await until(lambda: service.server._running.generation._outboxes)
    service.executor.die()
    assert (await call.read()).heartbeat.state == pb.SERVICE_STATE_RECOVERING
    service.executor.may_start.set()
    assert (await call.read()).heartbeat.state == pb.SERVICE_STATE_SERVING
    await call.write(begin(max_tokens=3))
    await call.done_writing()
    assert [end.status.code for end in (await new_reading().read(call)).outcomes[1].finished] == [0]


async def test_a_failed_worker_replacement_is_final_and_reported_on_streams(start_service, details_of):
    executor = FakeExecutor(vocab_size=258)
    service = await start_service(executor, engine=Engine(executor, restart_delay_s=0.001))
    executor.fails_to_start.extend([ExecutorError("no memory", blames_step=True)] * 5)
    call = service.generation.Generate()
    await call.write(pb.GenerateRequest(cancel=pb.GenerationCancel()))
    await until(lambda: service.server._running.generation._outboxes)
    executor.die()
    while (await call.read()).heartbeat.state != pb.SERVICE_STATE_FAILED:
        pass
    await call.write(begin())
    [finished] = (await call.read()).finished
    assert finished.status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    assert details_of(finished.status)["RetryInfo"].retry_delay.ToMilliseconds() == 5000


async def test_an_idle_stream_has_heartbeats(start_service):
    service = await start_service(heartbeat_s=0.05)
    call = service.generation.Generate()
    await call.write(pb.GenerateRequest(cancel=pb.GenerationCancel()))
    for _ in range(3):
        assert (await call.read()).heartbeat.state == pb.SERVICE_STATE_SERVING
