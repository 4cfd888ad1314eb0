"""Every metric of the service: its name, unit and labels. docs/metrics.md has the same table, and a test compares them.

Names follow OpenTelemetry; Prometheus names are derived by the rules of OpenTelemetry's own exporter. Names that begin
with ``vllm:`` are only for Prometheus: routers, autoscalers and dashboards made for vLLM read them.
"""

from dataclasses import dataclass
from enum import Enum, auto

from penstock.service.telemetry.histogram import merged, one_two_five

_SUFFIXES = {"s": "_seconds", "1": "_ratio", "By": "_bytes"}


class MetricKind(Enum):
    """The type of a metric."""

    COUNTER = auto()
    """A total since the start of the process."""
    GAUGE = auto()
    HISTOGRAM = auto()


@dataclass(frozen=True, slots=True)
class Instrument:
    """One metric."""

    name: str
    kind: MetricKind
    unit: str
    """In UCUM: s, 1 for a share, {token} for a count of tokens; empty for metrics that are always 1."""
    meaning: str
    """One sentence."""
    labels: tuple[str, ...] = ()
    """OpenTelemetry's attributes; in Prometheus, underscores replace the dots."""
    bounds: tuple[float, ...] = ()
    """The upper bounds of a histogram's buckets."""

    @property
    def is_for_prometheus_alone(self) -> bool:
        """Whether OpenTelemetry does not allow the name, because it has a colon."""
        return self.name.startswith(_VLLM)

    @property
    def prometheus_name(self) -> str:
        """The name on the page that Prometheus scrapes."""
        if self.is_for_prometheus_alone:
            return self.name
        suffix = "_total" if self.kind is MetricKind.COUNTER else ""
        return self.name.replace(".", "_") + _SUFFIXES.get(self.unit, "") + suffix


_VLLM = "vllm:"
_OF_VLLM = ("model_name", "engine")
_OF_GENAI = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
_TENANT = ("tenant",)

# From OpenTelemetry's conventions for generative AI.
_GENAI_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_GENAI_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_GENAI_OUTPUT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# vLLM's bounds: a quantile over several replicas needs the same buckets on all of them.
_VLLM_FIRST_TOKEN = (*_GENAI_FIRST_TOKEN, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_VLLM_OUTPUT_TOKEN = (*_GENAI_OUTPUT_TOKEN, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_VLLM_REQUEST = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
# penstock's own bounds: small models produce a token, and requests leave the queue, in less than a millisecond.
_FINE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)

FIRST_TOKEN_BOUNDS = _VLLM_FIRST_TOKEN
"""Each of these four holds the bounds of all metrics that are read from the same histogram."""
OUTPUT_TOKEN_BOUNDS = merged(_VLLM_OUTPUT_TOKEN, _FINE)
REQUEST_BOUNDS = merged(_VLLM_REQUEST, _GENAI_DURATION, _FINE)
MAX_TOKENS_BOUND = 1_000_000
TOKEN_BOUNDS = one_two_five(MAX_TOKENS_BOUND)


def _gauge(name: str, unit: str, meaning: str, labels: tuple[str, ...] = ()) -> Instrument:
    return Instrument(name, MetricKind.GAUGE, unit, meaning, labels)


def _counter(name: str, unit: str, meaning: str, labels: tuple[str, ...] = ()) -> Instrument:
    return Instrument(name, MetricKind.COUNTER, unit, meaning, labels)


def _histogram(name: str, unit: str, meaning: str, labels: tuple[str, ...], bounds: tuple[float, ...]) -> Instrument:
    return Instrument(name, MetricKind.HISTOGRAM, unit, meaning, labels, bounds)


# The engine, now ---------------------------------------------------------------------------------------------------

INFO = _gauge(
    "penstock.info", "", "Always 1; the labels describe the service.",
    ("version", "model", "architecture", "backend", "device", "dtype", "quantization", "kv_cache_dtype"),
)  # fmt: skip
STATE = _gauge("penstock.state", "", "1 for the current state of the engine, 0 for all other states.", ("state",))
LIVE_REQUESTS = _gauge("penstock.live_requests", "{request}", "Requests that have not ended, including waiting ones.")
STALLED_REQUESTS = _gauge(
    "penstock.stalled_requests", "{request}", "Live requests that are paused because their output is not read."
)
RUNNING_ROWS = _gauge("penstock.running_rows", "{row}", "Sequences in the current steps.")
WAITING_CHOICES = _gauge("penstock.waiting_choices", "{choice}", "Sequences that wait for a row.")
KV_USAGE = _gauge(
    "penstock.kv.usage", "1", "Share of the KV cache's blocks that rows hold; evictable cache does not count."
)
KV_BLOCKS = _gauge("penstock.kv.blocks", "{block}", "All blocks of the KV cache.")
KV_CACHED_BLOCKS = _gauge(
    "penstock.kv.cached_blocks", "{block}", "Blocks that no row holds and that a prefix lookup can find."
)
KV_RETAINED_BLOCKS = _gauge(
    "penstock.kv.retained_blocks",
    "{block}",
    "Cached blocks that are retained for requests that continue an earlier one.",
)
KV_HOST_BLOCKS = _gauge("penstock.kv.host_blocks", "{block}", "Evicted blocks in host memory.")
MEDIAN_STEP = _gauge("penstock.median_step_time", "s", "Median time of the last steps.")
PREDICTED_FIRST_TOKEN = _gauge(
    "penstock.predicted_time_to_first_token",
    "s",
    "Prediction for a short request that arrives now; absent while nothing is known.",
)
LOOP_LAG = _gauge(
    "penstock.event_loop.lag", "s", "Delay with which the service's event loop ran what was due, over the last 20 s.",
    ("statistic",),
)  # fmt: skip

# The engine, since the start ----------------------------------------------------------------------------------------

STEPS = _counter("penstock.steps", "{step}", "Planned steps.")
DECODE_ROWS = _counter(
    "penstock.decode_rows", "{row}", "Rows that steps continued; divided by the steps, the rows in a step."
)
PREFILL_TOKENS = _counter(
    "penstock.prefill_tokens",
    "{token}",
    "Prompt tokens that were computed, including those computed again after a preemption.",
)
CACHED_TOKENS = _counter("penstock.cached_tokens", "{token}", "Prompt tokens that were found in the prefix cache.")
RESTORED_TOKENS = _counter(
    "penstock.restored_tokens", "{token}", "Cached tokens whose KV was copied back from host memory."
)
OUTPUT_TOKENS = _counter("penstock.output_tokens", "{token}", "Sampled tokens.")
DRAFTS = _counter("penstock.drafts", "{draft}", "Computed drafts: one per row and step.")
DRAFTED_TOKENS = _counter(
    "penstock.drafted_tokens", "{token}", "Drafted tokens, by their position in the draft, from 0.", ("position",)
)
ACCEPTED_TOKENS = _counter("penstock.accepted_tokens", "{token}", "Drafted tokens that were accepted.", ("position",))
PREEMPTIONS = _counter("penstock.preemptions", "{preemption}", "Rows that gave up their blocks to other rows.")
WORKER_RESTARTS = _counter("penstock.worker_restarts", "{restart}", "Workers that were replaced.")

# Requests and calls -------------------------------------------------------------------------------------------------

REQUESTS = _counter(
    "penstock.requests",
    "{request}",
    "Requests that ended, including refused ones, by status and reason.",
    ("code", "reason"),
)
CALLS = _counter("penstock.calls", "{call}", "gRPC calls that ended, on both listeners.", ("method", "code"))
INTER_TOKEN = _histogram("penstock.inter_token_latency", "s", "Time between two deltas of a sequence.", (), _FINE)
QUEUE_TIME = _histogram(
    "penstock.request.queue_time", "s", "From arrival to the first row, for requests that got a row.", (), _FINE
)
PREFILL_TIME = _histogram("penstock.request.prefill_time", "s", "From the first row to the first token.", (), _FINE)
TENANT_REQUESTS = _counter("penstock.tenant.requests", "{request}", "Requests that ended.", _TENANT)
TENANT_PROMPT_TOKENS = _counter(
    "penstock.tenant.prompt_tokens", "{token}", "Prompt tokens of requests that ended.", _TENANT
)
TENANT_CACHED_TOKENS = _counter(
    "penstock.tenant.cached_tokens",
    "{token}",
    "Prompt tokens of requests that ended that came from the prefix cache.",
    _TENANT,
)
TENANT_OUTPUT_TOKENS = _counter(
    "penstock.tenant.output_tokens", "{token}", "Output tokens of requests that ended.", _TENANT
)
TENANT_LIVE = _gauge("penstock.tenant.live_requests", "{request}", "Requests that have not ended.", _TENANT)

GENAI_DURATION = _histogram(
    "gen_ai.server.request.duration",
    "s",
    "From arrival to the end of a request; the error type is its status if that is not OK.",
    (*_OF_GENAI, "error.type"),
    _GENAI_DURATION,
)
GENAI_FIRST_TOKEN = _histogram(
    "gen_ai.server.time_to_first_token", "s", "From arrival to the first token, for requests that ended with OK.",
    _OF_GENAI, _GENAI_FIRST_TOKEN,
)  # fmt: skip
GENAI_OUTPUT_TOKEN = _histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "From the first token to the end, divided by the tokens after the first, for requests that ended with OK.",
    _OF_GENAI,
    _GENAI_OUTPUT_TOKEN,
)

# vLLM's names -------------------------------------------------------------------------------------------------------

VLLM_RUNNING = _gauge("vllm:num_requests_running", "{row}", "Same as penstock_running_rows.", _OF_VLLM)
VLLM_WAITING = _gauge("vllm:num_requests_waiting", "{choice}", "Same as penstock_waiting_choices.", _OF_VLLM)
VLLM_KV_USAGE = _gauge("vllm:kv_cache_usage_perc", "1", "Same as penstock_kv_usage_ratio: 1 is full.", _OF_VLLM)
VLLM_CACHE_CONFIG = _gauge(
    "vllm:cache_config_info", "", "Always 1; the labels describe the layout of the KV cache.",
    ("block_size", "num_gpu_blocks", "cache_dtype", "enable_prefix_caching", "engine"),
)  # fmt: skip
VLLM_LORA = _gauge(
    "vllm:lora_requests_info", "s", "Current Unix time; no adapters are served.",
    ("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
)  # fmt: skip
VLLM_PROMPT_TOKENS = _counter(
    "vllm:prompt_tokens_total", "{token}", "Prompt tokens, computed or from the cache.", _OF_VLLM
)
VLLM_GENERATION_TOKENS = _counter(
    "vllm:generation_tokens_total", "{token}", "Same as penstock_output_tokens_total.", _OF_VLLM
)
VLLM_PREFIX_QUERIES = _counter(
    "vllm:prefix_cache_queries_total",
    "{token}",
    "Prompt tokens that were looked up in the prefix cache.",
    _OF_VLLM,
)
VLLM_PREFIX_HITS = _counter(
    "vllm:prefix_cache_hits_total", "{token}", "Same as penstock_cached_tokens_total.", _OF_VLLM
)
VLLM_PREEMPTIONS = _counter(
    "vllm:num_preemptions_total", "{preemption}", "Same as penstock_preemptions_total.", _OF_VLLM
)
VLLM_DRAFTS = _counter("vllm:spec_decode_num_drafts_total", "{draft}", "Same as penstock_drafts_total.", _OF_VLLM)
VLLM_DRAFTED_TOKENS = _counter(
    "vllm:spec_decode_num_draft_tokens_total",
    "{token}",
    "Same as penstock_drafted_tokens_total, over all positions.",
    _OF_VLLM,
)
VLLM_ACCEPTED_TOKENS = _counter(
    "vllm:spec_decode_num_accepted_tokens_total",
    "{token}",
    "Same as penstock_accepted_tokens_total, over all positions.",
    _OF_VLLM,
)
VLLM_ACCEPTED_PER_POSITION = _counter(
    "vllm:spec_decode_num_accepted_tokens_per_pos_total", "{token}", "Same as penstock_accepted_tokens_total.",
    (*_OF_VLLM, "position"),
)  # fmt: skip
VLLM_SUCCESS = _counter(
    "vllm:request_success_total", "{request}", "Accepted requests that ended: stop, length, abort or error.",
    (*_OF_VLLM, "finished_reason"),
)  # fmt: skip
VLLM_FIRST_TOKEN = _histogram(
    "vllm:time_to_first_token_seconds",
    "s",
    "From arrival to the first output, recorded as soon as the output is there.",
    _OF_VLLM,
    _VLLM_FIRST_TOKEN,
)
VLLM_INTER_TOKEN = _histogram(
    "vllm:inter_token_latency_seconds",
    "s",
    "Same as penstock_inter_token_latency_seconds.",
    _OF_VLLM,
    _VLLM_OUTPUT_TOKEN,
)
VLLM_REQUEST_OUTPUT_TOKEN = _histogram(
    "vllm:request_time_per_output_token_seconds", "s", "Mean of a request, from its second token on.", _OF_VLLM,
    _VLLM_OUTPUT_TOKEN,
)  # fmt: skip
VLLM_DURATION = _histogram(
    "vllm:e2e_request_latency_seconds", "s", "From arrival to the end, for accepted requests.", _OF_VLLM, _VLLM_REQUEST
)
VLLM_QUEUE_TIME = _histogram(
    "vllm:request_queue_time_seconds", "s", "Same as penstock_request_queue_time_seconds.", _OF_VLLM, _VLLM_REQUEST
)
VLLM_PREFILL_TIME = _histogram(
    "vllm:request_prefill_time_seconds", "s", "Same as penstock_request_prefill_time_seconds.", _OF_VLLM, _VLLM_REQUEST
)
VLLM_DECODE_TIME = _histogram(
    "vllm:request_decode_time_seconds", "s", "From the first token to the end.", _OF_VLLM, _VLLM_REQUEST
)
VLLM_INFERENCE_TIME = _histogram(
    "vllm:request_inference_time_seconds", "s", "From the first row to the end.", _OF_VLLM, _VLLM_REQUEST
)
VLLM_REQUEST_PROMPT_TOKENS = _histogram(
    "vllm:request_prompt_tokens", "{token}", "Prompt tokens of an accepted request.", _OF_VLLM, TOKEN_BOUNDS
)
VLLM_REQUEST_OUTPUT_TOKENS = _histogram(
    "vllm:request_generation_tokens", "{token}", "Output tokens of an accepted request.", _OF_VLLM, TOKEN_BOUNDS
)


def instruments() -> list[Instrument]:
    """Returns all metrics, in the order of this file."""
    return [value for value in globals().values() if isinstance(value, Instrument)]
