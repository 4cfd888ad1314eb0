"""``penstock serve``: checks what it was given, starts the worker, then the service; stops them on a signal.

Whatever is wrong with the model, the files, the port or the memory is one line and a status that is not 0.
"""

import asyncio
import contextlib
import ctypes
import gc
import importlib.metadata
import logging
import math
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

from msgspec.structs import replace

from penstock.clients.host.allowed_hosts import read_hosts
from penstock.clients.host.log_thread import LogThread
from penstock.clients.host.machine import Machine, inspect_machine
from penstock.clients.host.open_files import raise_open_files_limit
from penstock.models.checkpoint.checkpoint import check_checkpoint, resolve_model
from penstock.models.checkpoint.pooling_config import read_embedding
from penstock.models.errors import ModelError
from penstock.models.executor.child_process import offer_service_to_oom_killer
from penstock.models.executor.group import new_executor
from penstock.models.executor.log_format import JSON, log_uncaught, set_up_logging
from penstock.models.executor.spawn import Spawned
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.executor import ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import MAX_BATCHED_TOKENS, Pooling, SpeculationConfig, WorkerConfig, WorkerFacts
from penstock.service.app.gateway_process import GatewayFailed, HttpGateway, check_installed
from penstock.service.app.server import Server, ServerConfig
from penstock.service.app.usage_examples import Administration, HttpCalls, Transport, UsageExamples, metrics_call
from penstock.service.auth.identity import AllowAll
from penstock.service.auth.operator_files import OperatorFiles
from penstock.service.auth.reloaded_files import FileError
from penstock.service.auth.tenant_limits import TenantLimitsFile
from penstock.service.config.addresses import (
    ADMIN_FLAG,
    Address,
    ListenError,
    admin_address,
    http_address,
    metrics_address,
    warn_of_exposure,
)
from penstock.service.config.flags import ConfigError
from penstock.service.config.sampling_defaults import read_sampling_defaults
from penstock.service.config.serve_config import PROGRAM, ServeConfig, parse_config
from penstock.service.text.tokenizer import Tokenizer, TokenizerError
from penstock.service.text.tokenizer_files import TokenizerFacts, foresee_facts

USAGE_ERROR = 2
SWITCH_INTERVAL_S = 0.001
"""How long a thread that runs Python code can keep the event loop waiting; Python's default is 5 ms."""
_M_ARENA_MAX = -8
"""Of glibc's malloc.h."""
_GPU_SHARE, _CPU_SHARE = 0.9, 0.5
_MIB = 1 << 20
_HTTP_GRACE_S = 10
_MAX_LINE = 2000

_REFUSALS = (
    ExecutorError, FileError, GatewayFailed, ListenError, ModelError, TokenizerError
)  # fmt: skip
"""Why it cannot serve, in one line each."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """Everything that can be known before the worker starts."""

    server: ServerConfig
    worker: WorkerConfig
    load_tokenizer: Callable[[], Tokenizer]
    http: Address | None
    """Where the HTTP gateway listens; None is nowhere."""
    http_options: Sequence[str]
    """Its further flags."""


def serve(argv: list[str], lifeline: int | None = None, worker: Spawned | None = None) -> int:
    """Serves until it is told to stop, or, at once, until the descriptor ``lifeline`` reaches its end; returns the exit
    status. ``worker``: the process of one, if it was started already."""
    try:
        config = parse_config(argv)
    except ConfigError as error:
        _tell(str(error))
        return USAGE_ERROR
    raise_open_files_limit()
    set_up_logging(config.log_format, config.log_level, holds_texts=True, handler=LogThread())
    _keep_one_arena()
    offer_service_to_oom_killer()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Threads of the tokenizer's own would compete with the worker for the cores, and we have a pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        prepared = prepare(config)
        _say(config, logging.INFO, f"loading {config.model} ...")
        with _reserved(prepared.server), asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(_Life(prepared, worker).run(lifeline))
    except _REFUSALS as error:
        _say(config, logging.CRITICAL, str(error))
        return 1


@contextlib.contextmanager
def _reserved(config: ServerConfig) -> Iterator[None]:
    """Reserves the paths of the service's Unix sockets. Raises ListenError."""
    with contextlib.ExitStack() as reserved:
        reserved.enter_context(Address.parse(config.listen).reserved())
        if config.admin_listen is not None:
            reserved.enter_context(Address.parse(config.admin_listen, ADMIN_FLAG).reserved())
        yield


def _keep_one_arena() -> None:
    """Has glibc keep one heap for all threads. By default gRPC's threads have heaps of their own, and what lives in
    them scatters: memory creeps upwards for hours, though the same things are alive."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def end_process(status: int) -> NoReturn:
    """Ends this process now. Python would wait for the tokenizer's threads, which may be amid a text that nobody wants
    any more, and can't be told."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # nobody reads it
            stream.flush()
    os._exit(status)


def prepare(config: ServeConfig) -> Prepared:
    """Checks ports, model and files, the quick things first. Raises ListenError, GatewayFailed, FileError,
    ModelError and TokenizerError."""
    machine = inspect_machine()
    address = Address.parse(config.address, *config.address_flags)
    admin = admin_address(config.admin_listen, address, has_keys=config.has_credentials)
    metrics = metrics_address(config.metrics_listen, address)
    address.check_free()
    http = http_address(config.http_address)
    for other in filter(None, (admin, metrics, http)):
        other.check_free()
    if http is not None:
        check_installed(machine)
    warn_of_exposure(address, http, metrics, has_keys=config.has_credentials, is_mutual=config.needs_certificates)
    files = OperatorFiles.load(config)
    tenants = TenantLimitsFile() if files.tenants is None else files.tenants.value
    has_weights = config.load_format != "dummy"
    path = resolve_model(config.model, has_weights, config.revision)
    checkpoint = check_checkpoint(path, has_weights)
    checkpoint.choose_quantization(config.quantization)
    checkpoint.spec.divided(config.tensor_parallel_size)
    defaults = read_sampling_defaults(path, config.generation_config, config.override_generation_config)
    if str(defaults):
        _log.info("sampling defaults of requests that set no others (--generation-config none: none): %s", defaults)
    embedding = read_embedding(path, None if config.pooling is None else Pooling(config.pooling))
    speculation = config.speculation
    if speculation is not None and speculation.model is not None:
        speculation = replace(speculation, model=str(resolve_model(speculation.model).resolve()))
    load_tokenizer, facts = _find_tokenizer(path, config, checkpoint.spec.vocab_size)
    for warning in facts.warnings:
        _log.warning("%s", warning)
    scheduler = SchedulerConfig(
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
    )
    server = ServerConfig(
        model_name=config.model_name,
        listen=config.address,
        admin_listen=None if admin is None else str(admin),
        metrics_listen=None if metrics is None else str(metrics),
        allowed_hosts=read_hosts(config.allowed_hosts or ""),
        scheduler=scheduler,
        max_connections=config.max_connections,
        authenticator=files.authenticator,
        embedding=embedding,
        sampling_defaults=defaults,
        speculation=speculation,
        tls=files.tls,
        tenants=files.tenants,
        watched=files.watched,
        conversation_ttl_s=config.conversation_ttl,
        conversation_tokens=config.conversation_tokens,
        drain_delay_s=config.drain_delay,
        grace_s=config.shutdown_grace,
        closes_objects=not config.allow_additional_properties,
        checks_grammars_soon=True,
    )
    worker = replace(_worker_config(config, path, facts, machine), speculation=speculation)
    return Prepared(server, worker, load_tokenizer, http, http_options(config))


def _find_tokenizer(path: Path, config: ServeConfig, num_rows: int) -> tuple[Callable[[], Tokenizer], TokenizerFacts]:
    """What reads the tokenizer, and what the worker is told of it, which mostly can be known before. ``num_rows``: of
    the model."""
    facts = foresee_facts(path, num_rows)
    read = partial(Tokenizer.load, path, config.chat_template, num_rows, config.chat_template_timeout)
    if facts is None:
        tokenizer = read()
        return lambda: tokenizer, tokenizer.facts

    def load() -> Tokenizer:
        tokenizer = read()
        if tokenizer.facts != facts:  # the worker was told something else
            raise TokenizerError(
                f"{path / 'tokenizer.json'}: its tokens have other ids than it says: "
                "AutoTokenizer.from_pretrained(directory).save_pretrained(directory) of transformers writes it anew"
            )
        return tokenizer

    return load, facts


def http_options(config: ServeConfig) -> Sequence[str]:
    """The flags of ``penstock gateway`` that those of the service imply."""
    # Its answers end with the service's requests: a grace of its own must not end them before.
    grace_s = math.ceil(config.shutdown_grace) + _HTTP_GRACE_S
    tls = [] if config.tls_cert is None else [f"--http-tls-cert={config.tls_cert}", f"--http-tls-key={config.tls_key}"]
    return (
        *tls,
        *([] if config.http_host is None else [f"--host={config.http_host}"]),
        *([] if config.allowed_origins is None else [f"--allowed-origins={config.allowed_origins}"]),
        *([] if config.allowed_hosts is None else [f"--allowed-hosts={config.allowed_hosts}"]),
        f"--unknown-fields={config.unknown_fields}",
        f"--sse-keep-alive={config.sse_keep_alive}",
        f"--tool-call-parser={config.tool_call_parser}",
        f"--reasoning-parser={config.reasoning_parser}",
        f"--shutdown-grace={grace_s}",
    )


def _worker_config(config: ServeConfig, path: Path, tokenizer: TokenizerFacts, machine: Machine) -> WorkerConfig:
    device = config.device
    if device == "auto":
        device = "cpu" if config.backend == "cpu" else machine.default_device()[0]
    if device == "cuda" and config.tensor_parallel_size > max(1, len(machine.gpus)):
        raise ModelError(
            f"--tensor-parallel-size {config.tensor_parallel_size}: each rank takes a GPU, and this machine has "
            f"{len(machine.gpus)}: give at most that"
        )
    if config.threads is not None and config.threads > machine.num_usable_cores:
        _log.warning(
            "--threads %d: this process may use %g cores, and threads that share one wait for each other: "
            "give fewer, or leave the flag out",
            config.threads,
            machine.num_usable_cores,
        )
    share = config.gpu_memory_utilization
    if share is None:
        share = _CPU_SHARE if device == "cpu" else _GPU_SHARE
    return WorkerConfig(
        model=str(path.resolve()),
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
        num_threads=config.threads or machine.num_threads(),
        cpu_pinning=config.cpu_pinning,
        max_memory_bytes=machine.available_bytes,
        tokenizer_vocab_size=tokenizer.vocab_size,
        tokenizer_num_ids=tokenizer.num_ids,
        tokenizer=str(path.resolve()),
        special_tokens=tokenizer.special_tokens,
        added_tokens=tokenizer.added_tokens,
        eos_token_ids=tokenizer.eos_token_ids,
        load_format=config.load_format,
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
        deterministic=config.deterministic,
        log_level=config.log_level,
        log_format=config.log_format,
        tensor_parallel_size=config.tensor_parallel_size,
    )


class _Life:
    """The service from the start of its worker to its end."""

    def __init__(self, prepared: Prepared, worker: Spawned | None) -> None:
        self._prepared = prepared
        self._engine = Engine(new_executor(prepared.worker, worker), prepared.server.scheduler)
        self._http = None
        if prepared.http is not None:
            self._http = HttpGateway(prepared.http, prepared.http_options)
        self._server = Server(prepared.server, self._engine, prepared.load_tokenizer, self._http)
        self._start: asyncio.Task[str] | None = None
        self._signal = 0
        self._has_failed = False

    async def run(self, lifeline: int | None) -> int:
        """The exit status. Raises ExecutorError and ListenError."""
        # The server has the engine start its worker before it makes anything of gRPC's: a process that has gRPC's
        # threads is not to be forked.
        self._start = asyncio.create_task(self._server.start())
        loop = asyncio.get_running_loop()
        log_uncaught(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # A terminal that closes sends it too, and then nobody is left to end the service.
        if self._prepared.server.watched and not os.isatty(0):
            loop.add_signal_handler(signal.SIGHUP, self._server.look_at_files)
        if lifeline is not None:
            loop.add_reader(lifeline, self._on_lifeline, lifeline)
        try:
            bound = await self._start
        except asyncio.CancelledError:
            await self._engine.stop()
            return 128 + self._signal
        self._engine.watch(self._on_state)
        self._on_state(self._engine.state)
        gc.freeze()  # what is here now stays: the collector need not look at it again
        self._greet(bound)
        await self._server.serve_until_stopped()
        return int(self._has_failed)

    def _greet(self, bound: str) -> None:
        config, facts = self._prepared.server, self._engine.facts
        has_chat_template = self._server.tokenizer.has_chat_template
        wants_key = not isinstance(config.authenticator, AllowAll)
        transport = Transport.PLAIN
        if config.tls is not None:
            transport = Transport.MUTUAL_TLS if config.tls.is_mutual else Transport.TLS
        calls = str(UsageExamples(Address.parse(bound), has_chat_template, wants_key, transport))
        if self._server.http_target is not None:
            http = Address.parse(self._server.http_target)
            has_tls = transport is not Transport.PLAIN
            calls += f"\n\n{HttpCalls(http, config.model_name, has_chat_template, wants_key, has_tls)}"
        if self._server.admin_target is not None:
            admin = Address.parse(self._server.admin_target)
            admin_transport = Transport.PLAIN if admin.is_local else transport
            calls += f"\n\n{Administration(admin, wants_key, admin_transport)}"
        if self._server.metrics_target is not None:
            calls += f"\n\n{metrics_call(Address.parse(self._server.metrics_target))}"
        version = importlib.metadata.version("penstock")
        with contextlib.suppress(OSError):  # nobody reads it: no reason to end
            sys.stdout.write(
                f"penstock {version} serves {config.model_name} on {bound}\n"
                f"{describe(facts, config.scheduler, config.speculation)}\n\n"
                f"{calls}\n\nCtrl-C ends it.\n"
            )
            sys.stdout.flush()

    def _on_signal(self, number: int) -> None:
        self._signal = number
        assert self._start is not None
        if self._start.done():
            self._server.request_stop()
        elif not self._start.cancelling():  # once: a second one would interrupt the worker's end
            self._start.cancel()

    def _on_lifeline(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        self._on_signal(signal.SIGTERM)
        self._on_signal(signal.SIGTERM)  # the second one ends the grace

    def _on_state(self, state: EngineState) -> None:
        if state is EngineState.FAILED:
            self._has_failed = True
            _log.error("nothing can be computed any more; the service ends, so that its supervisor starts it again")
            self._server.request_stop()


def describe(facts: WorkerFacts, config: SchedulerConfig, speculation: SpeculationConfig | None = None) -> str:
    """What runs, with what, and within which limits, for the operator who finds it in the log."""
    weights = "" if facts.quantization == "none" else f" in {facts.quantization}"
    parts = [facts.instruction_set] if facts.instruction_set else []
    if facts.num_threads:
        parts.append(f"{facts.num_threads} thread{'' if facts.num_threads == 1 else 's'}")
    on, each = facts.device, ""
    if facts.tensor_parallel_size > 1:
        on, each = f"{facts.tensor_parallel_size} ranks of {on.partition(':')[0]}", " a rank"
    if parts:
        on = f"{on} ({', '.join(parts)}{each})"
    host_tokens = facts.num_host_blocks * facts.block_size
    evicted = f"; {host_tokens:,} tokens more in host memory" if host_tokens else ""
    drafts = ""
    if speculation is not None:
        drafts = f"\ndrafts of at most {speculation.num_speculative_tokens} tokens by {speculation.method.value}"
    return (
        f"{facts.architecture}, {facts.dtype}, weights{weights} of {facts.weight_bytes / _MIB:,.0f} MiB{each}, "
        f"context {facts.max_model_len:,}\n"
        f"backend {facts.backend} on {on}, steps of at most {config.max_rows(facts):,} sequences and "
        f"{config.token_budget(facts):,} tokens\n"
        f"KV cache of {facts.num_blocks * facts.block_size:,} tokens in {facts.kv_cache_dtype}, "
        f"{facts.kv_bytes / _MIB:,.0f} MiB{each}{evicted}{drafts}"
    )


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _say(config: ServeConfig, level: int, message: str) -> None:
    """To whoever started the command; where programs read the log, in the log."""
    if config.log_format == JSON:
        _log.log(level, "%s", _one_line(message))
    else:
        _tell(message)


def _tell(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe is no reason to end
        sys.stderr.write(f"{PROGRAM}: {_one_line(message)}\n")


def _one_line(message: str) -> str:
    """A message may quote a model's files: at any length, and with what would command a terminal."""
    line = " ".join(message.split())
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE * 3 // 4]} ... {line[-_MAX_LINE // 4 :]}"
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
