"""The configuration of a service: frozen and checked once, from the command line, a file, or Python.

Flags have vLLM's names if vLLM has the same flag. Nothing here touches the model, the port or the machine.
"""

# ruff: noqa: RUF009 - flag returns a dataclasses.field

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.models.executor.log_format import JSON, TEXT
from penstock.scheduler.policy import Policy
from penstock.scheduler.worker_config import MAX_LORA_RANK, SpeculationConfig
from penstock.service.config.access_flags import AccessFlags
from penstock.service.config.contracts import read_contracts
from penstock.service.config.flag_checks import (
    check_adapters,
    check_identity,
    check_listeners,
    check_memory,
    check_texts,
    host_port,
    read_lora_modules,
)
from penstock.service.config.flags import ConfigError, check, flag
from penstock.service.config.host_flags import HostFlags, check_hosts
from penstock.service.config.kv_events import KvEventsConfig, parse_kv_events
from penstock.service.config.speculative import choose_speculation

_DEVICE = re.compile("auto|cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, kw_only=True)
class ServeConfig(HostFlags, AccessFlags):
    """The flags of ``penstock serve``. Raises ConfigError if a value is out of bounds."""

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
    attention_backend: str = flag(
        "triton",
        "what computes attention on the cuda backend: triton is penstock's own kernels; flashinfer, and fa for "
        "FlashAttention 3, are libraries that must be installed",
        choices=["triton", "flashinfer", "fa"],
    )
    tensor_parallel_size: int = flag(
        1, "ranks that share the model: each is a process on its own GPU, with a part of every matrix; also runs on "
        "CPUs, in plain torch, for testing", metavar="N", low=1, high=64,
    )  # fmt: skip
    pipeline_parallel_size: int = flag(
        1, "stages that share the model: each has a part of the layers, for models and loads that outgrow one host. "
        "With --tensor-parallel-size too, each stage has that many ranks", metavar="N", low=1, high=64,
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
    lora_modules: str | None = flag(
        None, "LoRA adapters to load at the start, separated by commas: each is a name for requests and a directory in "
        "peft's layout, such as support=/srv/support", metavar="NAME=PATH,...", shown="none",
    )  # fmt: skip
    max_loras: int | None = flag(
        None, "LoRA adapters that are in memory at once; if requests use more, the least recently used one is replaced",
        metavar="N", low=0, high=64, shown="4 with --lora-modules, else none",
    )  # fmt: skip
    max_lora_rank: int = flag(16, "limit on the rank of a LoRA adapter", metavar="N", low=1, high=MAX_LORA_RANK)
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
        None, 'speculative decoding, which never changes output; none, or a method: auto, ngram, suffix, mtp, '
        'draft_model or eagle3, the last two with a "model"; other keys are as in vLLM, and num_speculative_tokens is '
        'a limit: fewer are drafted if that is faster', metavar="none|JSON", is_json=True,
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
    step_log: Path | None = flag(
        None, "write the work and the time of each step to a file, which is replaced; penstock simulate predicts other "
        "loads from it", metavar="FILE", shown="none",
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
        check_adapters(self)
        check_hosts(self)
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"--device: must be auto, cpu, cuda or cuda:N; it is {self.device!r}")
        if self.num_ranks > 1 and ":" in self.device:
            raise ConfigError(
                f"--device: {self.device} is one GPU, but {self.rank_flags} needs {self.num_ranks}; give cuda, and "
                "choose the GPUs with CUDA_VISIBLE_DEVICES"
            )
        if not self.model:
            raise ConfigError("MODEL: is empty; give a directory, a GGUF file, an id on the Hugging Face Hub, or demo")

    @property
    def num_ranks(self) -> int:
        """The number of ranks that share the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks on each host."""
        return self.num_ranks // self.nnodes

    @property
    def rank_flags(self) -> str:
        """The flags that set the number of ranks, for errors."""
        sizes = {"tensor": self.tensor_parallel_size, "pipeline": self.pipeline_parallel_size}
        return " times ".join(f"--{kind}-parallel-size {size}" for kind, size in sizes.items() if size > 1)

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
    def adapters(self) -> Mapping[str, str]:
        """The absolute paths of the adapters of the command line, by name."""
        return {} if self.lora_modules is None else read_lora_modules(self.lora_modules)

    @property
    def num_adapter_slots(self) -> int:
        """The number of adapters that are in memory at once."""
        return (4 if self.lora_modules is not None else 0) if self.max_loras is None else self.max_loras

    @property
    def speculation(self) -> SpeculationConfig | None:
        """How tokens are drafted; None without speculative decoding."""
        shares_plans = self.tensor_parallel_size > 1 and self.pipeline_parallel_size == 1
        return choose_speculation(self.speculative_config, shares_plans=shares_plans)

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        if self.served_model_name is not None:
            return self.served_model_name
        # An id on the hub keeps its owner; the last part of a path is enough.
        path = Path(self.model).expanduser()
        return path.resolve().name if path.exists() or path.is_absolute() else self.model
