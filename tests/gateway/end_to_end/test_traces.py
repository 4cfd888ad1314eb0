"""One request's trace, from the HTTP caller's span through the gateway and the service to its phases, as a collector
gets it: while the KV cache is full, and while the worker is replaced."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import grpc
import httpx
import psutil
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as otlp, trace_service_pb2_grpc as otlp_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from waiting import until

SAMPLED, UNSAMPLED, CALLER = "a1" * 16, "b2" * 16, "c3" * 8
MAX_TOKENS = 600
POOL_TOKENS = 800
"""Room for either request, and not for both."""
DEMO_KV_BYTES = 2 * 6 * 2 * 64 * 2
"""Of one token: keys and values, layers, heads, their width, bytes of bfloat16."""
FLAGS = (
    f"--kv-cache-memory-bytes={POOL_TOKENS * DEMO_KV_BYTES}",
    "--max-model-len=768",
    "--scheduling-policy=priority",
    "--threads=1",
    "--speculative-config=none",  # with drafts, one request may be done before both lack room
    "--admin-listen=off",
    "--metrics-listen=off",
)

HOLDING_WORKER = """
import os, sys, time

def make_holding(runner, marker):
    start_step = runner.start_step

    def start_or_hold(self, plan):
        if any(any(row.token_ids) for row in plan.added) and not os.path.exists(marker):
            open(marker, "w").close()
            while True:
                time.sleep(1)
        return start_step(self, plan)

    runner.start_step = start_or_hold

if any("penstock.models.worker.main" in argument for argument in sys.orig_argv):
    from penstock.models.worker.runner import Runner
    make_holding(Runner, __file__ + ".held")
"""
"""What Python runs at its start, where PYTHONPATH leads to it: the first step of the first worker does not end.
Before that, steps whose tokens are all 0 warm the worker up."""


class Collector(otlp_grpc.TraceServiceServicer):
    """Keeps the spans that it gets."""

    def __init__(self):
        self.spans = []
        """Each with the name of the service that sent it."""

    def Export(self, request, context):
        for resource in request.resource_spans:
            (name,) = [each.value.string_value for each in resource.resource.attributes if each.key == "service.name"]
            self.spans += [(name, span) for scope in resource.scope_spans for span in scope.spans]
        return otlp.ExportTraceServiceResponse()

    def of(self, trace_id):
        return [(name, span) for name, span in list(self.spans) if span.trace_id.hex() == trace_id]

    def find(self, trace_id, name):
        """The span of this name, once it has arrived."""
        return next((span for _, span in self.of(trace_id) if span.name == name), None)


@pytest.fixture
def holding_worker(monkeypatch, tmp_path):
    """Holds the first step of the service's first worker until the worker is killed."""
    (tmp_path / "sitecustomize.py").write_text(HOLDING_WORKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.fixture
def collector(monkeypatch):
    """The collector that the environment names, which gets every span soon."""
    server = grpc.server(ThreadPoolExecutor(2))
    port = server.add_insecure_port("127.0.0.1:0")
    collector = Collector()
    otlp_grpc.add_TraceServiceServicer_to_server(collector, server)
    server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "1.0")
    yield collector
    server.stop(None).wait()


def worker_of(pid):
    """The worker of a service."""
    (worker,) = [each for each in psutil.Process(pid).children() if "models.worker.main" in " ".join(each.cmdline())]
    return worker


async def chat(http, traceparent, priority):
    """Begins a streamed chat that is as long as it may be; returns its response once the service has accepted it. On a
    very busy machine the held step may have ended the worker already, and the service refuses requests for a while."""
    body = {
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "priority": priority,
        "stream": True,
    }
    while True:
        request = http.build_request("POST", "/v1/chat/completions", headers={"traceparent": traceparent}, json=body)
        response = await http.send(request, stream=True)
        if response.status_code == 200:
            return response
        assert response.status_code == 503
        await response.aclose()


async def run_under_pressure(served):
    """Runs a sampled request that loses its worker in its first step, and then its blocks to an unsampled one. Returns
    the sampled one's response."""
    worker = worker_of(served.process.pid)
    async with httpx.AsyncClient(base_url=served.http, timeout=None) as http:
        sampled = await chat(http, f"00-{SAMPLED}-{CALLER}-01", priority=1)
        unsampled = await chat(http, f"00-{UNSAMPLED}-{CALLER}-00", priority=0)
        with suppress(psutil.NoSuchProcess):
            worker.kill()
        for text in await asyncio.gather(sampled.aread(), unsampled.aread()):
            assert text.endswith(b"data: [DONE]\n\n")
    return sampled


def attributes(of):
    """The attributes of a span or an event, in Python's types."""
    found = {}
    for each in of.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [item.string_value for item in value.values] if kind == "array_value" else value
    return found


def check_gateway(span, request_id):
    """Checks the gateway's span."""
    assert span.parent_span_id.hex() == CALLER
    assert span.kind == Span.SPAN_KIND_SERVER
    assert attributes(span) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": "/v1/chat/completions",
        "network.protocol.version": "1.1",
        "penstock.request_id": request_id,
        "url.path": "/v1/chat/completions",
        "url.scheme": "http",
    }


def check_request(span, gateway, request_id):
    """Checks the request's span in the service, which stands for its RPC."""
    assert span.parent_span_id == gateway.span_id
    assert span.kind == Span.SPAN_KIND_SERVER
    [link] = span.links
    assert link.trace_id.hex() not in (SAMPLED, UNSAMPLED)  # the stream that many requests share
    found = attributes(span)
    assert found["rpc.system"] == "grpc"
    assert (found["rpc.service"], found["rpc.method"]) == ("penstock.v1.GenerationService", "Generate")
    assert found["rpc.grpc.status_code"] == 0
    assert found["gen_ai.operation.name"] == "chat"
    assert found["gen_ai.response.finish_reasons"] == ["length"]
    assert found["gen_ai.usage.output_tokens"] == MAX_TOKENS
    assert found["penstock.request_id"] == request_id
    assert found["penstock.preemptions"] >= 1
    assert found["penstock.worker_restarts"] == 1
    assert span.status.code == Status.STATUS_CODE_UNSET
    assert gateway.start_time_unix_nano <= span.start_time_unix_nano
    assert span.end_time_unix_nano <= gateway.end_time_unix_nano


def check_phases(phases, request):
    """Checks the child spans of a request that lost its worker once, and its blocks at least once."""
    names = [phase.name for phase in phases]
    assert names[:6] == ["prepare", "queue", "prefill", "queue", "prefill", "decode"]  # the worker died in between
    assert names[6:9] == ["queue", "prefill", "decode"]  # it was preempted
    times = [request.start_time_unix_nano]
    for phase in phases:
        assert phase.kind == Span.SPAN_KIND_INTERNAL
        times += [phase.start_time_unix_nano, phase.end_time_unix_nano]
    times.append(request.end_time_unix_nano)
    assert times == sorted(times)
    decodes = [attributes(phase) for phase in phases if phase.name == "decode"]
    assert sum(decode["penstock.tokens"] for decode in decodes) == MAX_TOKENS
    prefills = [attributes(phase) for phase in phases if phase.name == "prefill"]
    num_prompt_tokens = attributes(request)["gen_ai.usage.input_tokens"]
    for prefill in prefills[:2]:
        assert prefill["penstock.tokens"] + prefill["penstock.cached_tokens"] == num_prompt_tokens
    waits = [attributes(phase).get("penstock.causes", []) for phase in phases if phase.name == "queue"]
    assert "worker" in waits[1]


def check_events(request):
    """Checks the events of such a request."""
    events = [event.name for event in request.events]
    assert events[:4] == ["penstock.accepted", "penstock.worker_died", "penstock.first_token", "penstock.preempted"]
    assert set(events[4:]) <= {"penstock.preempted"}
    times = [event.time_unix_nano for event in request.events]
    assert times == sorted(times)
    assert request.start_time_unix_nano <= times[0]
    assert times[-1] <= request.end_time_unix_nano
    assert attributes(request.events[0])["penstock.queue_position"] >= 0
    assert attributes(request.events[3])["penstock.cause"] == "blocks"
    assert attributes(request.events[3])["penstock.for_request_id"]


@pytest.mark.usefixtures("holding_worker")
async def test_a_trace_reads_from_the_callers_span_to_a_preemption_and_a_dead_worker(start_serving, collector):
    with start_serving(*FLAGS) as served:
        response = await run_under_pressure(served)
        gateway = await until(lambda: collector.find(SAMPLED, "POST /v1/chat/completions"))
        request = await until(lambda: collector.find(SAMPLED, "chat demo"))
    request_id = response.headers["x-request-id"]
    check_gateway(gateway, request_id)
    check_request(request, gateway, request_id)
    spans = collector.of(SAMPLED)
    assert {name for name, span in spans if span == gateway} == {"penstock-gateway"}
    assert {name for name, span in spans if span != gateway} == {"penstock"}
    phases = [span for _, span in spans if span.parent_span_id == request.span_id]
    check_phases(sorted(phases, key=lambda span: (span.start_time_unix_nano, span.end_time_unix_nano)), request)
    check_events(request)
    calls = [span for _, span in spans if span.parent_span_id == gateway.span_id and span != request]
    assert "penstock.v1.ModelService/GetModel" in {span.name for span in calls}  # how the gateway learns its caller
    assert len(spans) == 2 + len(phases) + len(calls)
    # It ended before the sampled one, so its spans would have arrived before that one's.
    assert collector.of(UNSAMPLED) == []
