"""``penstock serve``: checks its configuration, starts the worker and then the service, and stops both on a signal.

A problem with the model, the files, the port or the memory ends it with one line and a nonzero status.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

from penstock.clients.host.distribution import installed_version
from penstock.clients.host.log_thread import LogThread
from penstock.clients.host.open_files import raise_open_files_limit
from penstock.clients.host.reloaded_files import FileError
from penstock.models.errors import ModelError
from penstock.models.executor.child_process import offer_service_to_oom_killer
from penstock.models.executor.group import new_executor
from penstock.models.executor.log_format import JSON, log_uncaught, set_up_logging
from penstock.models.executor.spawn import Spawned
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.executor import Executor, ExecutorError
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.simulation.logged_executor import LoggedExecutor, StepLogFile
from penstock.scheduler.worker_config import DraftMethod, SpeculationConfig, WorkerFacts
from penstock.service.app.http_process import HttpFailed
from penstock.service.app.prepare import Prepared, prepare
from penstock.service.app.server import Server
from penstock.service.app.server_config import ServerConfig
from penstock.service.app.usage_examples import Purpose, Transport, UsageExamples
from penstock.service.auth.identity import AllowAll
from penstock.service.config.addresses import ADMIN_FLAG, Address, ListenError
from penstock.service.config.command_line import PROGRAM, parse_config
from penstock.service.config.flags import ConfigError
from penstock.service.config.serve_config import ServeConfig
from penstock.service.hosts.command import follow
from penstock.service.hosts.leader import open_leader
from penstock.service.text.tokenizer_config import TokenizerError

USAGE_ERROR = 2
SWITCH_INTERVAL_S = 0.001
"""The longest time for which another thread's Python code keeps the event loop waiting. Python's default is 5 ms."""
_M_ARENA_MAX = -8
"""The constant from glibc's malloc.h."""
_MIB = 1 << 20
_MAX_LINE = 2000

_REFUSALS = (
    ExecutorError, FileError, HttpFailed, ListenError, ModelError, TokenizerError
)  # fmt: skip
"""Errors that prevent a start. The text of each is one line."""

_log = logging.getLogger(__name__)


def serve(argv: list[str], lifeline: int | None = None, worker: Spawned | None = None) -> int:
    """Serves until it is stopped, or until the descriptor ``lifeline`` reaches its end, which stops it at once. Returns
    the exit status. ``worker`` is the worker's process, if it was started already."""
    try:
        # A private service gets all of its flags from its parent.
        config = parse_config(argv, os.environ if lifeline is None else {})
    except ConfigError as error:
        _write(str(error))
        return USAGE_ERROR
    if not os.isatty(0):
        # A supervisor may send SIGHUP already while the model loads, and the files are read then anyway.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
    raise_open_files_limit()
    set_up_logging(config.log_format, config.log_level, holds_texts=True, handler=LogThread())
    _keep_one_arena()
    offer_service_to_oom_killer()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # The tokenizer's own threads would compete with the worker for the cores, and the service has a thread pool.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if config.node_rank > 0:
        if worker is not None:
            worker.drop()  # the leader decides when ranks start
        return follow(config)
    try:
        prepared = prepare(config)
        _report(config, logging.INFO, f"loading {config.model} ...")
        with (
            prepared.resources,
            _reserved(prepared.server),
            asyncio.Runner(loop_factory=_new_loop) as runner,
        ):
            return runner.run(_Life(config, prepared, worker).run(lifeline))
    except _REFUSALS as error:
        _report(config, logging.CRITICAL, str(error))
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


class _Life:
    """The service, from the start of its worker until it stops."""

    def __init__(self, config: ServeConfig, prepared: Prepared, worker: Spawned | None) -> None:
        self._config = config
        self._prepared = prepared
        executor = logged(new_executor(prepared.worker, worker, prepared.leader), prepared.server)
        self._engine = Engine(executor, prepared.server.scheduler)
        self._server = Server(
            prepared.server, self._engine, prepared.load_tokenizer, prepared.http, prepared.status_page
        )
        self._has_failed = False

    async def run(self, lifeline: int | None) -> int:
        """Serves until it is stopped; returns the exit status. Raises ExecutorError and ListenError."""
        loop = asyncio.get_running_loop()
        log_uncaught(loop)
        # A terminal that closes sends SIGHUP too, and then the service must end.
        if not os.isatty(0):
            loop.add_signal_handler(signal.SIGHUP, self._server.file_watch.check_now)
        if lifeline is not None:
            loop.add_reader(lifeline, self._on_lifeline, lifeline)
        leader, agents = self._prepared.leader, self._prepared.ray_agents
        try:
            if leader is not None:
                _report(self._config, logging.INFO, await open_leader(leader, self._config))
                if agents is not None:
                    agents.start(leader.port, self._on_agents_end)
            has_served = await self._server.run(self._on_start)
        finally:
            if agents is not None:
                await agents.stop()
            if leader is not None:
                await leader.close()
        return int(self._has_failed) if has_served or self._has_failed else 128 + self._server.stop_signal

    def _on_start(self, bound: str) -> None:
        self._engine.watch(self._on_state)
        self._on_state(self._engine.state)
        gc.freeze()  # the objects that exist now stay: the collector need not scan them again
        self._print_greeting(bound)

    def _print_greeting(self, bound: str) -> None:
        config, server = self._prepared.server, self._server
        transport = Transport.PLAIN
        if config.tls is not None:
            transport = Transport.MUTUAL_TLS if config.tls.is_mutual else Transport.TLS
        wants_key = not isinstance(config.authenticator, AllowAll)
        purpose = Purpose.GENERATION
        if config.head is not None and not config.generates:
            purpose = Purpose.SCORING if len(config.head.labels) == 1 else Purpose.CLASSIFICATION
        examples = UsageExamples(config.model_name, server.tokenizer.has_chat_template, wants_key, transport, purpose)
        listeners = (
            (bound, examples.grpc),
            (server.http_target, examples.http),
            (server.admin_target, examples.admin),
            (server.status_page_target, examples.status_page),
            (server.metrics_target, examples.metrics),
        )
        calls = "\n\n".join(show(Address.parse(target)) for target, show in listeners if target is not None)
        with contextlib.suppress(OSError):  # a closed stdout must not end the service
            sys.stdout.write(
                f"penstock {installed_version()} serves {config.model_name} on {bound}\n"
                f"{describe(self._engine.facts, config.scheduler, config.speculation)}\n\n"
                f"{calls}\n\nCtrl-C stops it.\n"
            )
            sys.stdout.flush()

    def _on_lifeline(self, lifeline: int) -> None:
        asyncio.get_running_loop().remove_reader(lifeline)
        self._server.request_stop(signal.SIGTERM)
        self._server.request_stop(signal.SIGTERM)  # the second one ends the grace period

    def _on_agents_end(self, why: str) -> None:
        self._has_failed = True
        _log.error("%s; the service ends", why)
        self._server.request_stop()

    def _on_state(self, state: EngineState) -> None:
        if state is EngineState.FAILED:
            self._has_failed = True
            _log.error("the engine has failed; the service ends, so that its supervisor can restart it")
            self._server.request_stop()


def logged(executor: Executor, config: ServerConfig) -> Executor:
    """Returns an executor that also logs its steps, if that is configured. Raises FileError."""
    if config.step_log is None:
        return executor
    try:
        file = StepLogFile(config.step_log)
    except OSError as error:
        reason = f"cannot be written ({error.strerror})"
        raise FileError(f"--step-log {config.step_log}: {reason}; give a file in a directory that exists") from error
    return LoggedExecutor(executor, file, config.scheduler, installed_version(), config.max_drafts)


def describe(facts: WorkerFacts, config: SchedulerConfig, speculation: SpeculationConfig | None = None) -> str:
    """Returns a description of the model, the backend and the limits, for the operator who reads the log."""
    weights = "" if facts.quantization == "none" else f" in {facts.quantization}"
    parts = [facts.instruction_set] if facts.instruction_set else []
    if facts.num_threads:
        parts.append(f"{facts.num_threads} thread{'' if facts.num_threads == 1 else 's'}")
    on, each = facts.device, ""
    if facts.tensor_parallel_size > 1:
        on, each = f"{facts.tensor_parallel_size} ranks of {on.partition(':')[0]}", " per rank"
    if facts.stage_layers:
        layers = ", ".join(map(str, facts.stage_layers))
        place = f", each on {on}" if facts.tensor_parallel_size > 1 else f" on {on}"
        on, each = f"{len(facts.stage_layers)} stages of {layers} layers{place}", " on the first rank"
    if parts:
        on = f"{on} ({', '.join(parts)}{each})"
    longest = ""
    if facts.num_window_groups:
        in_longest = facts.num_blocks * facts.max_model_len // facts.groups.num_blocks_for(facts.max_model_len)
        longest = f", or {in_longest:,} in sequences of {facts.max_model_len:,},"
    host_tokens = facts.num_host_blocks // facts.groups.num_groups * facts.block_size
    evicted = f"; {host_tokens:,} tokens more in host memory" if host_tokens else ""
    drafts = ""
    if speculation is not None:
        is_auto = speculation.method is DraftMethod.AUTO
        source = "where text repeats itself" if is_auto else f"by {speculation.method.value}"
        drafts = f"\ndrafts of at most {speculation.num_speculative_tokens} tokens {source}"
    return (
        f"{facts.architecture}, {facts.dtype}, weights{weights} of {facts.weight_bytes / _MIB:,.0f} MiB{each}, "
        f"context {facts.max_model_len:,}\n"
        f"backend {facts.backend} on {on}, steps of at most {config.max_rows(facts):,} sequences and "
        f"{config.token_budget(facts):,} tokens\n"
        f"KV cache of {facts.num_kv_tokens:,} tokens{longest} in {facts.kv_cache_dtype}, "
        f"{facts.kv_bytes / _MIB:,.0f} MiB{each}{evicted}{drafts}"
    )


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _report(config: ServeConfig, level: int, message: str) -> None:
    """Writes to stderr, or to the log if its format is for programs."""
    if config.log_format == JSON:
        _log.log(level, "%s", _one_line(message))
    else:
        _write(message)


def _write(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk or a closed pipe must not end the service
        sys.stderr.write(f"{PROGRAM}: {_one_line(message)}\n")


def _one_line(message: str) -> str:
    """Returns ``message`` as one printable line of limited length. It may quote a model's files, which may contain long
    texts and a terminal's control characters."""
    line = " ".join(message.split())
    if len(line) > _MAX_LINE:
        line = f"{line[: _MAX_LINE * 3 // 4]} ... {line[-_MAX_LINE // 4 :]}"
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
