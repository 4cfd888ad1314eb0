"""WatchStats: where the engine stands, at once and then in every interval."""

import asyncio
import dataclasses
from datetime import timedelta

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.testing.fake_executor import FakeExecutor


@pytest.fixture
def start_watched(start_service):
    """A service with an administration, whose every output is the letter a."""

    async def start(**config):
        executor = FakeExecutor(
            vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=0.002, num_blocks=256
        )
        return await start_service(executor, admin_listen="127.0.0.1:0", **config)

    return start


def watch(service, **fields):
    return service.admin.WatchStats(pb.WatchStatsRequest(**fields))


def start(ref=1, text="x" * 64, **sampling):
    return pb.GenerateRequest(start=pb.GenerationStart(ref=ref, text=text, sampling=pb.SamplingParams(**sampling)))


async def test_the_first_answer_comes_at_once(start_watched):
    service = await start_watched()
    async with asyncio.timeout(120):
        stats = await watch(service, interval=timedelta(hours=1)).read()
    assert stats.state == pb.SERVICE_STATE_SERVING
    assert (stats.live_requests, stats.running_rows, stats.waiting_choices, stats.steps) == (0, 0, 0, 0)
    assert not stats.HasField("predicted_ttft")
    assert not stats.HasField("step_duration")
    assert not stats.tenants


async def test_what_runs_is_reported(start_watched, new_reading):
    service = await start_watched(scheduler=SchedulerConfig(max_num_seqs=2))
    call = service.generation.Generate(iter([start(ref=ref, max_tokens=100, ignore_eos=True) for ref in (1, 2, 3)]))
    await new_reading().read_until(call, lambda reading: reading.outcomes[1].deltas > 5)
    answers = watch(service, interval=timedelta(seconds=0.1))
    stats = await answers.read()
    assert (stats.live_requests, stats.running_rows, stats.waiting_choices) == (3, 2, 1)
    assert 0 < stats.kv_usage < 1
    (tenant,) = stats.tenants
    assert (tenant.tenant, tenant.live_requests) == ("default", 3)
    assert tenant.served_tokens >= 64
    following = await answers.read()
    assert following.uptime.ToMilliseconds() >= stats.uptime.ToMilliseconds() + 95
    assert following.steps > stats.steps
    assert following.output_tokens > stats.output_tokens


async def test_totals_are_those_of_what_ended(start_watched):
    service = await start_watched(scheduler=SchedulerConfig(max_queued_requests=1))
    for _ in range(2):
        prompt = pb.GenerationStart(text="x" * 64, sampling=pb.SamplingParams(max_tokens=3, ignore_eos=True))
        await service.generation.Complete(pb.CompleteRequest(start=prompt))
    stats = await watch(service).read()
    assert (stats.finished_requests, stats.output_tokens) == (2, 6)
    assert (stats.prefill_tokens, stats.cached_tokens) == (64 + 16, 48)
    assert (stats.refused_requests, stats.preemptions, stats.worker_restarts) == (0, 0, 0)
    assert stats.cached_blocks > 0
    assert stats.step_duration.ToMicroseconds() > 0


async def test_the_last_seconds_have_what_ended_in_them(start_watched):
    service = await start_watched()
    for _ in range(2):
        prompt = pb.GenerationStart(text="x" * 64, sampling=pb.SamplingParams(max_tokens=3, ignore_eos=True))
        await service.generation.Complete(pb.CompleteRequest(start=prompt))
    with pytest.raises(grpc.aio.AioRpcError):
        await service.generation.Complete(
            pb.CompleteRequest(start=pb.GenerationStart(text="x", sampling=pb.SamplingParams(top_p=7)))
        )
    stats = await watch(service).read()
    window = stats.last_60s
    assert 0 < window.duration.ToMilliseconds() <= stats.uptime.ToMilliseconds() + 1000
    assert (window.finished_requests, window.output_tokens, window.prefill_tokens) == (2, 6, 64 + 16)
    first, between = window.time_to_first_token, window.inter_token_latency
    assert (first.count, between.count) == (2, 4)
    # A step takes 2 ms, and percentiles are within 5 %.
    for latency in (first, between):
        found = [each.ToMicroseconds() for each in (latency.p50, latency.p90, latency.p99)]
        assert found == sorted(found)
        assert found[0] > 1900
    assert stats.last_10s.duration.ToSeconds() <= 60
    assert stats.last_10s.finished_requests <= 2


async def test_before_the_first_request_the_last_seconds_are_empty(start_watched):
    stats = await watch(await start_watched()).read()
    for window in (stats.last_10s, stats.last_60s):
        assert (window.finished_requests, window.output_tokens, window.prefill_tokens) == (0, 0, 0)
        assert window.time_to_first_token == window.inter_token_latency == pb.LatencyPercentiles()


async def test_the_use_of_host_memory_is_reported(start_service):
    executor = FakeExecutor(
        vocab_size=258, next_token=lambda history, sampling: ord("a"), num_blocks=8, num_host_blocks=9
    )
    service = await start_service(executor, admin_listen="127.0.0.1:0")
    for letter in "xyx":
        prompt = pb.GenerationStart(text=letter * 100, sampling=pb.SamplingParams(max_tokens=3, ignore_eos=True))
        answer = await service.generation.Complete(pb.CompleteRequest(start=prompt))
    stats = await watch(service).read()
    assert answer.finished.usage.cached_tokens == stats.cached_tokens == 96
    # The first request's blocks that the second one needed; the others were still there.
    assert stats.restored_tokens == 80
    assert stats.host_blocks > 5


async def test_the_use_of_recurrent_states_is_reported(start_service):
    executor = FakeExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"), num_state_slots=9)
    service = await start_service(executor, admin_listen="127.0.0.1:0")
    for text in ("x" * 64 + "y" * 40, "x" * 100, "x" * 64 + "z" * 40):
        prompt = pb.GenerationStart(text=text, sampling=pb.SamplingParams(max_tokens=3, ignore_eos=True))
        await service.generation.Complete(pb.CompleteRequest(start=prompt))
    stats = await watch(service).read()
    # The second request computed again what it shares with the first one, and the third began there.
    assert (stats.state_misses, stats.state_missed_tokens, stats.state_hits) == (1, 64, 1)
    assert stats.state_slots_used == stats.state_snapshots == 4


async def test_the_engines_state_is_reported(start_watched):
    service = await start_watched()
    answers = watch(service, interval=timedelta(seconds=0.1))
    await answers.read()
    service.engine.drain()
    assert (await answers.read()).state == pb.SERVICE_STATE_DRAINING


async def test_a_prediction_of_months_has_room(start_watched, monkeypatch):
    service = await start_watched()
    stats = dataclasses.replace(service.engine.stats(), predicted_ttft_s=1e7)
    monkeypatch.setattr(service.engine, "stats", lambda: stats)
    assert (await watch(service).read()).predicted_ttft.ToSeconds() == 10_000_000


async def test_it_ends_with_the_service(start_watched):
    service = await start_watched()
    answers = watch(service, interval=timedelta(hours=1))
    await answers.read()
    stopping = asyncio.create_task(service.server.stop())
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await answers.read()
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert failure.value.details() == "the service is shutting down"
    await stopping


@pytest.mark.parametrize("milliseconds", [-1, 0, 99, 3_600_001])
async def test_an_interval_out_of_bounds(start_watched, milliseconds):
    service = await start_watched()
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await watch(service, interval=timedelta(milliseconds=milliseconds)).read()
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "interval: must be at least 0.1 s and at most 3,600 s" in str(failure.value.details())


def test_every_state_is_on_the_wire():
    """The same in heartbeats and in statistics."""
    names = {name.removeprefix("SERVICE_STATE_") for name in pb.ServiceState.keys()}  # noqa: SIM118 - an enum
    fields = [pb.Heartbeat.DESCRIPTOR.fields_by_name["state"], pb.WatchStatsResponse.DESCRIPTOR.fields_by_name["state"]]
    assert [field.enum_type for field in fields] == [pb.ServiceState.DESCRIPTOR] * 2
    assert names == {state.name for state in EngineState} | {"UNSPECIFIED"}
