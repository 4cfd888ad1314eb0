"""The configuration of a service: frozen and checked once, from the command line, a file, or Python.

Flags have vLLM's names if vLLM has the same flag. Nothing here touches the model, the port or the machine.
"""

# ruff: noqa: RUF009 - flag returns a dataclasses.field

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.models.executor.log_format import JSON, TEXT
from penstock.scheduler.policy import Policy
from penstock.scheduler.worker_config import SpeculationConfig
from penstock.service.chat_templates.renderers import DEFAULT_TIMEOUT_S
from penstock.service.config.contracts import read_contracts
from penstock.service.config.flag_checks import check_identity, check_listeners, check_memory, check_texts, host_port
from penstock.service.config.flags import ConfigError, check, flag
from penstock.service.config.kv_events import KvEventsConfig, parse_kv_events
from penstock.service.config.limits import MAX_CONNECTIONS
from penstock.service.config.speculative import choose_speculation
from penstock.service.parsers.reasoning import REASONING_FORMATS
from penstock.service.parsers.registry import AUTO, NONE
from penstock.service.parsers.tool_formats import TOOL_FORMATS

_DEVICE = re.compile("auto|cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """The flags of ``penstock serve``. Raises ConfigError if a value is out of bounds."""

    model: str = flag(
        "demo",
        "a directory in Hugging Face's layout, a GGUF file, the id of a model on the Hugging Face Hub, or demo",
        group="the model",
    )
    revision: str | None = flag(
        None, "the branch, tag or commit of a model on the hub; only a commit always refers to the same files",
        metavar="NAME", shown="the main branch",
    )  # fmt: skip
    gguf_file: str | None = flag(
        None, "the name of a GGUF file in that directory or repository, or of the first of its parts",
        metavar="NAME", shown="none: the model is in Hugging Face's layout",
    )  # fmt: skip
    served_model_name: str | None = flag(
        None, "the model's name for clients", metavar="NAME", shown="the id on the hub, or the last part of the path"
    )
    generation_config: str = flag(
        AUTO, "sampling defaults of requests: auto for the model's generation_config.json, none for no defaults, or "
        "the path of such a file or its directory; the max_new_tokens of a file given here is a limit for every "
        "request",
        metavar="auto|none|PATH",
    )  # fmt: skip
    override_generation_config: str | None = flag(
        None, 'sampling defaults that override those of --generation-config, such as {"temperature": 0.6}; a '
        'max_new_tokens here is a limit for every request', metavar="JSON", shown="none", is_json=True,
    )  # fmt: skip
    chat_template: Path | None = flag(
        None, "a Jinja chat template, or the name of one of the model's own", metavar="FILE|NAME",
        shown="the model's own",
    )  # fmt: skip
    chat_template_timeout: float = flag(
        DEFAULT_TIMEOUT_S, "CPU time that the chat template may use for one conversation; a request that needs more "
        "fails", metavar="SECONDS", low=0.01, high=600,
    )  # fmt: skip
    max_model_len: int | None = flag(
        None, "limit on the tokens of prompt and output together", metavar="N", low=2, high=1 << 24,
        shown="the model's own, or what the KV cache holds",
    )  # fmt: skip
    pooling: str | None = flag(
        None, "the hidden states that form an embedding: the last token's, the mean of all, or the first token's",
        choices=["last", "mean", "cls"], shown="from the model's 1_Pooling/config.json, or last",
    )  # fmt: skip
    score_tokens: str | None = flag(
        None, "two tokens of a reranker without a classification head: the first for a document that is irrelevant, "
        "the second for one that is relevant, such as no,yes", metavar="TOKEN,TOKEN", shown="none",
    )  # fmt: skip
    host: str | None = flag(
        None, "the address to listen on; 0.0.0.0 is every IPv4 address", shown="127.0.0.1", group="listeners"
    )
    port: int | None = flag(None, "the port to listen on; 0 is any free port", shown="50051", low=0, high=65535)
    listen: str | None = flag(
        None, "host and port together, or a Unix socket", metavar="HOST:PORT|unix:PATH", shown="--host and --port"
    )
    admin_listen: str | None = flag(
        None, "the admin listener; an address that other machines can reach requires --api-keys-file",
        metavar="HOST:PORT|unix:PATH|off", shown="the next port on 127.0.0.1, or the Unix socket PATH.admin",
    )  # fmt: skip
    metrics_listen: str | None = flag(
        None, "the listener for Prometheus, with metrics at /metrics", metavar="HOST:PORT|off",
        shown="two ports after the service's, on 127.0.0.1; off with a Unix socket",
    )  # fmt: skip
    max_connections: int = flag(
        MAX_CONNECTIONS, "limit on open gRPC connections; lower if the limit on open files requires it. Idle ones "
        "are closed to make room for new ones", metavar="N", low=1, high=1 << 20,
    )  # fmt: skip
    contracts: str | None = flag(
        None, "contracts of other engines to serve too, separated by commas: kserve, the Open Inference Protocol of "
        "KServe and Triton; openengine, which Dynamo calls; vllm, which the gateway smg calls",
        metavar="NAMES", shown="none",
    )  # fmt: skip
    http_port: int | None = flag(
        None, "the port of OpenAI's API over HTTP, or HTTPS with --tls-cert, in a child process; 0 is any free port",
        shown="no HTTP", low=0, high=65535,
    )  # fmt: skip
    http_host: str | None = flag(
        None, "the address of OpenAI's API; 0.0.0.0 is every IPv4 address", metavar="HOST", shown="127.0.0.1"
    )
    admin_http_port: int | None = flag(
        None, "the port of the status page for operators, with HTTPS if --tls-cert is given, in a child process",
        shown="no status page", low=0, high=65535,
    )  # fmt: skip
    admin_http_host: str | None = flag(
        None, "the address of the status page; one that other machines can reach requires --api-keys-file",
        metavar="HOST", shown="127.0.0.1",
    )  # fmt: skip
    tool_call_parser: str = flag(
        AUTO, "the format of the model's tool calls; auto detects it from the chat template",
        choices=[AUTO, NONE, *TOOL_FORMATS],
    )  # fmt: skip
    reasoning_parser: str = flag(
        AUTO, "the format of the model's reasoning; auto detects it from the chat template",
        choices=[AUTO, NONE, *REASONING_FORMATS],
    )  # fmt: skip
    allowed_origins: str | None = flag(
        None, "origins whose web pages may call OpenAI's API, separated by commas; * is any origin",
        metavar="ORIGINS", shown="none",
    )  # fmt: skip
    allowed_hosts: str | None = flag(
        None, "additional host names for HTTP and metrics, separated by commas; *.example.com is every name below "
        "it, * is any name. Requests with any other Host are refused for metrics, and for HTTP if callers need no key",
        metavar="NAMES", shown="addresses, names without a dot and this machine's name",
    )  # fmt: skip
    unknown_fields: str = flag(
        "refuse", "what OpenAI's API does with unknown fields; ignored ones are logged and counted",
        choices=["refuse", "ignore"],
    )  # fmt: skip
    sse_keep_alive: int = flag(
        15, "a stream of OpenAI's API that is idle for this long sends a blank line, for proxies; 0 sends none",
        metavar="SECONDS", low=0, high=3600,
    )  # fmt: skip
    responses_file: Path | None = flag(
        None, "the file of SQLite that keeps stored responses of OpenAI's API when the service restarts",
        metavar="FILE", shown="in memory only",
    )  # fmt: skip
    responses_ttl: int = flag(
        86_400, "how long OpenAI's API stores a response; 0 stores none", metavar="SECONDS", low=0, high=31_536_000
    )
    responses_mib: int = flag(
        128, "memory for all stored responses of OpenAI's API", metavar="MIB", low=1, high=1 << 20
    )
    tls_cert: Path | None = flag(
        None, "the service's certificate and intermediate certificates, in PEM", metavar="FILE",
        shown="no TLS", group="TLS and authentication; changed files are reloaded",
    )  # fmt: skip
    tls_key: Path | None = flag(None, "the certificate's private key, in PEM", metavar="FILE", shown="none")
    tls_client_ca: Path | None = flag(
        None,
        "CA certificates, in PEM; callers need a certificate signed by one of them",
        metavar="FILE",
        shown="no client certificates",
    )
    api_keys_file: Path | None = flag(
        None, "hashes of API keys with their tenants, one line per key: sha256:HEX TENANT", metavar="FILE",
        shown="without keys and tokens, all callers are one tenant",
    )  # fmt: skip
    jwt_jwks_file: Path | None = flag(
        None, "public keys of JSON web tokens: RS256, ES256 or EdDSA", metavar="FILE", shown="no tokens"
    )
    jwt_jwks_url: str | None = flag(
        None, "an https URL with such keys, which is fetched every 5 minutes", metavar="URL", shown="no tokens"
    )
    jwt_issuer: str | None = flag(None, "required iss of a token", metavar="NAME", shown="none")
    jwt_audience: str | None = flag(None, "required aud of a token, or one of its values", metavar="NAME", shown="none")
    jwt_tenant_claim: str = flag("tenant", "the claim that names a token's tenant", metavar="NAME")
    jwt_rights_claim: str = flag(
        "scope", "the claim with a token's rights, penstock:act-for-others and penstock:admin", metavar="NAME"
    )
    jwt_leeway: float = flag(
        30.0, "allowed difference between the clocks of issuer and service", metavar="SECONDS", low=0, high=300
    )
    tenants_file: Path | None = flag(
        None, "weights, caps and rate limits of tenants, in YAML", metavar="FILE", shown="equal weights and no caps"
    )
    device: str = flag(
        "auto",
        "where the model runs: cpu, cuda, cuda:1; auto is a GPU if there is one",
        metavar="NAME",
        group="hardware and precision",
    )
    backend: str = flag(
        "auto",
        "cpu is the C++ library, cuda is for NVIDIA GPUs, reference is plain torch on either, transformers runs that "
        "library's own module; auto is the fastest that can run the model",
        choices=["auto", "cpu", "cuda", "reference", "transformers"],
    )
    deterministic: bool = flag(
        False,
        "on one GPU: a request's results are bit-identical in every batch. Matrix products then use slower kernels, "
        "and attention does not split a row's context. Results of the cpu backend always are",
    )
    tensor_parallel_size: int = flag(
        1, "ranks that share the model: each is a process on its own GPU, with a part of every matrix; also runs on "
        "CPUs, in plain torch, for testing", metavar="N", low=1, high=64,
    )  # fmt: skip
    dtype: str = flag(
        "auto",
        "the type of weights and activations; auto is the checkpoint's. The cpu backend supports only bfloat16 and "
        "float32, so its auto is bfloat16 for float16, and float32 for float64",
        choices=["auto", "float32", "bfloat16", "float16", "float64"],
    )
    quantization: str = flag(
        "none",
        "int8, int4 and, on GPUs, fp8 quantise the weights of a float checkpoint at load; the others, and fp8 too, "
        "name the format of a quantised checkpoint",
        choices=["none", "int8", "int4", "fp8", "gptq", "awq", "compressed-tensors", "mxfp4", "modelopt"],
    )  # fmt: skip
    load_format: str = flag(
        "auto", "auto reads the model's files; dummy makes up weights, for benchmarks", choices=["auto", "dummy"]
    )
    threads: int | None = flag(
        None, "compute threads on a CPU", metavar="N", low=1, high=1024, shown="one for each core that it may use"
    )
    cpu_pinning: str = flag(
        "auto",
        "whether each of those threads is pinned to its own core; auto is on if the service may use only some of the "
        "machine's cores, and --threads covers all of those; else it keeps threads on their NUMA nodes",
        choices=["auto", "on", "off"],
    )
    block_size: int = flag(16, "tokens per block of the KV cache", metavar="N", choices=[16], group="the KV cache")
    kv_cache_dtype: str = flag(
        "auto", "the type of the KV cache: that of the activations, int8 on the cpu backend, or fp8 on cuda; auto is "
        "that of the activations, or int8 on the cpu backend with --quantization int8 or int4",
        choices=["auto", "float32", "bfloat16", "float16", "int8", "fp8"],
    )  # fmt: skip
    allow_additional_properties: bool = flag(
        False,
        "output that matches a JSON schema may have undeclared properties; without this flag, only if the schema sets "
        "additionalProperties",
    )
    enable_prefix_caching: bool = flag(True, "reuse the KV cache for requests with the same prefix")
    gpu_memory_utilization: float | None = flag(
        None, "the KV cache's share of the memory that is free after the weights are loaded; in vLLM it is a share of "
        "all memory, including the weights", metavar="SHARE", low=0.01, high=1.0,
        shown="0.9 on a GPU, 0.5 on a CPU",
    )  # fmt: skip
    kv_cache_memory_bytes: int | None = flag(
        None, "the KV cache's size on each rank; K, M, G are powers of 1024", metavar="BYTES", low=1, is_size=True,
        shown="set by --gpu-memory-utilization",
    )  # fmt: skip
    host_kv_cache_bytes: int = flag(
        0, "host memory for KV that is evicted from a GPU's cache; it is copied back when a request needs it, unless "
        "recomputing is faster; K, M, G are powers of 1024", metavar="BYTES", low=0, is_size=True, shown="none",
    )  # fmt: skip
    conversation_ttl: float = flag(
        600.0, "how long a request can be continued after it ends, and how long its KV is retained for that",
        metavar="SECONDS", low=0, high=86_400,
    )  # fmt: skip
    conversation_tokens: int = flag(
        1_000_000, "limit on the tokens of each tenant's contexts that are kept for continuation; all tenants "
        "together have 16 times as many; a token takes 6 bytes", metavar="N", low=0, high=1 << 32,
    )  # fmt: skip
    open_prompt_ttl: float = flag(
        60.0, "how long a prompt that arrives in pieces may stay open after the last one, and how long its KV is "
        "retained", metavar="SECONDS", low=0.1, high=86_400,
    )  # fmt: skip
    kv_events_config: str | None = flag(
        None, "publish changes of the prefix cache to routers over ZeroMQ, with vLLM's keys, such as "
        '{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558"}; needs '
        "the extra zmq", metavar="JSON", shown="not published", is_json=True,
    )  # fmt: skip
    scheduling_policy: str | None = flag(
        None, "which request runs first: fcfs the oldest, priority the one with the lowest start.priority, deadline "
        "the one with the least time left, fair one of the tenant that was served least for its weight",
        choices=["fcfs", "priority", "deadline", "fair"], group="scheduling",
        shown="fair with API keys, tokens or --tenants-file, else fcfs",
    )  # fmt: skip
    objectives: str | None = flag(
        None, "priorities of the objectives that a gateway names in x-llm-d-inference-objective, lower first, such as "
        '{"interactive": -10, "batch": 10}; they apply under the priority policy', metavar="JSON", shown="none",
        is_json=True,
    )  # fmt: skip
    target_itl: float = flag(
        0.0, "target time between a stream's tokens while prompts are computed, in chunks that fit; a high target "
        "favours prompts", metavar="MS", low=0, high=60_000, shown="120, or twice the time of a step without prompts",
    )  # fmt: skip
    target_ttft: float = flag(
        0.0, "target time to the first token of a short request, to which load reports relate the predicted one; "
        "balancers read them", metavar="MS", low=0, high=600_000,
        shown="none: load reports give the used share of the limiting resource",
    )  # fmt: skip
    max_num_seqs: int = flag(
        256, "limit on the sequences in a step, within its token budget", metavar="N", low=1, high=4096
    )
    max_num_batched_tokens: int | None = flag(
        None, "token budget of a step", metavar="N", low=1, high=1 << 20,
        shown="2048; on the cpu backend, 64 to 256, for about 0.15 s",
    )  # fmt: skip
    speculative_config: str | None = flag(
        None, 'speculative decoding, which never changes output; none, or a method: auto, ngram, suffix, draft_model '
        'or eagle3, the last two with a "model"; other keys are as in vLLM, and num_speculative_tokens is a limit: '
        'fewer are drafted if that is faster', metavar="none|JSON", is_json=True,
        shown="auto: drafts where the text of a request repeats itself; none with several ranks",
    )  # fmt: skip
    enable_predictions: bool = flag(True, "draft from the outputs that requests predict, which never changes output")
    max_queued_requests: int = flag(
        1024, "limit on waiting requests; more are refused", metavar="N", low=1, high=1 << 20
    )
    max_queued_tokens: int = flag(
        4_000_000, "limit on waiting prompt tokens; more are refused", metavar="N", low=1, high=1 << 32
    )
    explain_requests: int = flag(
        1000, "number of ended requests that penstock explain can show", metavar="N", low=0, high=100_000,
        group="operation",
    )  # fmt: skip
    drain_delay: float = flag(
        0.0, "after SIGTERM: how long new requests are still accepted while health reports NOT_SERVING, for load "
        "balancers", metavar="SECONDS", low=0, high=3600,
    )  # fmt: skip
    shutdown_grace: float = flag(
        30.0, "after SIGTERM: how long running requests may take to finish", metavar="SECONDS", low=0, high=86_400
    )
    log_level: str = flag("info", "least severe level that is logged", choices=["debug", "info", "warning", "error"])
    log_format: str = flag(TEXT, "lines of text, or one JSON object per line", choices=[TEXT, JSON])

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                check(field, value)
        check_listeners(self)
        read_contracts(self.contracts)
        check_identity(self)
        check_texts(self)
        check_memory(self)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device: must be auto, cpu, cuda or cuda:N; it is {self.device!r}")
        if self.tensor_parallel_size > 1 and ":" in self.device:
            raise ConfigError(
                f"--device: {self.device} is one GPU, but --tensor-parallel-size {self.tensor_parallel_size} needs "
                f"{self.tensor_parallel_size}; give cuda, and choose the GPUs with CUDA_VISIBLE_DEVICES"
            )
        if not self.model:
            raise ConfigError("MODEL: is empty; give a directory, a GGUF file, an id on the Hugging Face Hub, or demo")

    @property
    def address(self) -> str:
        """The listen address: ``host:port`` or ``unix:PATH``."""
        if self.listen is not None:
            return self.listen
        return host_port(self.host, 50051 if self.port is None else self.port)

    @property
    def address_flags(self) -> tuple[str, ...]:
        """The flags that set ``address``, for errors: one for all of it, or the port's and the host's."""
        return ("--listen",) if self.listen is not None else ("--port", "--host")

    @property
    def http_address(self) -> str | None:
        """The listen address for HTTP, as ``host:port``; None without HTTP."""
        return None if self.http_port is None else host_port(self.http_host, self.http_port)

    @property
    def admin_http_address(self) -> str | None:
        """The listen address of the status page, as ``host:port``; None without it."""
        return None if self.admin_http_port is None else host_port(self.admin_http_host, self.admin_http_port)

    @property
    def has_credentials(self) -> bool:
        """Whether callers need a key or a token."""
        return any(source is not None for source in (self.api_keys_file, self.jwt_jwks_file, self.jwt_jwks_url))

    @property
    def policy(self) -> Policy:
        """The scheduling policy. By default it is fair if there are tenants, so that none keeps others waiting."""
        if self.scheduling_policy is not None:
            return Policy(self.scheduling_policy)
        return Policy.FAIR if self.has_credentials or self.tenants_file is not None else Policy.FCFS

    @property
    def kv_events(self) -> KvEventsConfig | None:
        """How the prefix cache's changes are published; None if they are not."""
        config = KvEventsConfig() if self.kv_events_config is None else parse_kv_events(self.kv_events_config)
        return config if config.is_enabled else None

    @property
    def speculation(self) -> SpeculationConfig | None:
        """How tokens are drafted; None without speculative decoding."""
        return choose_speculation(self.speculative_config, self.tensor_parallel_size)

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        if self.served_model_name is not None:
            return self.served_model_name
        # An id on the hub keeps its owner; the last part of a path is enough.
        path = Path(self.model).expanduser()
        return path.resolve().name if path.exists() or path.is_absolute() else self.model
