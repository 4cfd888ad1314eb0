"""The gateway's spans: parents, names and attributes, and what they leave out."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from waiting import until

COMPLETIONS = "/v1/completions"
TRACE_ID, SPAN_ID = "1" * 32, "2" * 16
TRACED = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
BODY = {"prompt": "a", "max_tokens": 1}
SECRET = "what-nobody-else-may-read"


@pytest.fixture
def spans(monkeypatch):
    """Reads the spans of the gateway and the service, which have ended, without the service's own calls."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    return exporter.get_finished_spans


def of_gateway(spans):
    return [span for span in spans() if span.instrumentation_scope.name == "penstock.gateway"]


def parent_of(span):
    return trace.format_trace_id(span.context.trace_id), trace.format_span_id(span.parent.span_id)


def id_of(span):
    return trace.format_span_id(span.context.span_id)


async def test_a_span_is_a_child_of_its_caller_and_the_parent_of_the_request(start_gateway, spans):
    gateway = await start_gateway()
    response = await gateway.post(COMPLETIONS, headers=TRACED, **BODY)
    [span] = await until(lambda: of_gateway(spans))
    assert (span.name, span.kind) == ("POST /v1/completions", SpanKind.SERVER)
    assert parent_of(span) == (TRACE_ID, SPAN_ID)
    assert span.attributes["http.response.status_code"] == 200
    assert span.attributes["penstock.request_id"] == response.headers["x-request-id"]
    [request] = [each for each in spans() if each.name == "text_completion bytes"]
    assert parent_of(request) == (TRACE_ID, id_of(span))


async def test_calls_for_a_request_are_in_its_own_trace(start_gateway, spans):
    """The second request's events arrive in a task that the first one started."""
    gateway = await start_gateway()
    for number in (3, 4):
        traced = {"traceparent": f"00-{str(number) * 32}-{SPAN_ID}-01"}
        body = BODY | {"prompt": str(number), "logprobs": 0, "echo": True}
        assert (await gateway.post(COMPLETIONS, headers=traced, **body)).status_code == 200
    first, second = await until(lambda: len(of_gateway(spans)) == 2 and of_gateway(spans))
    described = [span for span in spans() if span.name == "penstock.v1.TokenizerService/DescribeTokens"]
    assert {parent_of(span) for span in described} <= {("3" * 32, id_of(first)), ("4" * 32, id_of(second))}
    assert ("4" * 32, id_of(second)) in {parent_of(span) for span in described}


async def test_an_embedding_is_below_its_call(start_gateway, spans):
    gateway = await start_gateway()
    await gateway.post("/v1/embeddings", headers=TRACED, input="a")
    [span] = await until(lambda: of_gateway(spans))
    [call] = [each for each in spans() if each.name == "penstock.v1.EmbeddingService/Embed"]
    assert parent_of(call) == (TRACE_ID, id_of(span))
    for request in [each for each in spans() if each.name == "embeddings bytes"]:
        assert parent_of(request) == (TRACE_ID, id_of(call))


@pytest.mark.parametrize("headers", [{}, {"traceparent": "nonsense"}, [("traceparent", TRACED["traceparent"])] * 2])
async def test_without_one_valid_parent_a_trace_begins(start_gateway, spans, headers):
    gateway = await start_gateway()
    for _ in range(2):  # the second request on the connection is not in the first one's trace
        await gateway.http.post(COMPLETIONS, json=BODY, headers=headers)
    first, second = await until(lambda: len(of_gateway(spans)) == 2 and of_gateway(spans))
    assert first.parent is second.parent is None
    assert TRACE_ID not in {trace.format_trace_id(span.context.trace_id) for span in spans()}
    assert first.context.trace_id != second.context.trace_id


async def test_an_unsampled_parent_yields_no_span(start_gateway, spans):
    gateway = await start_gateway()
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"}
    assert (await gateway.post(COMPLETIONS, headers=headers, **BODY)).status_code == 200
    await gateway.post(COMPLETIONS, headers=TRACED | {"traceparent": f"00-{'5' * 32}-{SPAN_ID}-01"}, **BODY)
    await until(lambda: of_gateway(spans))
    assert TRACE_ID not in {trace.format_trace_id(span.context.trace_id) for span in spans()}


async def test_probes_have_no_spans(start_gateway, spans):
    gateway = await start_gateway()
    for path in ("/health", "/metrics", "/version"):
        await gateway.http.get(path, headers=TRACED)
    await gateway.http.get("/v1/models", headers=TRACED)
    assert [span.name for span in await until(lambda: of_gateway(spans))] == ["GET /v1/models"]


async def test_no_span_contains_what_callers_wrote(start_gateway, spans):
    gateway = await start_gateway()
    await gateway.http.get(f"/{SECRET}?{SECRET}={SECRET}", headers=TRACED)
    await gateway.http.request("PROPFIND", f"/v1/models?{SECRET}", headers=TRACED)
    await gateway.post(COMPLETIONS, headers=TRACED | {"x-mine": SECRET}, prompt=SECRET, best_of=SECRET)
    found = await until(lambda: len(of_gateway(spans)) == 3 and of_gateway(spans))
    assert [span.name for span in found][:1] == ["GET"]
    assert found[1].attributes["http.request.method"] == "_OTHER"
    assert SECRET not in "".join(span.to_json() for span in spans()).lower()
    assert [span.attributes["http.response.status_code"] for span in found] == [404, 405, 400]
    assert {span.status.status_code for span in found} == {StatusCode.UNSET}


async def test_an_error_of_ours_is_an_error(start_gateway, spans, monkeypatch):
    gateway = await start_gateway()
    monkeypatch.setattr(gateway.app.state.link, "caller", lambda headers: 1 // 0)
    assert (await gateway.post(COMPLETIONS, headers=TRACED, **BODY)).status_code == 500
    [span] = await until(lambda: of_gateway(spans))
    assert (span.status.status_code, span.attributes["error.type"]) == (StatusCode.ERROR, "500")
