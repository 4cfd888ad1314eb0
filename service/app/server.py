"""Composes, starts and stops the service: an engine, a tokenizer, a gRPC server for callers and an admin listener.

The order of a shutdown: health reports not ready; new requests are refused; running requests get the grace period; the
rest end with a status on their streams; the listeners close; the worker stops. The HTTP gateway refuses new connections
before the service refuses requests, and its process ends before the listeners close.
"""

import asyncio
import importlib.metadata
import logging
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.clients.host.event_loop import MemoryWatch, calm_collector
from penstock.models.checkpoint.pooling_config import PoolingConfig
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import SpeculationConfig, WorkerFacts
from penstock.service.admin.listener import ADMIN_SERVICE, AdminListener
from penstock.service.admin.operations import AdminService
from penstock.service.app.gateway_process import HttpGateway
from penstock.service.auth.identity import AllowAll, Authenticator, IdentityInterceptor
from penstock.service.auth.reloaded_files import LOOK_INTERVAL_S, FileWatch, Watched, WatchedFiles
from penstock.service.auth.tenant_limits import TenantLimitsFile
from penstock.service.auth.tls import ServerTls
from penstock.service.config.addresses import ADMIN_FLAG, METRICS_FLAG, Address
from penstock.service.config.limits import MAX_CONNECTIONS, ModelLimits, Validator
from penstock.service.config.sampling_defaults import SamplingDefaults
from penstock.service.requests.contexts import ContextStore
from penstock.service.requests.embed import EmbedRequestBuilder
from penstock.service.requests.generate import RequestBuilder
from penstock.service.requests.grammar_check import GrammarChecks
from penstock.service.requests.lifecycle import RequestContext
from penstock.service.rpc.embedding import EmbeddingService
from penstock.service.rpc.generation import GenerationService
from penstock.service.rpc.health import Health
from penstock.service.rpc.interceptor import StatusInterceptor
from penstock.service.rpc.model import ModelService
from penstock.service.rpc.reflection import add_reflection
from penstock.service.rpc.tokenizer import TokenizerService
from penstock.service.streaming.outbox import HEARTBEAT_S
from penstock.service.telemetry.collector import MetricsReader
from penstock.service.telemetry.event_loop_lag import LoopLag
from penstock.service.telemetry.metrics import Metrics
from penstock.service.telemetry.metrics_outlets import MetricsOutlets
from penstock.service.telemetry.stats_log import INTERVAL_S, StatsLog
from penstock.service.telemetry.tracing import Exporter, Telemetry
from penstock.service.text.tokenizer import Tokenizer, TokenizerPool
from penstock.service.transport.call_limits import CallLimits
from penstock.service.transport.connections import max_connections
from penstock.service.transport.transport import bind, for_this_user_alone, new_server
from penstock.v1 import (
    embedding_pb2,
    embedding_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
)

_log = logging.getLogger(__name__)

HEAD_START_S = 0.01
"""The time for the worker to receive its configuration, before the tokenizer's library blocks the interpreter."""
FLUSH_S = 1.0
"""The time for clients to read final messages when the service shuts down."""
_STREAMS_BESIDES = 64
"""Streams on a connection besides those for requests: probes, multiplexed streams, tokenizing."""

SERVICES = tuple(
    file.DESCRIPTOR.services_by_name[name].full_name
    for file, name in (
        (embedding_pb2, "EmbeddingService"),
        (generation_pb2, "GenerationService"),
        (model_pb2, "ModelService"),
        (tokenizer_pb2, "TokenizerService"),
    )
)


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
    authenticator: Authenticator = field(default_factory=AllowAll)
    tls: ServerTls | None = None
    """Applies to ``listen``, and to ``admin_listen`` if other machines can reach it."""
    tenants: WatchedFiles[TenantLimitsFile] | None = None
    """The file with the tenants' limits; ``scheduler`` starts with the same limits."""
    watched: Sequence[Watched] = ()
    """All files that are reloaded when they change."""
    look_interval_s: float = LOOK_INTERVAL_S
    embedding: PoolingConfig = field(default_factory=PoolingConfig)
    sampling_defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    speculation: SpeculationConfig | None = None
    """How the worker drafts; None: no speculative decoding."""
    conversation_ttl_s: float = 600.0
    """The time for which an ended request can be continued, and the longest time for which its KV cache is retained."""
    conversation_tokens: int = 1_000_000
    """The maximum number of tokens in a tenant's stored contexts."""
    drain_delay_s: float = 0.0
    """The time after SIGTERM for which new requests are still accepted, with health at NOT_SERVING, until load
    balancers send them elsewhere."""
    grace_s: float = 30.0
    """The time for running requests to finish after the drain delay."""
    heartbeat_s: float = HEARTBEAT_S
    tokenizer_threads: int = 2
    closes_objects: bool = True
    """Whether objects have only the properties that their schema declares, unless it has a rule for others."""
    checks_grammars_soon: bool = False
    """Whether the process that checks grammars starts with the service, instead of with the first grammar."""
    stats_interval_s: float = INTERVAL_S
    """The interval between log lines with the engine's statistics."""


class Server:
    """One service: a listener for callers, one for operators, and optionally the HTTP gateway."""

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        load_tokenizer: Callable[[], Tokenizer],
        http: HttpGateway | None = None,
    ) -> None:
        """``load_tokenizer`` is called once, on another thread, while the engine starts. Raises ListenError for an
        invalid address. The server starts and stops the engine and ``http``."""
        self._config = config
        self._engine = engine
        self._load_tokenizer = load_tokenizer
        self._http = http
        self._address = Address.parse(config.listen)
        self._admin_address = None if config.admin_listen is None else Address.parse(config.admin_listen, ADMIN_FLAG)
        if self._admin_address is not None and isinstance(config.authenticator, AllowAll):
            assert self._admin_address.is_local, "anyone could administer the service"
        self._health = Health(SERVICES if self._admin_address is None else (*SERVICES, ADMIN_SERVICE))
        self._stats_log = StatsLog(engine.stats, config.stats_interval_s)
        self._loop_lag = LoopLag()
        self._file_watch = FileWatch(config.watched, config.look_interval_s)
        if config.tenants is not None:
            config.tenants.on_change(self._take_tenants)
        self._stop_requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._running: _Running | None = None
        self._stopped: asyncio.Task[None] | None = None
        self.tokenizer: Tokenizer
        """Set by ``start``."""
        self.admin_target: str | None = None
        """The admin listener's address, set by ``start``."""
        self.http_target: str | None = None
        """The HTTP gateway's address, set by ``start``."""
        self.metrics_target: str | None = None
        """The address of the metrics page, set by ``start``."""

    async def start(self) -> str:
        """Starts the engine, then listens; returns the address with the bound port.

        Raises ListenError (if possible before the engine starts), ExecutorError, and what ``load_tokenizer`` raises.
        """
        self._address.check_free()
        if self._admin_address is not None:
            self._admin_address.check_free()
        facts = await self._load()
        running = None
        try:
            running = _Running(self._config, self._engine, self.tokenizer, facts, self._health)
            if self._admin_address is not None:
                running.add_admin(self._admin_address, self._loop_lag, self._is_going_down)
            private = () if self._http is None else (self._http.open(),)
            bound, self.admin_target = await running.listen(self._address, private)
            self.metrics_target = running.open_metrics(self._loop_lag)
            if self._http is not None:
                metrics = None if self.metrics_target is None else Address.parse(self.metrics_target, METRICS_FLAG)
                self.http_target = str(await self._http.start(metrics))
        except BaseException:
            if self._http is not None:
                await self._http.stop()
            if running is not None:
                await running.stop_listening(0.0)
            await self._engine.stop()
            if running is not None:
                running.close()
            raise
        self._running = running
        self._engine.watch(self._on_state)
        self._on_state(self._engine.state)
        self._stats_log.start()
        self._file_watch.start()
        self._loop_lag.start(asyncio.get_running_loop())
        return bound

    async def _load(self) -> WorkerFacts:
        """Reads the tokenizer while the worker loads the model: both take seconds."""
        starting = asyncio.create_task(self._engine.start())
        try:
            await asyncio.sleep(HEAD_START_S)
            self.tokenizer = await asyncio.to_thread(self._load_tokenizer)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._engine.stop()
            raise
        return await starting

    async def serve_until_stopped(self) -> None:
        """Serves until SIGTERM, SIGINT or ``request_stop``, then stops with the configured drain delay and grace
        period; a second signal ends both. For a process that runs only the service."""
        calm_collector()
        loop, memory = asyncio.get_running_loop(), MemoryWatch()
        memory.start(loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop)
        try:
            await self._stop_requested.wait()
            if self._engine.state in (EngineState.SERVING, EngineState.RECOVERING):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), self._config.drain_delay_s)
            await self.stop(self._config.grace_s)
        finally:
            memory.stop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def request_stop(self) -> None:
        """Does what a signal does. Health reports not ready from now on."""
        self._health.set_ready(False)
        if self._stop_requested.is_set():
            self._hurry.set()
        self._stop_requested.set()

    def look_at_files(self) -> None:
        """Checks the operator's files for changes now. A change takes effect after the next check."""
        self._file_watch.look_now()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Gives running requests ``grace_s``, ends the rest with UNAVAILABLE, and stops everything. Safe to call
        twice."""
        if self._running is None:
            return
        if self._stopped is None:
            self._stopped = asyncio.create_task(self._stop(self._running, grace_s))
        await asyncio.shield(self._stopped)

    async def _stop(self, running: "_Running", grace_s: float) -> None:
        self._health.set_ready(False)
        if self._http is not None:
            self._http.drain()
        self._engine.drain()
        _log.info("stopping: requests that have %.0f s to finish: %d", grace_s, running.num_live)
        idle = asyncio.create_task(self._engine.wait_idle())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({idle, hurry}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        hurry.cancel()
        running.generation.shut_down()
        running.embedding.shut_down()
        if self._http is not None:
            await self._http.stop()
        self._health.close()
        self._stats_log.stop()
        self._file_watch.stop()
        self._loop_lag.stop()
        await running.stop_listening(FLUSH_S)
        await self._engine.stop()
        running.close()
        _log.info("stopped")

    def _take_tenants(self, tenants: TenantLimitsFile) -> None:
        config = replace(self._engine.config, default_tenant=tenants.default, tenants=tenants.named)
        self._engine.reconfigure(config)

    def _is_going_down(self) -> bool:
        return (
            self._stop_requested.is_set()
            or self._stopped is not None
            or self._engine.state in (EngineState.FAILED, EngineState.STOPPED)
        )

    def _on_state(self, state: EngineState) -> None:
        self._health.set_ready(state is EngineState.SERVING and not self._stop_requested.is_set())
        if self._running is not None:
            self._running.generation.tell_state()


class _Running:
    """The parts of the server that need the worker's facts."""

    def __init__(
        self, config: ServerConfig, engine: Engine, tokenizer: Tokenizer, facts: WorkerFacts, health: Health
    ) -> None:
        self.pool = TokenizerPool(
            tokenizer,
            block_size=facts.block_size,
            max_prompt_tokens=facts.max_model_len - 1,
            num_threads=config.tokenizer_threads,
        )
        self.grammars = GrammarChecks(tokenizer, config.closes_objects)
        if config.checks_grammars_soon:
            self.grammars.warm()
        self._config = config
        self._engine = engine
        self._facts = facts
        self._health = health
        self._tls = config.tls
        self._exporter = Exporter(os.environ)
        self._metrics = Metrics()
        self._outlets: MetricsOutlets | None = None
        self._bound: Address | None = None
        telemetry = Telemetry(config.model_name, self._metrics)
        self._validator = validator = Validator(ModelLimits(tokenizer.vocab_size, facts.max_model_len))
        max_sequence_tokens = min(facts.max_model_len, facts.num_blocks * facts.block_size)
        conversations = ContextStore(config.conversation_ttl_s, config.conversation_tokens)
        speculation, defaults = config.speculation, config.sampling_defaults
        request_builder = RequestBuilder(
            validator,
            self.pool,
            config.model_name,
            max_sequence_tokens,
            max_retain_s=conversations.ttl_s,
            max_drafts=0 if speculation is None else speculation.num_speculative_tokens,
            grammars=self.grammars,
            defaults=defaults,
        )
        request_context = RequestContext(engine, request_builder, telemetry, conversations)
        self.generation = GenerationService(request_context, validator, config.heartbeat_s)
        embed_builder = EmbedRequestBuilder(
            validator, self.pool, config.model_name, config.embedding, facts.hidden_size
        )
        self.embedding = EmbeddingService(engine, embed_builder, telemetry)
        self._limits = CallLimits()
        identity = IdentityInterceptor(config.authenticator)
        interceptors = [StatusInterceptor(telemetry, self._limits), identity]
        # Separate limits: operators get through even if callers have used up theirs.
        self._admin_interceptors = [StatusInterceptor(telemetry, CallLimits(self._limits.connections)), identity]
        max_streams = config.scheduler.max_num_seqs + config.scheduler.max_queued_requests + _STREAMS_BESIDES
        self._max_connections = max_connections(config.max_connections)
        self._server = new_server(interceptors, max_streams, self._max_connections, self._limits.connections.cut)
        self.admin: AdminListener | None = None
        version = importlib.metadata.version("penstock")
        embedding_pb2_grpc.add_EmbeddingServiceServicer_to_server(self.embedding, self._server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self.generation, self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(
            ModelService(
                config.model_name, version, facts, tokenizer, validator, lambda: engine.config, speculation, defaults
            ),
            self._server,
        )
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(
            TokenizerService(validator, self.pool, engine.charge), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(health, self._server)  # type: ignore[no-untyped-call]
        health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
        add_reflection((*SERVICES, health_name), self._server)

    @property
    def num_live(self) -> int:
        """The number of requests that have started and not ended."""
        return self.generation.num_live + self.embedding.num_live

    def add_admin(self, address: Address, loop_lag: LoopLag, is_going_down: Callable[[], bool]) -> None:
        """Adds the admin listener, which ``listen`` then opens too."""
        service = AdminService(self._engine, self._validator, loop_lag, is_going_down)
        self.admin = AdminListener(
            address, service, self._health, self._admin_interceptors, self._tls, self._limits.connections
        )

    def open_metrics(self, loop_lag: LoopLag) -> str | None:
        """Starts to serve or send metrics; returns the address of the page, if any. Raises ListenError."""
        config = self._config
        reader = MetricsReader(self._engine, self._facts, self._metrics, loop_lag, config.model_name)
        listen = None if config.metrics_listen is None else Address.parse(config.metrics_listen, METRICS_FLAG)
        self._outlets = MetricsOutlets(reader, listen, config.allowed_hosts, os.environ)
        return self._outlets.start()

    async def listen(self, address: Address, private: Sequence[Address] = ()) -> tuple[str, str | None]:
        """Opens both listeners; callers' also on ``private`` Unix sockets, which only this user can open. Returns the
        two addresses. Raises ListenError."""
        try:
            bound = bind(self._server, address, self._tls)
            self._bound = address
            self._limits.connections.add_listener(Address.parse(bound), self._max_connections)
            with for_this_user_alone():
                for socket in private:
                    bind(self._server, socket)
        finally:
            # After a failure too: gRPC frees only the ports of servers that were started.
            await self._server.start()
        admin = None
        if self.admin is not None:
            admin = self.admin.bind()
            await self.admin.start()
        self._limits.start()
        return bound, admin

    async def stop_listening(self, flush_s: float) -> None:
        """Closes both listeners. Clients have ``flush_s`` to read final messages."""
        self._limits.stop()
        await self._server.stop(flush_s)
        if self._bound is not None:
            self._bound.remove()
        if self.admin is not None:
            await self.admin.stop()

    def close(self) -> None:
        """Ends threads, and sends the last spans and metrics."""
        self.pool.close()
        self.grammars.close()
        if self._outlets is not None:
            self._outlets.stop()
        self._exporter.close()
