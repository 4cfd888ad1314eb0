"""``penstock serve``: checks its configuration, starts the worker and then the service, and stops both on a signal.

A problem with the model, the files, the port or the memory ends it with one line and a nonzero status.
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
"""The longest time for which another thread's Python code keeps the event loop waiting. Python's default is 5 ms."""
_M_ARENA_MAX = -8
"""The constant from glibc's malloc.h."""
_GPU_SHARE, _CPU_SHARE = 0.9, 0.5
_MIB = 1 << 20
_HTTP_GRACE_S = 10
_MAX_LINE = 2000

_REFUSALS = (
    ExecutorError, FileError, GatewayFailed, ListenError, ModelError, TokenizerError
)  # fmt: skip
"""Errors that prevent a start. The text of each is one line."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Prepared:
    """The checked configuration, complete before the worker starts."""

    server: ServerConfig
    worker: WorkerConfig
    load_tokenizer: Callable[[], Tokenizer]
    http: Address | None
    """The HTTP gateway's address; None: no gateway."""
    http_options: Sequence[str]
    """Further flags of the gateway."""


def serve(argv: list[str], lifeline: int | None = None, worker: Spawned | None = None) -> int:
    """Serves until it is stopped, or until the descriptor ``lifeline`` reaches its end, which stops it at once. Returns
    the exit status. ``worker`` is the worker's process, if it was started already."""
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
    # The tokenizer's own threads would compete with the worker for the cores, and the service has a thread pool.
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
    """Makes glibc use one heap for all threads. By default gRPC's threads have their own heaps, which fragment: memory
    grows slowly for hours although the live data does not."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def end_process(status: int) -> NoReturn:
    """Ends this process now. Python would wait for the tokenizer's threads, which may be encoding a text that is no
    longer needed and cannot be interrupted."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    os._exit(status)


def prepare(config: ServeConfig) -> Prepared:
    """Checks ports, model and files, the fastest checks first. Raises ListenError, GatewayFailed, FileError, ModelError
    and TokenizerError."""
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
        _log.info(
            "sampling defaults for fields that a request omits (none with --generation-config none): %s", defaults
        )
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
    """Returns a function that reads the tokenizer, and the facts about it that the worker needs. Most tokenizers' facts
    are known before they are read. ``num_rows`` is the model's vocabulary size."""
    facts = foresee_facts(path, num_rows)
    read = partial(Tokenizer.load, path, config.chat_template, num_rows, config.chat_template_timeout)
    if facts is None:
        tokenizer = read()
        return lambda: tokenizer, tokenizer.facts

    def load() -> Tokenizer:
        tokenizer = read()
        if tokenizer.facts != facts:  # the worker was given other facts
            raise TokenizerError(
                f"{path / 'tokenizer.json'}: its tokens have other ids than the file specifies; write it again with "
                "AutoTokenizer.from_pretrained(directory).save_pretrained(directory) of transformers"
            )
        return tokenizer

    return load, facts


def http_options(config: ServeConfig) -> Sequence[str]:
    """Returns the flags of ``penstock gateway`` that follow from the service's flags."""
    # The gateway's responses end with the service's requests; its own grace period must not end them earlier.
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
            f"--tensor-parallel-size {config.tensor_parallel_size}: each rank needs a GPU, and this machine has "
            f"{len(machine.gpus)}"
        )
    if config.threads is not None and config.threads > machine.num_usable_cores:
        _log.warning(
            "--threads %d: this process may use only %g cores, and threads that share a core wait for each other; "
            "use fewer threads, or omit the flag",
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
    """The service, from the start of its worker until it stops."""

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
        """Serves until it is stopped; returns the exit status. Raises ExecutorError and ListenError."""
        # The engine starts its worker before the server creates any gRPC object: a process with gRPC's threads must
        # not be forked.
        self._start = asyncio.create_task(self._server.start())
        loop = asyncio.get_running_loop()
        log_uncaught(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        # A terminal that closes sends SIGHUP too, and then the service must end.
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
        gc.freeze()  # the objects that exist now stay: the collector need not scan them again
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
        with contextlib.suppress(OSError):  # a closed stdout must not end the service
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
        elif not self._start.cancelling():  # only once: a second cancellation would interrupt the worker's end
            self._start.cancel()

    def _on_lifeline(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        self._on_signal(signal.SIGTERM)
        self._on_signal(signal.SIGTERM)  # the second one ends the grace period

    def _on_state(self, state: EngineState) -> None:
        if state is EngineState.FAILED:
            self._has_failed = True
            _log.error("the engine has failed; the service ends, so that its supervisor can restart it")
            self._server.request_stop()


def describe(facts: WorkerFacts, config: SchedulerConfig, speculation: SpeculationConfig | None = None) -> str:
    """Returns a description of the model, the backend and the limits, for the operator who reads the log."""
    weights = "" if facts.quantization == "none" else f" in {facts.quantization}"
    parts = [facts.instruction_set] if facts.instruction_set else []
    if facts.num_threads:
        parts.append(f"{facts.num_threads} thread{'' if facts.num_threads == 1 else 's'}")
    on, each = facts.device, ""
    if facts.tensor_parallel_size > 1:
        on, each = f"{facts.tensor_parallel_size} ranks of {on.partition(':')[0]}", " per rank"
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
    """Writes to stderr, or to the log if its format is for programs."""
    if config.log_format == JSON:
        _log.log(level, "%s", _one_line(message))
    else:
        _tell(message)


def _tell(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not end the service
        sys.stderr.write(f"{PROGRAM}: {_one_line(message)}\n")


def _one_line(message: str) -> str:
    """Returns ``message`` as one printable line of limited length. It may quote a model's files, which may contain long
    texts and a terminal's control characters."""
    line = " ".join(message.split())
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE * 3 // 4]} ... {line[-_MAX_LINE // 4 :]}"
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
