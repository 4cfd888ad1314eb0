"""Every metric of the service, one row for each. docs/metrics.md has the same table, and a test compares them.

Names follow OpenTelemetry; Prometheus names are derived by the rules of OpenTelemetry's own exporter. Names that begin
with ``vllm:`` are only for Prometheus: routers, autoscalers and dashboards made for vLLM read them.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence

from penstock.scheduler.engine_stats import EngineState
from penstock.service.telemetry import buckets
from penstock.service.telemetry.event_loop_lag import MAX_SAMPLES
from penstock.service.telemetry.instrument import Instrument, LabelledValues, MetricKind, Snapshot
from penstock.service.telemetry.metrics import TenantTotals

COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM
_TENANT = ("tenant",)
_POSITION = ("position",)
_GENAI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_VLLM = ("model_name", "engine")


def _info(now: Snapshot) -> LabelledValues:
    facts = now.facts
    kinds = (facts.architecture, facts.backend, facts.device, facts.dtype, facts.quantization, facts.kv_cache_dtype)
    yield (now.version, now.model_name, *kinds), 1


def _vllm_cache_config(now: Snapshot) -> LabelledValues:
    facts, is_caching = now.facts, now.engine.config.enable_prefix_caching
    yield (str(facts.block_size), str(facts.num_blocks), facts.kv_cache_dtype, str(is_caching)), 1


def _vllm_lora(now: Snapshot) -> LabelledValues:
    running, waiting = now.engine.adapters.busy()
    yield (str(now.facts.max_loras), ",".join(running), ",".join(waiting)), time.time()


def _loop_lag(now: Snapshot) -> LabelledValues:
    lag = now.loop_lag.over(MAX_SAMPLES)
    return [] if lag is None else [(("p50",), lag.p50_s), (("p99",), lag.p99_s), (("max",), lag.max_s)]


def _by_position(counts: Sequence[int]) -> LabelledValues:
    return [((str(index),), count) for index, count in enumerate(counts)]


def _by_tenant(read: Callable[[TenantTotals], int]) -> Callable[[Snapshot], LabelledValues]:
    return lambda now: [((tenant,), read(totals)) for tenant, totals in now.metrics.tenants.items()]


def _live_requests_by_tenant(now: Snapshot) -> LabelledValues:
    live = Counter(dict.fromkeys(now.metrics.tenants, 0))
    for use in now.engine.busy_tenants():
        live[now.metrics.tenant_label(use.name)] += use.num_live
    return [((tenant,), count) for tenant, count in live.items()]


def _durations(now: Snapshot) -> LabelledValues:
    for operation, times in now.metrics.operations.items():
        for error, histogram in times.durations.items():
            yield (operation, error), histogram


def _prompt_tokens(now: Snapshot) -> int:
    return now.counters.prefill_tokens + now.stats.cached_tokens


def state_points(state: EngineState) -> list[tuple[tuple[str], int]]:
    """Returns 1 for the state of the engine, and 0 for all others, each with its label."""
    return [((each.name.lower(),), int(each is state)) for each in EngineState]


STATE = Instrument("penstock.state", GAUGE, "", lambda now: state_points(now.stats.state),
                   "1 for the current state of the engine, 0 for all other states.", ("state",))  # fmt: skip
INSTRUMENTS = (
    # The engine, now ------------------------------------------------------------------------------------------------

    Instrument("penstock.info", GAUGE, "", _info,
               "Always 1; the labels describe the service.",
               ("version", "model", "architecture", "backend", "device", "dtype", "quantization", "kv_cache_dtype")),
    STATE,
    Instrument("penstock.live_requests", GAUGE, "{request}", lambda now: now.stats.requests,
               "Requests that have not ended, including waiting ones."),
    Instrument("penstock.stalled_requests", GAUGE, "{request}", lambda now: now.stats.stalled,
               "Live requests that are paused because their output is not read."),
    Instrument("penstock.running_rows", GAUGE, "{row}", lambda now: now.stats.running,
               "Sequences in the current steps."),
    Instrument("penstock.waiting_choices", GAUGE, "{choice}", lambda now: now.stats.waiting,
               "Sequences that wait for a row."),
    Instrument("penstock.kv.usage", GAUGE, "1", lambda now: now.stats.kv_usage,
               "Share of the KV cache's blocks that rows hold; evictable cache does not count."),
    Instrument("penstock.kv.blocks", GAUGE, "{block}", lambda now: now.facts.num_blocks,
               "All blocks of the KV cache. Layers with a window may have blocks of their own."),
    Instrument("penstock.kv.cached_blocks", GAUGE, "{block}", lambda now: now.stats.cached_blocks,
               "Blocks that no row holds and that a prefix lookup can find."),
    Instrument("penstock.kv.retained_blocks", GAUGE, "{block}", lambda now: now.stats.retained_blocks,
               "Cached blocks that are retained for requests that continue an earlier one."),
    Instrument("penstock.kv.host_blocks", GAUGE, "{block}", lambda now: now.stats.host_blocks,
               "Evicted blocks in host memory."),
    Instrument("penstock.state.slots", GAUGE, "{slot}", lambda now: now.facts.num_state_slots,
               "Slots for recurrent states; 0 for a model without recurrent layers."),
    Instrument("penstock.state.slots_used", GAUGE, "{slot}", lambda now: now.stats.state_slots_used,
               "Slots that hold a recurrent state, or will."),
    Instrument("penstock.state.snapshots", GAUGE, "{slot}", lambda now: now.stats.state_snapshots,
               "Used slots with a saved state for later requests; each other one belongs to a running row."),
    Instrument("penstock.median_step_time", GAUGE, "s", lambda now: now.stats.step_s,
               "Median time of the last steps."),
    Instrument("penstock.predicted_time_to_first_token", GAUGE, "s", lambda now: now.stats.predicted_ttft_s,
               "Prediction for a short request that arrives now; absent while nothing is known."),
    Instrument("penstock.event_loop.lag", GAUGE, "s", _loop_lag,
               "How late the service's event loop ran callbacks, over the last 20 s.", ("statistic",)),

    # The engine, since the start ------------------------------------------------------------------------------------

    Instrument("penstock.steps", COUNTER, "{step}", lambda now: now.counters.steps,
               "Planned steps."),
    Instrument("penstock.decode_rows", COUNTER, "{row}", lambda now: now.counters.decode_rows,
               "Decoding rows, summed over all steps. Divide by the steps for the mean number of rows per step."),
    Instrument("penstock.prefill_tokens", COUNTER, "{token}", lambda now: now.counters.prefill_tokens,
               "Prompt tokens that were computed, including those computed again after a preemption."),
    Instrument("penstock.cached_tokens", COUNTER, "{token}", lambda now: now.stats.cached_tokens,
               "Prompt tokens that were found in the prefix cache."),
    Instrument("penstock.restored_tokens", COUNTER, "{token}", lambda now: now.stats.restored_tokens,
               "Cached tokens whose KV was copied back from host memory."),
    Instrument("penstock.state.hits", COUNTER, "{row}", lambda now: now.counters.state_hits,
               "Rows that began with a saved recurrent state."),
    Instrument("penstock.state.misses", COUNTER, "{row}", lambda now: now.counters.state_misses,
               "Rows for which more KV was cached than there was a saved state for."),
    Instrument("penstock.state.missed_tokens", COUNTER, "{token}", lambda now: now.counters.state_missed_tokens,
               "Tokens whose KV was cached, and that were computed again for lack of a saved state."),
    Instrument("penstock.output_tokens", COUNTER, "{token}", lambda now: now.counters.output_tokens,
               "Sampled tokens."),
    Instrument("penstock.drafts", COUNTER, "{draft}", lambda now: now.counters.speculation.steps,
               "Computed drafts: one per row and step."),
    Instrument("penstock.drafted_tokens", COUNTER, "{token}",
               lambda now: _by_position(now.counters.speculation.drafted_at),
               "Drafted tokens, by their position in the draft, from 0.", _POSITION),
    Instrument("penstock.accepted_tokens", COUNTER, "{token}",
               lambda now: _by_position(now.counters.speculation.accepted_at),
               "Drafted tokens that were accepted.", _POSITION),
    Instrument("penstock.resumed_requests", COUNTER, "{request}", lambda now: now.counters.resumed_requests,
               "Requests that continued the token ids of another service."),
    Instrument("penstock.preemptions", COUNTER, "{preemption}", lambda now: now.counters.preemptions,
               "Rows that gave up their blocks to other rows."),
    Instrument("penstock.rows_sat_out", COUNTER, "{row}", lambda now: now.counters.rows_sat_out,
               "Rows that a step left out because their tenant had its share of it, summed over all steps."),
    Instrument("penstock.kv_events.batches", COUNTER, "{batch}", lambda now: now.metrics.read_kv_batches()[0],
               "Batches of KV events for ZeroMQ."),
    Instrument("penstock.kv_events.dropped_batches", COUNTER, "{batch}", lambda now: now.metrics.read_kv_batches()[1],
               "Batches of KV events that were not published, because too many were waiting; subscribers see a gap."),
    Instrument("penstock.worker_restarts", COUNTER, "{restart}", lambda now: now.stats.restarts,
               "Workers that were replaced."),

    # Requests and calls ---------------------------------------------------------------------------------------------

    Instrument("penstock.requests", COUNTER, "{request}", lambda now: now.metrics.ends.items(),
               "Requests that ended, including refused ones, by status and reason.", ("code", "reason")),
    Instrument("penstock.calls", COUNTER, "{call}", lambda now: now.metrics.calls.items(),
               "gRPC calls that ended, on both listeners.", ("method", "code")),
    Instrument("penstock.inter_token_latency", HISTOGRAM, "s", lambda now: now.metrics.inter_token,
               "Time between two deltas of a sequence.", (), buckets.FINE),
    Instrument("penstock.request.queue_time", HISTOGRAM, "s", lambda now: now.metrics.queue_time,
               "From arrival to the first row, for requests that got a row.", (), buckets.FINE),
    Instrument("penstock.request.prefill_time", HISTOGRAM, "s", lambda now: now.metrics.prefill_time,
               "From the first row to the first token.", (), buckets.FINE),
    Instrument("penstock.tenant.requests", COUNTER, "{request}", _by_tenant(lambda totals: totals.requests),
               "Requests that ended.", _TENANT),
    Instrument("penstock.tenant.prompt_tokens", COUNTER, "{token}", _by_tenant(lambda totals: totals.prompt_tokens),
               "Prompt tokens of requests that ended.", _TENANT),
    Instrument("penstock.tenant.cached_tokens", COUNTER, "{token}", _by_tenant(lambda totals: totals.cached_tokens),
               "Prompt tokens of requests that ended that came from the prefix cache.", _TENANT),
    Instrument("penstock.tenant.output_tokens", COUNTER, "{token}", _by_tenant(lambda totals: totals.output_tokens),
               "Output tokens of requests that ended.", _TENANT),
    Instrument("penstock.tenant.live_requests", GAUGE, "{request}", _live_requests_by_tenant,
               "Requests that have not ended.", _TENANT),

    Instrument("gen_ai.server.request.duration", HISTOGRAM, "s", _durations,
               "From arrival to the end of a request; the error type is its status if that is not OK.",
               (*_GENAI, "error.type"), buckets.GENAI_DURATION),
    Instrument("gen_ai.server.time_to_first_token", HISTOGRAM, "s",
               lambda now: [((name,), times.first_token) for name, times in now.metrics.operations.items()],
               "From arrival to the first token, for requests that ended with OK.",
               _GENAI, buckets.GENAI_FIRST_TOKEN),
    Instrument("gen_ai.server.time_per_output_token", HISTOGRAM, "s",
               lambda now: [((name,), times.output_token) for name, times in now.metrics.operations.items()],
               "From the first token to the end, divided by the tokens after the first, for requests that ended with "
               "OK.", _GENAI, buckets.GENAI_OUTPUT_TOKEN),

    # vLLM's names ---------------------------------------------------------------------------------------------------

    Instrument("vllm:num_requests_running", GAUGE, "{row}", lambda now: now.stats.running,
               "Same as penstock_running_rows.", _VLLM),
    Instrument("vllm:num_requests_waiting", GAUGE, "{choice}", lambda now: now.stats.waiting,
               "Same as penstock_waiting_choices.", _VLLM),
    Instrument("vllm:kv_cache_usage_perc", GAUGE, "1", lambda now: now.stats.kv_usage,
               "Same as penstock_kv_usage_ratio: 1 is full.", _VLLM),
    Instrument("vllm:cache_config_info", GAUGE, "", _vllm_cache_config,
               "Always 1; the labels describe the layout of the KV cache.",
               ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "engine")),
    Instrument("vllm:lora_requests_info", GAUGE, "s", _vllm_lora,
               "Current Unix time; the labels have the number of slots for adapters, and the adapters in use.",
               ("max_lora", "running_lora_adapters", "waiting_lora_adapters")),
    Instrument("vllm:prompt_tokens_total", COUNTER, "{token}", _prompt_tokens,
               "Prompt tokens, computed or from the cache.", _VLLM),
    Instrument("vllm:generation_tokens_total", COUNTER, "{token}", lambda now: now.counters.output_tokens,
               "Same as penstock_output_tokens_total.", _VLLM),
    Instrument("vllm:prefix_cache_queries_total", COUNTER, "{token}",
               lambda now: _prompt_tokens(now) if now.engine.config.enable_prefix_caching else 0,
               "Prompt tokens that were looked up in the prefix cache.", _VLLM),
    Instrument("vllm:prefix_cache_hits_total", COUNTER, "{token}", lambda now: now.stats.cached_tokens,
               "Same as penstock_cached_tokens_total.", _VLLM),
    Instrument("vllm:num_preemptions_total", COUNTER, "{preemption}", lambda now: now.counters.preemptions,
               "Same as penstock_preemptions_total.", _VLLM),
    Instrument("vllm:spec_decode_num_drafts_total", COUNTER, "{draft}", lambda now: now.counters.speculation.steps,
               "Same as penstock_drafts_total.", _VLLM),
    Instrument("vllm:spec_decode_num_draft_tokens_total", COUNTER, "{token}",
               lambda now: now.counters.speculation.drafted,
               "Same as penstock_drafted_tokens_total, over all positions.", _VLLM),
    Instrument("vllm:spec_decode_num_accepted_tokens_total", COUNTER, "{token}",
               lambda now: now.counters.speculation.accepted,
               "Same as penstock_accepted_tokens_total, over all positions.", _VLLM),
    Instrument("vllm:spec_decode_num_accepted_tokens_per_pos_total", COUNTER, "{token}",
               lambda now: _by_position(now.counters.speculation.accepted_at),
               "Same as penstock_accepted_tokens_total.", (*_VLLM, *_POSITION)),
    Instrument("vllm:request_success_total", COUNTER, "{request}",
               lambda now: [((reason,), count) for reason, count in now.metrics.finished.items()],
               "Accepted requests that ended: stop, length, abort or error.", (*_VLLM, "finished_reason")),
    Instrument("vllm:time_to_first_token_seconds", HISTOGRAM, "s", lambda now: now.metrics.first_token,
               "From arrival to the first output, recorded as soon as the output is there.",
               _VLLM, buckets.VLLM_FIRST_TOKEN),
    Instrument("vllm:inter_token_latency_seconds", HISTOGRAM, "s", lambda now: now.metrics.inter_token,
               "Same as penstock_inter_token_latency_seconds.", _VLLM, buckets.VLLM_OUTPUT_TOKEN),
    Instrument("vllm:request_time_per_output_token_seconds", HISTOGRAM, "s", lambda now: now.metrics.output_token,
               "Mean of a request, from its second token on.", _VLLM, buckets.VLLM_OUTPUT_TOKEN),
    Instrument("vllm:e2e_request_latency_seconds", HISTOGRAM, "s", lambda now: now.metrics.duration,
               "From arrival to the end, for accepted requests.", _VLLM, buckets.VLLM_REQUEST),
    Instrument("vllm:request_queue_time_seconds", HISTOGRAM, "s", lambda now: now.metrics.queue_time,
               "Same as penstock_request_queue_time_seconds.", _VLLM, buckets.VLLM_REQUEST),
    Instrument("vllm:request_prefill_time_seconds", HISTOGRAM, "s", lambda now: now.metrics.prefill_time,
               "Same as penstock_request_prefill_time_seconds.", _VLLM, buckets.VLLM_REQUEST),
    Instrument("vllm:request_decode_time_seconds", HISTOGRAM, "s", lambda now: now.metrics.decode_time,
               "From the first token to the end.", _VLLM, buckets.VLLM_REQUEST),
    Instrument("vllm:request_inference_time_seconds", HISTOGRAM, "s", lambda now: now.metrics.inference_time,
               "From the first row to the end.", _VLLM, buckets.VLLM_REQUEST),
    Instrument("vllm:request_prompt_tokens", HISTOGRAM, "{token}", lambda now: now.metrics.prompt_tokens,
               "Prompt tokens of an accepted request.", _VLLM, buckets.TOKEN_BOUNDS),
    Instrument("vllm:request_generation_tokens", HISTOGRAM, "{token}", lambda now: now.metrics.output_tokens,
               "Output tokens of an accepted request.", _VLLM, buckets.TOKEN_BOUNDS),
)  # fmt: skip
"""All metrics, in the order of the page."""
