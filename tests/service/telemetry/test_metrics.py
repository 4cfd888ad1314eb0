"""The page of metrics: what it says of known requests, in both formats, under the names that others read."""

import asyncio
import re
from pathlib import Path

import grpc
import pytest
from hypothesis import given, strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from wire.http_get import fetch

import penstock.v1 as pb
from penstock.scheduler.request import EngineFinishReason, RequestFinished, RequestTimings, TokenUsage
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.identity import Principal
from penstock.service.telemetry.buckets import TOKEN_BOUNDS
from penstock.service.telemetry.catalog import INSTRUMENTS
from penstock.service.telemetry.histogram import Histogram
from penstock.service.telemetry.instrument import MetricKind
from penstock.service.telemetry.metrics import MAX_TENANTS, OTHER_TENANTS, End, Metrics
from penstock.v1.embedding_pb2_grpc import EmbeddingServiceStub

DOCS = Path(__file__).parents[3] / "docs/metrics.md"
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
ROW = re.compile(r"\| `([^`]+)` \| (\w+) \| ([^|]*) \| ([^|]*) \| ([^|]+) \|")
GENAI = {
    "gen_ai_operation_name": "text_completion",
    "gen_ai_provider_name": "penstock",
    "gen_ai_request_model": "bytes",
}
VLLM = {"model_name": "bytes", "engine": "0"}
TENANT_LIVE = "penstock_tenant_live_requests"


async def samples_of(service, parse=parse_text, accept=""):
    """Every sample of the page, by its name and labels."""
    page = await asyncio.to_thread(fetch, service.server.metrics_target, accept)
    samples = {}
    for family in parse(page):
        for sample in family.samples:
            key = sample.name, frozenset((name, value) for name, value in sample.labels.items() if value)
            assert key not in samples, key
            samples[key] = sample.value
    return samples


@pytest.fixture
def scrape(metered):
    """Reads the page: every sample by its name and labels."""

    async def scrape(parse=parse_text, accept=""):
        samples = await samples_of(metered, parse, accept)
        return lambda name, **labels: samples[name, frozenset(labels.items())]

    return scrape


async def test_what_host_memory_holds_is_counted(start_service):
    service = await start_service(
        FakeExecutor(vocab_size=258, num_blocks=8, num_host_blocks=9), metrics_listen="127.0.0.1:0"
    )
    for letter in "xyx":
        await complete(service, text=letter * 100)
    stats, samples = service.engine.stats(), await samples_of(service)
    assert samples["penstock_kv_host_blocks", frozenset()] == stats.host_blocks > 0
    assert samples["penstock_restored_tokens_total", frozenset()] == stats.restored_tokens > 0


async def test_recurrent_states_are_counted(start_service):
    service = await start_service(FakeExecutor(vocab_size=258, num_state_slots=9), metrics_listen="127.0.0.1:0")
    for end in "yxz":
        await complete(service, text="x" * 64 + end * 40)
    stats, samples = service.engine.stats(), await samples_of(service)
    assert samples["penstock_state_slots", frozenset()] == 9
    assert samples["penstock_state_slots_used", frozenset()] == stats.state_slots_used > 0
    assert samples["penstock_state_snapshots", frozenset()] == stats.state_snapshots > 0
    assert samples["penstock_state_hits_total", frozenset()] == stats.state_hits == 1
    assert samples["penstock_state_misses_total", frozenset()] == stats.state_misses == 1
    assert samples["penstock_state_missed_tokens_total", frozenset()] == stats.state_missed_tokens == 64


def start(text="0123456789abcdef0123456789", max_tokens=5, **fields):
    return pb.GenerationStart(text=text, sampling=pb.SamplingParams(max_tokens=max_tokens, **fields))


async def complete(service, **fields):
    return await service.generation.Complete(pb.CompleteRequest(start=start(**fields)))


@pytest.mark.parametrize(("parse", "accept"), [(parse_text, ""), (parse_openmetrics, OPENMETRICS)])
async def test_a_page_counts_what_happened(metered, scrape, parse, accept):
    for _ in range(2):
        await complete(metered)
    with pytest.raises(grpc.aio.AioRpcError):
        await complete(metered, top_p=7)
    value = await scrape(parse, accept)

    assert value("penstock_state", state="serving") == 1
    assert value("penstock_state", state="failed") == 0
    assert value("penstock_requests_total", code="OK", reason="LENGTH") == 2
    assert value("penstock_requests_total", code="INVALID_ARGUMENT", reason="INVALID_FIELD") == 1
    method = "penstock.v1.GenerationService/Complete"
    assert value("penstock_calls_total", code="OK", method=method) == 2
    assert value("penstock_calls_total", code="INVALID_ARGUMENT", method=method) == 1
    assert value("penstock_prefill_tokens_total") == 26 + 10
    assert value("penstock_cached_tokens_total") == 16
    assert value("penstock_output_tokens_total") == 10
    assert value("penstock_tenant_requests_total", tenant="default") == 3
    assert value("penstock_tenant_prompt_tokens_total", tenant="default") == 52
    assert value("penstock_tenant_cached_tokens_total", tenant="default") == 16
    assert value("penstock_tenant_output_tokens_total", tenant="default") == 10
    assert value("penstock_tenant_live_requests", tenant="default") == 0
    assert value("penstock_inter_token_latency_seconds_count") == 8
    assert value("penstock_kv_blocks") == metered.engine.facts.num_blocks

    assert value("vllm:prompt_tokens_total", **VLLM) == 52
    assert value("vllm:generation_tokens_total", **VLLM) == 10
    assert value("vllm:prefix_cache_queries_total", **VLLM) == 52
    assert value("vllm:prefix_cache_hits_total", **VLLM) == 16
    assert value("vllm:request_success_total", finished_reason="length", **VLLM) == 2
    assert value("vllm:request_success_total", finished_reason="error", **VLLM) == 0
    assert value("vllm:time_to_first_token_seconds_count", **VLLM) == 2
    assert value("vllm:e2e_request_latency_seconds_count", **VLLM) == 2
    assert value("vllm:e2e_request_latency_seconds_bucket", le="+Inf", **VLLM) == 2
    assert value("vllm:request_prompt_tokens_sum", **VLLM) == 52
    assert value("vllm:request_prompt_tokens_bucket", le="20.0", **VLLM) == 0
    assert value("vllm:request_prompt_tokens_bucket", le="50.0", **VLLM) == 2

    assert value("gen_ai_server_request_duration_seconds_count", **GENAI) == 2
    assert value("gen_ai_server_request_duration_seconds_count", error_type="INVALID_ARGUMENT", **GENAI) == 1
    assert value("gen_ai_server_time_to_first_token_seconds_count", **GENAI) == 2
    assert value("gen_ai_server_time_per_output_token_seconds_count", **GENAI) == 2


async def test_the_page_shows_what_runs_now(metered, scrape):
    call = metered.generation.GenerateOne(pb.GenerateOneRequest(start=start(max_tokens=3000)))
    await call.read()
    value = await scrape()
    assert value("penstock_live_requests") == value("penstock_tenant_live_requests", tenant="default") == 1
    assert value("vllm:num_requests_running", **VLLM) + value("vllm:num_requests_waiting", **VLLM) == 1
    call.cancel()


async def test_every_kind_of_request_has_its_operation(metered, scrape):
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    await metered.generation.Complete(
        pb.CompleteRequest(start=pb.GenerationStart(chat=chat, sampling=pb.SamplingParams(max_tokens=2)))
    )
    embed = pb.EmbedRequest(inputs=[pb.EmbedInput(text="hi")])
    await EmbeddingServiceStub(metered.channel).Embed(embed).read()
    value = await scrape()
    for operation in ("chat", "embeddings"):
        labels = GENAI | {"gen_ai_operation_name": operation}
        assert value("gen_ai_server_request_duration_seconds_count", **labels) == 1
    assert value("vllm:request_queue_time_seconds_count", **VLLM) == 2
    assert value("vllm:time_to_first_token_seconds_count", **VLLM) == 1


async def test_choices_are_timed_one_by_one(metered, scrape):
    await complete(metered, n=3, max_tokens=4)
    value = await scrape()
    assert value("penstock_inter_token_latency_seconds_count") == 3 * 3
    assert value("vllm:time_to_first_token_seconds_count", **VLLM) == 1


async def test_names_units_and_labels_are_as_documented(metered, scrape):
    """docs/metrics.md has every metric that there is, and no other."""
    documented = {}
    for name, kind, unit, labels, _ in ROW.findall(DOCS.read_text()):
        assert name not in documented
        documented[name] = (kind, unit.strip(), tuple(re.findall(r"`([^`]+)`", labels)))
    catalogue = {}
    for instrument in INSTRUMENTS:
        labels = tuple(label.replace(".", "_") for label in instrument.labels)
        catalogue[instrument.prometheus_name] = (instrument.kind.name.lower(), instrument.unit.strip("{}"), labels)
    assert documented == catalogue

    await complete(metered)
    page = await asyncio.to_thread(fetch, metered.server.metrics_target)
    exported = {}
    for family in parse_text(page):
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"le"}
        exported[name] = (family.type, labels)
    for name, (kind, _, labels) in documented.items():
        assert exported[name] in [(kind, set(labels)), (kind, set())], name
    others = exported.keys() - documented.keys()
    assert others
    assert all(name.startswith("process_") for name in others)


def test_names_follow_the_rules_of_both():
    names = [instrument.name for instrument in INSTRUMENTS]
    pages = [instrument.prometheus_name for instrument in INSTRUMENTS]
    assert len(names) == len(set(names)) == len(set(pages))
    for instrument in INSTRUMENTS:
        if not instrument.is_prometheus_only:
            assert re.fullmatch(r"[a-z][a-z0-9_.]*", instrument.name)
        assert re.fullmatch(r"(vllm:)?[a-z][a-z0-9_]*", instrument.prometheus_name)
        assert instrument.prometheus_name.endswith("_total") == (instrument.kind is MetricKind.COUNTER)
        assert bool(instrument.bounds) == (instrument.kind is MetricKind.HISTOGRAM)
        assert list(instrument.bounds) == sorted(set(instrument.bounds))


@given(st.lists(st.floats(0, 20000), max_size=60), st.data())
def test_a_histogram_is_read_as_if_it_had_other_bounds(values, data):
    own = (0.5, *TOKEN_BOUNDS[:13])
    bounds = tuple(sorted(data.draw(st.sets(st.sampled_from(own), min_size=1))))
    kept, direct = Histogram(own), Histogram(bounds)
    for value in values:
        kept.observe(value)
        direct.observe(value)
    assert kept.read(bounds) == direct.read(bounds)
    assert kept.read(bounds).count == len(values)


def test_tenants_are_bounded_in_number():
    metrics = Metrics()
    for number in range(MAX_TENANTS + 10):
        metrics.ended(end_of(f"tenant-{number}"))
    assert len(metrics.tenants) == MAX_TENANTS + 1
    assert metrics.tenants["tenant-3"].output_tokens == 5
    assert metrics.tenants[OTHER_TENANTS].requests == 10
    assert metrics.tenants[OTHER_TENANTS].output_tokens == 50


def test_a_label_that_is_handed_out_is_taken():
    metrics = Metrics()
    labels = {metrics.tenant_label(f"tenant-{number}") for number in range(MAX_TENANTS + 10)}
    assert labels == metrics.tenants.keys() | {OTHER_TENANTS}
    assert len(labels) == MAX_TENANTS + 1


class Proxy:
    """Whoever calls may act for every tenant."""

    def authenticate(self, metadata):
        return Principal("proxy", may_act_for_others=True)


async def test_live_requests_of_all_tenants_count_under_a_bounded_number_of_labels(start_service, new_reading):
    executor = FakeExecutor(vocab_size=258, next_token=lambda history, sampling: ord("a"), seconds_per_step=0.002)
    service = await start_service(executor, metrics_listen="127.0.0.1:0", authenticator=Proxy())

    def of(tenant, ref=1, max_tokens=3000):
        request = start(max_tokens=max_tokens, ignore_eos=True)
        request.tenant, request.ref = tenant, ref
        return request

    await service.generation.Complete(pb.CompleteRequest(start=of("first", max_tokens=1)))
    tenants = ["first", *[f"tenant-{number % 100}" for number in range(200)]]  # each of the others is busier
    frames = [pb.GenerateRequest(start=of(tenant, ref)) for ref, tenant in enumerate(tenants, 1)]
    call = service.generation.Generate(iter(frames))
    await new_reading().read_until(call, lambda reading: all(reading.outcomes[ref].accepted for ref in range(1, 202)))
    for _ in range(2):
        samples = await samples_of(service)
        live = {dict(labels)["tenant"]: value for (name, labels), value in samples.items() if name == TENANT_LIVE}
        assert live["first"] == 1
        assert live[OTHER_TENANTS] == 200 - 2 * (MAX_TENANTS - 1)
        assert sum(live.values()) == len(tenants)
        assert len(live) == MAX_TENANTS + 1
    call.cancel()


def test_a_method_is_a_label_only_if_it_is_served():
    metrics = Metrics()
    metrics.call("/penstock.v1.GenerationService/Complete", grpc.StatusCode.OK)
    for number in range(3):
        metrics.call(f"/any.Service/{number}", grpc.StatusCode.PERMISSION_DENIED)
    assert metrics.calls == {
        ("penstock.v1.GenerationService/Complete", "OK"): 1,
        ("other", "PERMISSION_DENIED"): 3,
    }


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (EngineFinishReason.STOP, "stop"),
        (EngineFinishReason.CANCELLED, "abort"),
        (EngineFinishReason.DEADLINE, "abort"),
        (EngineFinishReason.WORKER_DIED, "error"),
    ],
)
def test_vllm_has_four_reasons(reason, told):
    metrics = Metrics()
    metrics.ended(end_of("a", reason))
    assert +metrics.finished == {told: 1}


def end_of(tenant, reason=EngineFinishReason.STOP):
    usage, timings = TokenUsage(10, 0, 5), RequestTimings(1000, 1000, 2000, 10_000)
    return End(
        request_id="id",
        client_request_id="",
        tenant=tenant,
        operation="chat",
        finished=RequestFinished(reason, usage, timings),
        refusal=None,
        code=grpc.StatusCode.OK,
        was_accepted=True,
    )
