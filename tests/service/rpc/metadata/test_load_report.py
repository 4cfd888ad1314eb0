"""Load reports: every call ends with one, however it ends; their values follow the load; balancers can watch them."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from google.protobuf.duration_pb2 import Duration
from grpc_reflection.v1alpha import reflection_pb2
from letters import ENDLESS, begin, paced
from waiting import until
from wire.load_reports import end_of

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineLoad, EngineState
from penstock.scheduler.request import TokenUsage
from penstock.service.errors import Reason, ServiceError
from penstock.service.rpc import load_stream
from penstock.service.rpc.load_report import MAX_AGE_S, MIN_UTILIZATION, CallCost, LoadReporter
from penstock.service.telemetry.recent_stats import RecentStats
from penstock.v1 import orca


async def described_methods(channel):
    """Returns every method that reflection describes, by its path, and whether its response is a stream that may not
    end."""
    request = reflection_pb2.ServerReflectionRequest
    call = channel.stream_stream(
        "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        request.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )()
    await call.write(request(list_services=""))
    names = [found.name for found in (await call.read()).list_services_response.service]
    methods: dict[str, bool] = {}
    for name in names:
        await call.write(request(file_containing_symbol=name))
        found = (await call.read()).file_descriptor_response.file_descriptor_proto
        for file in map(descriptor_pb2.FileDescriptorProto.FromString, found):
            for each in file.service:
                if f"{file.package}.{each.name}" == name:
                    methods |= {f"/{name}/{method.name}": method.server_streaming for method in each.method}
    await call.done_writing()
    return methods


class TestTrailers:
    async def test_every_method_has_one_whether_it_succeeds_or_not(self, start_service, monkeypatch):
        service = await start_service(admin_listen="127.0.0.1:0")
        seen = set()
        targets = ((service.channel, service.target), (service.admin_channel, service.server.admin_target))
        for channel, target in targets:
            methods = await described_methods(channel)
            seen |= set(methods)
            for path in methods:
                malformed, report = await end_of(target, path, b"\xff\xff\xff")
                assert malformed is not grpc.StatusCode.OK
                assert report.application_utilization >= MIN_UTILIZATION, path
                _, report = await end_of(target, path)
                assert report.named_metrics["num_requests_running"] == 0, path
        assert "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics" in seen
        assert {"/grpc.health.v1.Health/Check", "/penstock.v1.AdminService/WatchStats"} <= seen
        assert len(seen) >= 25

    async def test_calls_that_never_reach_a_handler_have_one(self, start_service):
        service = await start_service()
        code, _ = await end_of(service.target, "/no.such/Method", b"")
        assert code is grpc.StatusCode.UNIMPLEMENTED
        metadata = {f"x-{number}": "v" * 1000 for number in range(17)}
        code, _ = await end_of(service.target, "/penstock.v1.ModelService/GetModel", b"", metadata=metadata)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED

    async def test_so_have_calls_without_credentials(self, start_service):
        def refuse(metadata):
            raise ServiceError(Reason.UNAUTHENTICATED)

        service = await start_service(authenticator=SimpleNamespace(authenticate=refuse))
        code, report = await end_of(service.target, "/penstock.v1.GenerationService/Complete", b"")
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert report.application_utilization == MIN_UTILIZATION
        assert not report.request_cost
        # So a balancer, which has no credentials, may also watch them.
        assert (await subscribe(service.channel).read()).named_metrics == report.named_metrics


class TestCost:
    async def test_of_a_request_on_a_call_of_its_own(self, start_service):
        service = await start_service()
        whole = pb.CompleteRequest(start=begin(text="x" * 40, max_tokens=3).start).SerializeToString()
        for cached_tokens in (0, 32):
            _, report = await end_of(service.target, "/penstock.v1.GenerationService/Complete", whole)
            assert report.request_cost == {"prompt_tokens": 40, "cached_tokens": cached_tokens, "output_tokens": 3}
        one = pb.GenerateOneRequest(start=begin(max_tokens=4).start).SerializeToString()
        _, report = await end_of(service.target, "/penstock.v1.GenerationService/GenerateOne", one)
        assert report.request_cost == {"prompt_tokens": 5, "cached_tokens": 0, "output_tokens": 4}

    async def test_of_all_requests_of_a_stream_at_its_end(self, start_service):
        service = await start_service()
        frames = [begin(ref, text="hey", max_tokens=ref).SerializeToString() for ref in (1, 2, 3)]
        refused = begin(9, max_tokens=0).SerializeToString()
        code, report = await end_of(service.target, "/penstock.v1.GenerationService/Generate", *frames, refused)
        assert code is grpc.StatusCode.OK
        assert report.request_cost == {"prompt_tokens": 9, "cached_tokens": 0, "output_tokens": 6}

    async def test_of_inputs_that_are_embedded(self, start_service):
        service = await start_service()
        request = pb.EmbedRequest(inputs=[pb.EmbedInput(text="hey"), pb.EmbedInput(text="hello")])
        code, report = await end_of(service.target, "/penstock.v1.EmbeddingService/Embed", request.SerializeToString())
        assert code is grpc.StatusCode.OK
        assert report.request_cost["prompt_tokens"] == 8
        assert report.request_cost["output_tokens"] == 0

    async def test_of_a_refused_request_is_none(self, start_service):
        service = await start_service()
        request = pb.CompleteRequest(start=begin(max_tokens=0).start).SerializeToString()
        code, report = await end_of(service.target, "/penstock.v1.GenerationService/Complete", request)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert not report.request_cost


class World:
    """An engine whose load the test sets, and a clock."""

    def __init__(self, target_ttft_s=None):
        self.now, self.num_computed = 100.0, 0
        self.current = EngineLoad(state=EngineState.SERVING)
        self.config = SchedulerConfig(max_num_seqs=10, max_queued_requests=100)
        self.facts = SimpleNamespace(max_num_seqs=256, max_num_batched_tokens=2048)
        metrics: Any = SimpleNamespace(num_ended=0, num_failed=0, finished={}, recent=None)
        counters: Any = SimpleNamespace(prefill_tokens=0, output_tokens=0)
        self.metrics = metrics
        self.recent = RecentStats(lambda: counters, metrics, lambda: self.now)
        engine: Any = self
        self.reporter = LoadReporter(engine, self.recent, target_ttft_s, lambda: self.now)

    def load(self):
        self.num_computed += 1
        return self.current

    def report(self, **load):
        """Returns the report of a later step with this load."""
        self.current = EngineLoad(state=load.pop("state", EngineState.SERVING), **load)
        self.now += MAX_AGE_S
        return orca.OrcaLoadReport.FromString(self.reporter.report())


class TestValues:
    def test_utilization_is_the_share_of_whatever_is_scarcest(self):
        world = World()
        assert world.report().application_utilization == MIN_UTILIZATION  # readers ignore 0
        assert world.report(running=3, kv_usage=0.2, waiting=1).application_utilization == 0.3
        assert world.report(running=3, kv_usage=0.7, waiting=1).application_utilization == 0.7
        assert world.report(running=3, kv_usage=0.7, waiting=90).application_utilization == 0.9
        assert world.report(running=3, kv_usage=0.2, waiting=1).application_utilization == 0.3

    def test_with_a_target_it_is_the_predicted_time_over_it(self):
        world = World(target_ttft_s=0.5)
        assert world.report(running=9, predicted_ttft_s=0.1).application_utilization == pytest.approx(0.2)
        assert world.report(running=9, predicted_ttft_s=2.0).application_utilization == pytest.approx(4.0)
        assert world.report(running=9).application_utilization == 0.9  # nothing is predicted yet

    @pytest.mark.parametrize("state", [EngineState.DRAINING, EngineState.RECOVERING, EngineState.FAILED])
    def test_a_service_that_refuses_requests_is_full(self, state):
        assert World().report(state=state).application_utilization == 1.0
        assert World(target_ttft_s=1.0).report(state=state, predicted_ttft_s=0.1).application_utilization == 1.0

    def test_named_metrics(self):
        report = World().report(running=3, waiting=25, kv_usage=0.7, predicted_ttft_s=0.4)
        assert report.named_metrics == {
            "kv_cache_utilization": 0.7,
            "kv_cache_usage_perc": 0.7,
            "batch_utilization": 0.3,
            "queue_utilization": 0.25,
            "num_requests_running": 3,
            "num_requests_waiting": 25,
            "predicted_ttft_seconds": 0.4,
        }
        assert "predicted_ttft_seconds" not in World().report().named_metrics
        assert (report.cpu_utilization, report.mem_utilization) == (0, 0)  # nothing measures them

    def test_rates_are_those_of_the_last_ten_seconds(self):
        world = World()
        assert (world.report().rps_fractional, world.report().eps) == (1, 0)  # readers ignore 0
        for _ in range(20):
            world.metrics.num_ended += 4
            world.metrics.num_failed += 1
            world.now += 1.0
            world.recent.begin_second()
        report = world.report()
        assert report.rps_fractional == pytest.approx(4, rel=0.15)
        assert report.eps == pytest.approx(1, rel=0.15)
        for _ in range(10):
            world.now += 1.0
            world.recent.begin_second()
        assert world.report().rps_fractional == pytest.approx(0.1, rel=0.15)

    def test_one_report_serves_all_calls_of_a_step(self):
        world = World()
        cost = CallCost()
        cost.add_usage(TokenUsage(prompt_tokens=5, output_tokens=2))
        world.report()
        computed = world.num_computed
        for _ in range(1000):
            [(name, raw)] = world.reporter.trailers(cost)
        assert world.num_computed == computed
        assert name == orca.TRAILER
        report = orca.OrcaLoadReport.FromString(raw)
        assert report.request_cost["output_tokens"] == 2
        assert report.application_utilization == MIN_UTILIZATION
        assert len(raw) < 400


async def test_the_load_of_a_real_service_rises_and_falls(start_service):
    service = await start_service(paced(), SchedulerConfig(max_num_seqs=4))
    model = pb.GetModelRequest().SerializeToString()

    async def load():
        _, report = await end_of(service.target, "/penstock.v1.ModelService/GetModel", model)
        return report

    stream = service.generation.Generate()
    for ref in (1, 2, 3):
        await stream.write(begin(ref, max_tokens=ENDLESS))
    while (report := await load()).named_metrics["num_requests_running"] < 3:
        pass
    assert report.application_utilization >= 0.75
    stream.cancel()
    while (report := await load()).named_metrics["num_requests_running"]:
        pass
    assert report.application_utilization < 0.1
    assert report.rps_fractional > 0
    service.engine.drain()
    while (await load()).application_utilization < 1:
        pass


def subscribe(channel, **interval):
    method = channel.unary_stream(
        f"/{orca.SERVICE}/StreamCoreMetrics",
        orca.OrcaLoadReportRequest.SerializeToString,
        orca.OrcaLoadReport.FromString,
    )
    request = orca.OrcaLoadReportRequest()
    if interval:
        request.report_interval.seconds = interval.get("seconds", 0)
        request.report_interval.nanos = interval.get("nanos", 0)
    return method(request)


class TestStream:
    async def test_a_report_at_once_and_after_each_interval(self, start_service, monkeypatch):
        monkeypatch.setattr(load_stream, "MIN_INTERVAL_S", 0.03)
        service = await start_service(paced(), SchedulerConfig(max_num_seqs=4))
        often, seldom = subscribe(service.channel), subscribe(service.channel, seconds=3600)
        assert (await seldom.read()).application_utilization == MIN_UTILIZATION
        stream = service.generation.Generate()
        for ref in (1, 2):
            await stream.write(begin(ref, max_tokens=ENDLESS))
        while (report := await often.read()).named_metrics["num_requests_running"] < 2:
            pass
        assert report.application_utilization >= 0.5
        assert not report.request_cost
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(seldom.read(), 0.1)

    @pytest.mark.parametrize(
        ("asked", "interval_s"),
        [({}, 1), ({"nanos": 5}, 1), ({"seconds": 7, "nanos": 500_000_000}, 7.5), ({"seconds": 10**9}, 86_400)],
    )
    def test_the_interval_has_limits(self, asked, interval_s):
        request = orca.OrcaLoadReportRequest(report_interval=asked)
        assert load_stream._interval_s(request) == interval_s

    @pytest.mark.parametrize("asked", [{"seconds": -1}, {"seconds": 1, "nanos": -1}, {"nanos": 2 * 10**9}])
    async def test_an_impossible_interval_is_refused(self, start_service, details_of, asked):
        service = await start_service()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await subscribe(service.channel, **asked).read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details_of(error.value)["BadRequest"].field_violations[0].field == "report_interval"

    async def test_the_number_of_streams_is_limited(self, start_service, monkeypatch):
        monkeypatch.setattr(load_stream, "MAX_STREAMS_OF_HOST", 2)
        service = await start_service()
        streams = [subscribe(service.channel) for _ in range(2)]
        for stream in streams:
            assert await stream.read()
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await subscribe(service.channel).read()
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "streams of load reports" in str(error.value.details())
        streams[0].cancel()
        places = service.server._running._load_streams._places
        await until(lambda: places.num_taken == 1)
        assert await subscribe(service.channel).read()

    async def test_it_ends_with_the_service(self, start_service):
        service = await start_service()
        stream = subscribe(service.channel, seconds=3600)
        assert await stream.read()
        stopping = asyncio.create_task(service.server.stop())
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stream.read()
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        assert error.value.details() == "the service is shutting down"
        await stopping


def test_a_duration_of_the_other_pool_is_checked_too():
    assert (
        Duration(seconds=1).ToNanoseconds()
        == orca.OrcaLoadReportRequest(report_interval={"seconds": 1}).report_interval.ToNanoseconds()
    )
