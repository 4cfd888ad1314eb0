"""The configuration of a server: what ``penstock serve`` makes of its flags, and tests write themselves."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock.clients.host.reloaded_files import CHECK_INTERVAL_S, Watched, WatchedFiles
from penstock.clients.host.routing_headers import Objectives
from penstock.models.checkpoint.classification_head import ClassificationHead
from penstock.models.checkpoint.digest import CheckpointDigest
from penstock.models.checkpoint.pooling_config import PoolingConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.worker_config import SpeculationConfig
from penstock.service.auth.identity import AllowAll, Authenticator
from penstock.service.auth.tenant_limits import TenantLimitsFile
from penstock.service.auth.tls import ServerTls
from penstock.service.config.kv_events import KvEventsConfig
from penstock.service.config.limits import MAX_CONNECTIONS
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.parsers.registry import AUTO
from penstock.service.requests.live.open_prompt import OPEN_PROMPT_TTL_S
from penstock.service.rpc.foreign.contracts import ModelFiles
from penstock.service.streaming.outbox import HEARTBEAT_S
from penstock.service.telemetry.stats_log import INTERVAL_S


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The server's configuration, complete and checked."""

    model_name: str
    """The name that clients see; also a part of every cache salt."""
    listen: str = "127.0.0.1:50051"
    """``host:port``, port 0 for any, or ``unix:PATH``."""
    admin_listen: str | None = None
    """The same for the admin listener; None: no such listener. It needs an authenticator if other machines can reach
    it."""
    metrics_listen: str | None = None
    """``host:port`` of the page for Prometheus; None: no page."""
    allowed_hosts: tuple[str, ...] = ()
    """Further host names of the page, besides its address."""
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    """The engine's configuration. Clients can read its limits, which also limit the streams of a connection."""
    max_connections: int = MAX_CONNECTIONS
    """The maximum number of callers' connections; lower if the limit on open files is too low."""
    contracts: tuple[str, ...] = ()
    """The names of the contracts of other engines that the callers' listener serves too."""
    model_files: ModelFiles | None = None
    """The paths of the model's files, for contracts that offer them; None if unknown."""
    checkpoint: CheckpointDigest = field(default_factory=CheckpointDigest)
    """The digests of the model's files, in tickets to resume requests."""
    authenticator: Authenticator = field(default_factory=AllowAll)
    tls: ServerTls | None = None
    """Applies to ``listen``, and to ``admin_listen`` if other machines can reach it."""
    tenants: WatchedFiles[TenantLimitsFile] | None = None
    """The file with the tenants' limits; ``scheduler`` starts with the same limits."""
    watched: Sequence[Watched] = ()
    """All files that are reloaded when they change."""
    check_interval_s: float = CHECK_INTERVAL_S
    embedding: PoolingConfig = field(default_factory=PoolingConfig)
    head: ClassificationHead | None = None
    """The head that classifies and scores texts; None: the model has none."""
    generates: bool = True
    """Whether the model has an output head."""
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    tool_call_parser: str = AUTO
    """The name of the format of the model's tool calls; AUTO: detected; NONE: not parsed."""
    reasoning_parser: str = AUTO
    """The same for its reasoning."""
    speculation: SpeculationConfig | None = None
    """How the worker drafts; None: no speculative decoding."""
    drafts_predictions: bool = True
    """Whether the worker drafts from the outputs that requests predict."""
    conversation_ttl_s: float = 600.0
    """The time for which an ended request can be continued, and the longest time for which its KV cache is retained."""
    conversation_tokens: int = 1_000_000
    """The maximum number of tokens in a tenant's stored contexts."""
    open_prompt_ttl_s: float = OPEN_PROMPT_TTL_S
    """The time after the last append at which an open prompt ends."""
    drain_delay_s: float = 0.0
    """The time after SIGTERM for which new requests are still accepted, with health at NOT_SERVING, until load
    balancers send them elsewhere."""
    grace_s: float = 30.0
    """The time for running requests to finish after the drain delay."""
    target_ttft_s: float | None = None
    """The target time to the first token of a short request. Load reports are relative to it, or to the limits if it is
    None."""
    heartbeat_s: float = HEARTBEAT_S
    tokenizer_threads: int = 2
    closes_objects: bool = True
    """Whether objects have only the properties that their schema declares, unless it has a rule for others."""
    checks_grammars_soon: bool = False
    """Whether the process that checks grammars starts with the service, instead of with the first grammar."""
    objectives: Objectives = field(default_factory=dict)
    """The priorities of requests by the objectives that gateways name."""
    lora_modules: Mapping[str, str] = field(default_factory=dict)
    """The directories of LoRA adapters that are loaded at the start, by name."""
    http_loads_adapters: bool = False
    """Whether adapters are loaded and unloaded over HTTP too."""
    kv_events: KvEventsConfig | None = None
    """How the prefix cache's changes are published over ZeroMQ; None: not at all."""
    step_log: Path | None = None
    """The file for the work and the time of each step; None: they are not logged."""
    stats_interval_s: float = INTERVAL_S
    """The interval between log lines with the engine's statistics."""

    @property
    def max_drafts(self) -> int:
        """The maximum number of draft tokens per choice and step."""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens

    def may_use_adapters(self, tenant: str) -> Collection[str] | None:
        """Returns the names of the LoRA adapters that a tenant may use, by its file as it is now; None: all."""
        return None if self.tenants is None else self.tenants.value.adapters_of(tenant)

    def configured(self) -> SchedulerConfig:
        """Returns the engine's configuration by the command line, with the tenants of the file as it is now."""
        if self.tenants is None:
            return self.scheduler
        file = self.tenants.value
        return replace(self.scheduler, default_tenant=file.default, tenants=file.named)
