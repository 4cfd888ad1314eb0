"""Spans: of calls and of requests, with their ids, and without what callers say."""

import threading

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import penstock.v1 as pb
from penstock.clients.host import span_exporter
from penstock.clients.host.span_exporter import export_spans
from penstock.service.telemetry.phases import PhaseName

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
PROMPT = "a prompt that nobody else may read"
PHASES = {name.value for name in PhaseName}


@pytest.fixture
def spans(monkeypatch):
    """What would be sent to a collector."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def start(**fields):
    return pb.GenerationStart(text=PROMPT, sampling=pb.SamplingParams(max_tokens=3), **fields)


def parent_of(span):
    return trace.format_trace_id(span.context.trace_id), trace.format_span_id(span.parent.span_id)


async def test_a_session_is_the_conversation_of_its_span(start_service, spans):
    service = await start_service()
    request = pb.CompleteRequest(start=start())
    await service.generation.Complete(request, metadata=[("x-session-id", "talk")])
    await service.generation.Complete(request)
    found = [span.attributes.get("gen_ai.conversation.id") for span in spans() if "text_completion" in span.name]
    assert found == ["talk", None]


async def test_a_call_is_a_child_of_its_caller(start_service, spans):
    service = await start_service()
    metadata = (("traceparent", TRACEPARENT),)
    response = await service.generation.Complete(pb.CompleteRequest(start=start()), metadata=metadata)
    *phases, request, call = spans()
    assert [phase.name for phase in phases] == ["prepare", "queue", "prefill", "decode"]
    assert {parent_of(phase) for phase in phases} == {(TRACE_ID, trace.format_span_id(request.context.span_id))}
    assert [event.name for event in request.events] == ["penstock.accepted", "penstock.first_token"]
    assert call.name == "penstock.v1.GenerationService/Complete"
    assert parent_of(call) == (TRACE_ID, SPAN_ID)
    assert parent_of(request) == (TRACE_ID, trace.format_span_id(call.context.span_id))
    for span in (request, call):
        assert span.attributes["penstock.request_id"] == response.request_id
        assert span.attributes["rpc.grpc.status_code"] == 0
    assert request.attributes["gen_ai.operation.name"] == "text_completion"
    assert request.attributes["gen_ai.request.model"] == "bytes"
    assert request.attributes["gen_ai.usage.input_tokens"] == len(PROMPT)
    assert request.attributes["gen_ai.usage.output_tokens"] == 3
    assert request.attributes["gen_ai.response.finish_reasons"] == ("length",)


async def on_a_stream(service, spans, new_reading, **options):
    """The spans of two requests on one stream, of which only the first names a parent, and the call's span."""
    frames = [pb.GenerateRequest(start=start(ref=1, traceparent=TRACEPARENT)), pb.GenerateRequest(start=start(ref=2))]
    reading = await new_reading().read(service.generation.Generate(iter(frames), **options))
    by_id = {span.attributes["penstock.request_id"]: span for span in spans() if span.name not in PHASES}
    first, second = (by_id.pop(reading.outcomes[ref].finished[0].request_id) for ref in (1, 2))
    [call] = by_id.values()
    return first, second, call


async def test_a_request_on_a_shared_stream_has_a_trace_of_its_own(start_service, spans, new_reading):
    """Otherwise all requests of a stream, which may last for days, would be sampled together."""
    first, second, call = await on_a_stream(await start_service(), spans, new_reading)
    assert parent_of(first) == (TRACE_ID, SPAN_ID)
    assert second.parent is None
    assert second.context.trace_id != call.context.trace_id
    for span in (first, second):
        assert [link.context.span_id for link in span.links] == [call.context.span_id]
        assert span.kind is SpanKind.SERVER
        assert (span.attributes["rpc.service"], span.attributes["rpc.method"]) == (
            "penstock.v1.GenerationService",
            "Generate",
        )


async def test_requests_on_the_stream_of_a_traced_caller_are_in_its_trace(start_service, spans, new_reading):
    """The first names the parent that the call has too, so it is not beside the call."""
    metadata = (("traceparent", TRACEPARENT),)
    first, second, call = await on_a_stream(await start_service(), spans, new_reading, metadata=metadata)
    assert parent_of(call) == (TRACE_ID, SPAN_ID)
    for span in (first, second):
        assert parent_of(span) == (TRACE_ID, trace.format_span_id(call.context.span_id))
        assert (span.kind, span.links) == (SpanKind.INTERNAL, ())


async def test_an_unsampled_parent_yields_no_span(start_service, spans, new_reading):
    service = await start_service()
    unsampled = TRACEPARENT[:-2] + "00"
    metadata = (("traceparent", unsampled),)
    await service.generation.Complete(pb.CompleteRequest(start=start()), metadata=metadata)
    await service.generation.Complete(pb.CompleteRequest(start=start(traceparent=unsampled)), metadata=metadata)
    frames = [pb.GenerateRequest(start=start(ref=1, traceparent=unsampled))]
    await new_reading().read(service.generation.Generate(iter(frames)))
    assert [span.name for span in spans()] == ["penstock.v1.GenerationService/Generate"]


async def test_no_span_contains_prompts_or_error_texts(start_service, spans, monkeypatch):
    service = await start_service()
    await service.generation.Complete(pb.CompleteRequest(start=start()))

    def fail(request):
        raise RuntimeError(PROMPT)

    service.engine.submit = fail
    with pytest.raises(grpc.aio.AioRpcError):
        await service.generation.Complete(pb.CompleteRequest(start=start()))
    found = [span for span in spans() if span.name not in PHASES]
    assert [span.status.status_code for span in found] == [StatusCode.UNSET] * 2 + [StatusCode.ERROR] * 2
    assert PROMPT not in "".join(span.to_json() for span in spans())


async def test_logs_contain_the_id_but_no_texts(start_service, caplog):
    caplog.set_level("DEBUG", logger="penstock")
    service = await start_service()
    response = await service.generation.Complete(pb.CompleteRequest(start=start(client_request_id="mine")))
    assert response.request_id in caplog.text
    assert "mine" in caplog.text
    assert PROMPT not in caplog.text
    assert response.choices[0].text not in caplog.text


@pytest.mark.parametrize(
    ("sampling", "reason", "where"),
    [
        ({"top_p": 3.25}, "INVALID_FIELD", "sampling.top_p"),  # found at once
        ({"min_tokens": 4095}, "INVALID_FIELD", "sampling.min_tokens"),  # found when the prompt's length is known
    ],
)
async def test_a_refusal_is_logged_and_traced_by_its_reason(start_service, spans, caplog, sampling, reason, where):
    """Whoever is paged for INTERNAL must not find the callers' typing errors."""
    caplog.set_level("DEBUG", logger="penstock")
    service = await start_service()
    request = pb.GenerationStart(text=PROMPT, sampling=pb.SamplingParams(**sampling))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await service.generation.Complete(pb.CompleteRequest(start=request))
    [line] = [record.getMessage() for record in caplog.records if ": " + reason in record.getMessage()]
    assert f"{reason} at {where}, INVALID_ARGUMENT after" in line
    assert "INTERNAL" not in caplog.text
    assert error.value.details() not in caplog.text
    assert "3.25" not in caplog.text
    requests = spans()[:-1]
    assert len(requests) == (where == "sampling.min_tokens")
    for span in requests:
        assert span.attributes["gen_ai.response.finish_reasons"] == (reason.lower(),)


async def test_an_error_of_ours_is_logged_as_internal(start_service, caplog):
    caplog.set_level("DEBUG", logger="penstock")
    service = await start_service()
    service.engine.submit = lambda request: 1 // 0
    with pytest.raises(grpc.aio.AioRpcError):
        await service.generation.Complete(pb.CompleteRequest(start=start()))
    assert any(": INTERNAL, INTERNAL after" in record.getMessage() for record in caplog.records)


def test_without_an_endpoint_nothing_is_exported(monkeypatch):
    monkeypatch.setattr(trace, "set_tracer_provider", lambda provider: pytest.fail("a provider was installed"))
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    for environ in ({}, {"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, {**endpoint, "OTEL_TRACES_EXPORTER": "none"}):
        export_spans(environ, "penstock")()


def test_with_an_endpoint_there_is_a_provider(monkeypatch):
    installed: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", installed.append)
    export_spans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "penstock")()
    [provider] = installed
    assert provider.resource.attributes["service.name"] == "penstock"


def test_an_error_of_the_exporter_is_logged_without_its_text(monkeypatch, caplog):
    """Its text may have the collector's key."""
    installed: list[TracerProvider] = []
    monkeypatch.setattr(trace, "set_tracer_provider", installed.append)
    failed = threading.Event()

    def fail(exporter, spans):
        failed.set()
        raise ValueError("secret")

    monkeypatch.setattr(OTLPSpanExporter, "export", fail)
    close = export_spans({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, "penstock")
    installed[0].get_tracer("x").start_span("x").end()
    installed[0].force_flush()
    close()
    assert failed.is_set()
    assert "spans could not be sent (ValueError)" in caplog.text
    assert "secret" not in caplog.text


def test_a_collector_that_is_slow_holds_nothing_up(monkeypatch):
    released = threading.Event()
    monkeypatch.setattr(span_exporter, "_install_exporter", lambda name: released.wait)
    export_spans({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, "penstock")()
    released.set()  # had it waited for the collector, it would wait still
