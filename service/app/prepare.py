"""Makes of the flags of ``penstock serve`` the configurations of the server, the worker and the gateway. Checks ports,
files and the model before anything starts."""

import dataclasses
import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from penstock.clients.host.allowed_hosts import read_hosts
from penstock.clients.host.cpu.thread_placement import CannotPin, place_threads
from penstock.clients.host.distribution import install_command
from penstock.clients.host.machine import Machine, inspect_machine
from penstock.clients.host.routing_headers import read_objectives
from penstock.models.checkpoint.checkpoint import check_checkpoint, resolve_model
from penstock.models.checkpoint.digest import digest_checkpoint
from penstock.models.checkpoint.info import CheckpointInfo
from penstock.models.checkpoint.pooling_config import read_embedding
from penstock.models.errors import ModelError
from penstock.models.executor.join.leader import Leader
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import Pooling
from penstock.scheduler.worker_config import MAX_BATCHED_TOKENS, DraftMethod, Meeting, WorkerConfig
from penstock.service.app.classification_head import find_head
from penstock.service.app.http_process import STATUS_PAGE, HttpProcess, check_installed
from penstock.service.app.server_config import ServerConfig
from penstock.service.auth.operator_files import OperatorFiles
from penstock.service.auth.tenant_limits import TenantLimitsFile
from penstock.service.config.addresses import (
    ADMIN_HTTP_FLAG,
    HTTP_FLAG,
    HTTP_HOST_FLAG,
    Address,
    ListenError,
    admin_address,
    admin_http_address,
    check_apart,
    metrics_address,
    warn_of_exposure,
)
from penstock.service.config.contracts import CONTRACTS, read_contracts
from penstock.service.config.kv_events import KvEventsConfig
from penstock.service.config.sampling_defaults import SamplingDefaults, read_sampling_defaults
from penstock.service.config.serve_config import ServeConfig
from penstock.service.hosts.credentials import JoinCredentials
from penstock.service.hosts.leader import new_leader
from penstock.service.hosts.ray_agents import RayAgents, with_own_address
from penstock.service.rpc.foreign.contracts import ModelFiles
from penstock.service.text.conversion.placing import place_tokenizer
from penstock.service.text.tokenizer import Tokenizer
from penstock.service.text.tokenizer_config import TokenizerError
from penstock.service.text.tokenizer_files import (
    MAKE_TOKENIZER,
    TOKENIZER,
    ConvertedTokenizer,
    TokenizerFacts,
    predict_facts,
)

_GPU_SHARE, _CPU_SHARE = 0.9, 0.5
_HTTP_GRACE_S = 10
ZMQ_EXTRA = "zmq"

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """The checked configuration, complete before the worker starts."""

    server: ServerConfig
    worker: WorkerConfig
    load_tokenizer: Callable[[], Tokenizer]
    http: HttpProcess | None
    status_page: HttpProcess | None
    resources: ExitStack
    """What must exist as long as the service; its owner closes it."""
    leader: Leader | None = None
    """Accepts the other hosts; None: there are none."""
    ray_agents: RayAgents | None = None
    """Starts the workers there by Ray; None: the operator does."""


def prepare(config: ServeConfig) -> Prepared:
    """Checks ports, model and files, the fastest checks first. Raises ListenError, HttpFailed, FileError, ModelError
    and TokenizerError."""
    uses_ray = config.nnodes > 1 and config.distributed_executor_backend == "ray"
    if uses_ray:
        config = with_own_address(config)
    credentials = None if config.nnodes == 1 else JoinCredentials.load(config)
    with ExitStack() as resources:
        prepared = _prepare(config, resources)
    if credentials is None:
        return prepared
    leader = new_leader(config, credentials, prepared.server.checkpoint)
    agents = RayAgents(config, prepared.worker, credentials.token) if uses_ray else None
    return dataclasses.replace(prepared, leader=leader, ray_agents=agents)


def _prepare(config: ServeConfig, resources: ExitStack) -> Prepared:
    machine = inspect_machine()
    addresses = _check_addresses(config, machine)
    _check_kv_events(config.kv_events)
    files = OperatorFiles.load(config)
    has_weights = config.load_format != "dummy"
    path, checkpoint = _find_model(config, has_weights)
    pooling = None if config.pooling is None else Pooling(config.pooling)
    if checkpoint.classifier is not None or config.score_tokens is not None:
        pooling = pooling or Pooling.LAST  # modules.json describes the classifier, if anything
    embedding = read_embedding(path, pooling)
    speculation = None if checkpoint.classifier is not None else config.speculation
    if speculation is not None and speculation.model is not None:
        speculation = replace(speculation, model=str(resolve_model(speculation.model).resolve()))
    tokenizer, load_tokenizer, facts = _read_tokenizer(path, config, checkpoint.spec.vocab_size, resources)
    head, load_tokenizer = find_head(config, checkpoint, load_tokenizer)
    worker = replace(
        _worker_config(config, path, tokenizer, facts, machine),
        speculation=speculation,
        uses_predictions=config.enable_predictions and checkpoint.classifier is None,
    )
    server = ServerConfig(
        model_name=config.model_name,
        listen=config.address,
        target_ttft_s=config.target_ttft / 1000 or None,
        admin_listen=None if addresses.admin is None else str(addresses.admin),
        metrics_listen=None if addresses.metrics is None else str(addresses.metrics),
        allowed_hosts=read_hosts(config.allowed_hosts or ""),
        scheduler=_scheduler_config(config, TenantLimitsFile() if files.tenants is None else files.tenants.value),
        max_connections=config.max_connections,
        contracts=read_contracts(config.contracts),
        model_files=ModelFiles(path, tokenizer),
        checkpoint=digest_checkpoint(path, tokenizer, has_weights=has_weights),
        authenticator=files.authenticator,
        embedding=embedding,
        head=head,
        generates=checkpoint.classifier is None,
        sampling_defaults=_sampling_defaults(path, config),
        tool_call_parser=config.tool_call_parser,
        reasoning_parser=config.reasoning_parser,
        speculation=speculation,
        drafts_predictions=worker.drafts_predictions,
        tls=files.tls,
        tenants=files.tenants,
        watched=files.watched,
        conversation_ttl_s=config.conversation_ttl,
        open_prompt_ttl_s=config.open_prompt_ttl,
        conversation_tokens=config.conversation_tokens,
        drain_delay_s=config.drain_delay,
        grace_s=config.shutdown_grace,
        closes_objects=not config.allow_additional_properties,
        checks_grammars_soon=True,
        objectives={} if config.objectives is None else read_objectives(config.objectives),
        kv_events=config.kv_events,
        lora_modules=config.adapters,
        http_loads_adapters=config.enable_lora_routes,
        step_log=config.step_log,
    )
    return Prepared(server, worker, load_tokenizer, *_http_processes(config, addresses), resources.pop_all())


def _find_model(config: ServeConfig, has_weights: bool) -> tuple[Path, CheckpointInfo]:
    """Returns the model's directory or file, once it is checked. Raises ModelError."""
    path = resolve_model(config.model, has_weights, config.revision, config.gguf_file)
    checkpoint = check_checkpoint(path, has_weights)
    checkpoint.choose_quantization(config.quantization)
    checkpoint.spec.divided(config.tensor_parallel_size)
    return path, checkpoint


def _http_processes(config: ServeConfig, addresses: "_Addresses") -> tuple[HttpProcess | None, HttpProcess | None]:
    """Returns the gateway and the status page; None: not served."""
    http = status_page = None
    if addresses.http is not None:
        http = HttpProcess(addresses.http, http_options(config))
    if addresses.status_page is not None:
        status_page = HttpProcess(addresses.status_page, status_page_options(config), serves=STATUS_PAGE)
    return http, status_page


def _sampling_defaults(path: Path, config: ServeConfig) -> SamplingDefaults:
    defaults = read_sampling_defaults(path, config.generation_config, config.override_generation_config)
    if str(defaults):
        _log.info(
            "sampling defaults for fields that a request omits (none with --generation-config none): %s", defaults
        )
    return defaults


class _Addresses(NamedTuple):
    """The addresses of the listeners besides that for gRPC calls; None: no such listener."""

    admin: Address | None
    metrics: Address | None
    http: Address | None
    status_page: Address | None


def _check_addresses(config: ServeConfig, machine: Machine) -> _Addresses:
    """Raises ListenError if an address is invalid or in use, and HttpFailed if packages for HTTP are not installed."""
    address = Address.parse(config.address, *config.address_flags)
    admin = admin_address(config.admin_listen, address, has_keys=config.has_credentials)
    metrics = metrics_address(config.metrics_listen, address)
    http = None if config.http_address is None else Address.parse(config.http_address, HTTP_FLAG, HTTP_HOST_FLAG)
    status_page = admin_http_address(config.admin_http_address, has_keys=config.has_credentials)
    listeners = [each for each in (address, http, status_page, admin, metrics) if each is not None]
    check_apart(listeners)
    for each in listeners:
        each.check_free()
    for listener, flag in ((http, HTTP_FLAG), (status_page, ADMIN_HTTP_FLAG)):
        if listener is not None:
            check_installed(machine, flag)
    is_mutual = config.tls_client_ca is not None
    warn_of_exposure(
        address,
        http,
        metrics,
        has_keys=config.has_credentials,
        is_mutual=is_mutual,
        reports_cache=any(CONTRACTS[name].reports_cache for name in read_contracts(config.contracts)),
    )
    return _Addresses(admin, metrics, http, status_page)


def _check_kv_events(config: KvEventsConfig | None) -> None:
    """Raises ListenError if an address is in use, or if the package for ZeroMQ is not installed."""
    if config is None:
        return
    if importlib.util.find_spec("zmq") is None:
        raise ListenError(f"--kv-events-config: not installed: pyzmq; {install_command(ZMQ_EXTRA)}, or omit the flag")
    from penstock.service.kv_publisher.sockets import check_endpoints

    check_endpoints(config)


def _scheduler_config(config: ServeConfig, tenants: TenantLimitsFile) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens or MAX_BATCHED_TOKENS,
        max_queued_requests=config.max_queued_requests,
        max_queued_tokens=config.max_queued_tokens,
        policy=config.policy,
        enable_prefix_caching=config.enable_prefix_caching,
        target_itl_s=config.target_itl / 1000 or None,
        default_tenant=tenants.default,
        tenants=tenants.named,
        explain_requests=config.explain_requests,
        drafts_on_repetition=config.speculation is not None and config.speculation.method is DraftMethod.AUTO,
    )


def _read_tokenizer(
    path: Path, config: ServeConfig, num_rows: int, resources: ExitStack
) -> tuple[Path, Callable[[], Tokenizer], TokenizerFacts]:
    """Returns where the model's tokenizer is, perhaps unpacked or converted, and what ``_find_tokenizer`` returns."""
    tokenizer, converted = place_tokenizer(path, resources)
    load_tokenizer, facts = _find_tokenizer(tokenizer, config, num_rows, converted)
    if converted is not None:
        tokenizer = converted.file.parent
    for warning in facts.warnings:
        _log.warning("%s", warning)
    return tokenizer, load_tokenizer, facts


def _find_tokenizer(
    path: Path, config: ServeConfig, num_rows: int, converted: ConvertedTokenizer | None
) -> tuple[Callable[[], Tokenizer], TokenizerFacts]:
    """Returns a function that reads the tokenizer, and the facts about it that the worker needs. Most tokenizers' facts
    are known before they are read. ``num_rows`` is the model's vocabulary size."""
    facts = predict_facts(path, num_rows, converted)

    def read() -> Tokenizer:
        tokenizer = Tokenizer(path, config.chat_template, num_rows, config.chat_template_timeout, converted)
        if not tokenizer.has_chat_template:
            _log.info("%s: has no chat template, so chats are refused: give one with --chat-template", path)
        return tokenizer

    if facts is None:
        tokenizer = read()
        return lambda: tokenizer, tokenizer.facts

    def load() -> Tokenizer:
        tokenizer = read()
        if tokenizer.facts != facts:  # the worker was given other facts
            file = path / TOKENIZER if converted is None else converted.origin
            raise TokenizerError(f"{file}: its tokens have other ids than the file specifies: {MAKE_TOKENIZER}")
        return tokenizer

    return load, facts


def http_options(config: ServeConfig) -> Sequence[str]:
    """Returns the flags of ``penstock gateway`` that follow from the service's flags."""
    return _flags(
        http_tls_cert=config.tls_cert,
        http_tls_key=config.tls_key,
        host=config.http_host,
        allowed_origins=config.allowed_origins,
        allowed_hosts=config.allowed_hosts,
        unknown_fields=config.unknown_fields,
        sse_keep_alive=config.sse_keep_alive,
        objectives=config.objectives,
        responses_file=config.responses_file,
        responses_ttl=config.responses_ttl,
        responses_mib=config.responses_mib,
        # The gateway's responses end with the service's requests; its own grace period must not end them earlier.
        shutdown_grace=math.ceil(config.shutdown_grace) + _HTTP_GRACE_S,
    )


def status_page_options(config: ServeConfig) -> Sequence[str]:
    """Returns the flags of ``penstock status-page`` that follow from the service's flags."""
    return _flags(
        http_tls_cert=config.tls_cert,
        http_tls_key=config.tls_key,
        host=config.admin_http_host,
        allowed_hosts=config.allowed_hosts,
    )


def _flags(**values: object) -> Sequence[str]:
    """Returns a flag for each value that is not None."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in values.items() if value is not None]


def _choose_device(config: ServeConfig, machine: Machine) -> str:
    """Returns the device of the ranks. Raises ModelError if this host has too few GPUs for them."""
    device = config.device
    if device == "auto":
        device = "cpu" if config.backend == "cpu" else machine.default_device()[0]
    if device == "cuda" and config.ranks_per_node > max(1, len(machine.gpus)):
        here = "" if config.nnodes == 1 else f", {config.ranks_per_node} of them on this host"
        raise ModelError(f"{config.rank_flags}: each rank needs a GPU{here}, and this machine has {len(machine.gpus)}")
    return device


def _worker_config(
    config: ServeConfig, path: Path, tokenizer: Path, facts: TokenizerFacts, machine: Machine
) -> WorkerConfig:
    device = _choose_device(config, machine)
    if config.threads is not None and config.threads > machine.topology.num_usable:
        _log.warning(
            "--threads %d: this process may use only %g cores, and threads that share a core wait for each other; "
            "use fewer threads, or omit the flag",
            config.threads,
            machine.topology.num_usable,
        )
    num_threads = config.threads or machine.topology.num_threads()
    try:
        placement = place_threads(machine.topology, num_threads, config.cpu_pinning)
    except CannotPin as error:
        raise ModelError(str(error)) from error
    share = config.gpu_memory_utilization
    if share is None:
        share = _CPU_SHARE if device == "cpu" else _GPU_SHARE
    return WorkerConfig(
        # A GGUF file keeps its name, which a link in the hub's cache leads away from.
        model=str(path.resolve() if path.is_dir() else path.absolute()),
        device=device,
        backend=config.backend,
        dtype=config.dtype,
        block_size=config.block_size,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        kv_cache_bytes=config.kv_cache_memory_bytes,
        memory_utilization=share,
        host_kv_cache_bytes=config.host_kv_cache_bytes,
        num_threads=num_threads,
        cpu_pinning=config.cpu_pinning,
        thread_cpus=placement.cpus,
        thread_nodes=placement.nodes,
        max_memory_bytes=machine.available_bytes,
        tokenizer_vocab_size=facts.vocab_size,
        tokenizer_num_ids=facts.num_ids,
        tokenizer=str(tokenizer.resolve()),
        special_tokens=facts.special_tokens,
        added_tokens=facts.added_tokens,
        eos_token_ids=facts.eos_token_ids,
        load_format=config.load_format,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        deterministic=config.deterministic,
        attention_backend=config.attention_backend,
        frees_windows=True,
        max_loras=config.num_adapter_slots,
        max_lora_rank=config.max_lora_rank,
        log_level=config.log_level,
        log_format=config.log_format,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        meeting=Meeting(interface=config.collective_interface or ""),
    )
