"""Starts and stops the service: an engine, a tokenizer, a gRPC server for callers and an admin listener.

The order of a shutdown: health reports not ready; new requests are refused; running requests get the grace period; the
rest end with a status on their streams; the listeners close; the worker stops. The HTTP gateway refuses new connections
before the service refuses requests, and its process ends before the listeners close. So does the status page, which
serves until then.
"""

import asyncio
import logging
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from penstock.clients.host.event_loop import MemoryWatch, calm_collector
from penstock.clients.host.reloaded_files import FileWatch
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.worker_config import WorkerFacts
from penstock.service.admin.listener import ADMIN_SERVICE
from penstock.service.app.http_process import HttpProcess
from penstock.service.app.running_service import SERVICES, RunningService
from penstock.service.app.server_config import ServerConfig
from penstock.service.auth.identity import AllowAll
from penstock.service.auth.tenant_limits import TenantLimitsFile
from penstock.service.config.addresses import ADMIN_FLAG, METRICS_FLAG, Address
from penstock.service.config.contracts import CONTRACTS
from penstock.service.requests.answer_formats import AnswerFormats, find_formats
from penstock.service.rpc.health import Health
from penstock.service.telemetry.event_loop_lag import LoopLag
from penstock.service.telemetry.metrics_outlets import MetricsOutlets
from penstock.service.telemetry.prometheus import Readiness
from penstock.service.telemetry.stats_log import log_stats
from penstock.service.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # its library is an extra
    from penstock.service.kv_publisher.publisher import KvEventPublisher

_log = logging.getLogger(__name__)

HEAD_START_S = 0.01
"""The time for the worker to receive its configuration, before the tokenizer's library blocks the interpreter."""
FLUSH_S = 1.0
"""The time for clients to read final messages when the service shuts down."""


class Server:
    """One service: a listener for callers, one for operators, and optionally the HTTP gateway and the status page."""

    def __init__(
        self,
        config: ServerConfig,
        engine: Engine,
        load_tokenizer: Callable[[], Tokenizer],
        http: HttpProcess | None = None,
        status_page: HttpProcess | None = None,
    ) -> None:
        """``load_tokenizer`` is called once, on another thread, while the engine starts. Raises ListenError for an
        invalid address. The server starts and stops the engine, ``http`` and ``status_page``."""
        self._config = config
        self._engine = engine
        self._load_tokenizer = load_tokenizer
        self._http = http
        self._status_page = status_page
        self._address = Address.parse(config.listen)
        self._admin_address = None if config.admin_listen is None else Address.parse(config.admin_listen, ADMIN_FLAG)
        if self._admin_address is not None and isinstance(config.authenticator, AllowAll):
            assert self._admin_address.is_local, "anyone could administer the service"
        admin = () if self._admin_address is None else (ADMIN_SERVICE,)
        added = (service for name in config.contracts for service in CONTRACTS[name].services)
        self._health = Health((*SERVICES, *added, *admin))
        self._loop_lag = LoopLag()
        self.file_watch = FileWatch(config.watched, config.check_interval_s)
        if config.tenants is not None:
            config.tenants.on_change = self._take_tenants
        self._resources = AsyncExitStack()
        """What ``stop`` ends, and a start that fails, in the reverse order of their start."""
        self._stop_requested = asyncio.Event()
        self._hurry = asyncio.Event()
        self._running: RunningService | None = None
        self._starting: asyncio.Task[str] | None = None
        self._stopped: asyncio.Task[None] | None = None
        self.stop_signal = 0
        """The first signal that ended ``run``; 0 if none did."""
        # ``start`` sets these; the targets are the addresses of the other listeners, with the bound ports.
        self.tokenizer: Tokenizer
        self._formats: AnswerFormats
        self.admin_target: str | None = None
        self.http_target: str | None = None
        self.status_page_target: str | None = None
        self.metrics_target: str | None = None
        self.kv_events: KvEventPublisher | None = None

    async def run(self, on_start: Callable[[str], None] = lambda address: None) -> bool:
        """Starts, serves until SIGTERM, SIGINT or ``request_stop``, and stops. ``on_start`` is called with the address
        once the service listens. Returns False if it was stopped before that. Raises what ``start`` raises."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.request_stop, number)
        self._starting = asyncio.create_task(self.start())
        try:
            address = await self._starting
        except asyncio.CancelledError:
            await self._engine.stop()
            return False
        on_start(address)
        await self.main_loop()
        await self.stop(self._config.grace_s)
        return True

    async def start(self) -> str:
        """Starts the engine, then listens; returns the address with the bound port.

        Raises ListenError (if possible before the engine starts), ExecutorError, and what ``load_tokenizer`` raises.
        """
        try:
            return await self._start()
        except BaseException:
            await self._resources.aclose()
            raise

    async def _start(self) -> str:
        self._address.check_free()
        if self._admin_address is not None:
            self._admin_address.check_free()
        metrics = None
        if self._config.metrics_listen is not None:
            metrics = Address.parse(self._config.metrics_listen, METRICS_FLAG)
        outlets = MetricsOutlets(self._readiness, metrics, self._config.allowed_hosts)
        self._resources.callback(outlets.stop)
        self.metrics_target = outlets.page_target
        # The engine starts its worker before any gRPC object exists: a process with gRPC's threads must not be forked.
        facts = await self._load()
        self._resources.push_async_callback(self._engine.stop)
        running = RunningService(self._config, self._engine, self.tokenizer, self._formats, facts, self._health)
        self._resources.callback(running.close)
        await running.adapters.load_all(self._config.lora_modules)
        self._resources.push_async_callback(running.stop_listening, FLUSH_S)
        if self._config.kv_events is not None:
            self.kv_events = running.publish_kv_events(self._config.kv_events)
            self._resources.push_async_callback(self.kv_events.close)
        self._start_watches()
        private: list[Address] = []
        admin = [] if self._admin_address is None else [self._admin_address]
        if self._status_page is not None:
            self._resources.push_async_callback(self._status_page.stop)
            admin.append(self._status_page.open())
        if self._http is not None:
            self._resources.push_async_callback(self._http.stop)
            private.append(self._http.open())
            if self._config.http_loads_adapters:
                admin.append(self._http.open_admin())
        if admin:
            running.add_admin(admin, self._loop_lag, self._is_going_down)
        bound, bound_admin = await running.listen(self._address, private)
        if self._admin_address is not None:
            self.admin_target = bound_admin[0]
        if self._http is not None:
            page = None if self.metrics_target is None else Address.parse(self.metrics_target, METRICS_FLAG)
            self.http_target = str(await self._http.start(page))
        if self._status_page is not None:
            self.status_page_target = str(await self._status_page.start())
        self._running = running
        outlets.publish(running.metrics_reader(self._loop_lag).read)
        self._engine.watch(self._on_state)
        self._on_state(self._engine.state)
        return bound

    def _start_watches(self) -> None:
        stats = log_stats(self._engine.stats, self._config.stats_interval_s)
        stats_log = asyncio.create_task(stats, name="penstock stats")
        self.file_watch.start()
        self._loop_lag.start(asyncio.get_running_loop())
        self._resources.callback(self._loop_lag.stop)
        self._resources.callback(self.file_watch.stop)
        self._resources.callback(stats_log.cancel)
        self._resources.callback(self._health.close)

    async def _load(self) -> WorkerFacts:
        """Reads the tokenizer while the worker loads the model: both take seconds."""
        starting = asyncio.create_task(self._engine.start())
        try:
            await asyncio.sleep(HEAD_START_S)
            self.tokenizer = await asyncio.to_thread(self._load_tokenizer)
            parsers = self._config.tool_call_parser, self._config.reasoning_parser
            self._formats = await asyncio.to_thread(find_formats, self.tokenizer, *parsers)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._engine.stop()
            raise
        return await starting

    async def main_loop(self) -> None:
        """Serves until ``request_stop``, and then for the drain delay, which a second ``request_stop`` ends. For a
        process that runs only the service."""
        calm_collector()
        memory = MemoryWatch()
        memory.start(asyncio.get_running_loop())
        try:
            await self._stop_requested.wait()
            if self._engine.state in (EngineState.SERVING, EngineState.RECOVERING):
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._hurry.wait(), self._config.drain_delay_s)
        finally:
            memory.stop()

    def request_stop(self, number: int = 0) -> None:
        """Ends the start, or ends ``main_loop``: health reports not ready from now on. A second call ends the drain
        delay and the grace period. ``number`` is the signal that was received; 0 if none was."""
        self.stop_signal = self.stop_signal or number
        if self._starting is not None and not self._starting.done():
            if not self._starting.cancelling():  # only once: a second cancellation would interrupt the worker's end
                self._starting.cancel()
            return
        self._health.set_ready(False)
        if self._stop_requested.is_set():
            self._hurry.set()
        self._stop_requested.set()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Gives running requests ``grace_s``, ends the rest with UNAVAILABLE, and stops everything. Safe to call
        twice."""
        if self._running is None:
            return
        if self._stopped is None:
            self._stopped = asyncio.create_task(self._stop(self._running, grace_s))
        await asyncio.shield(self._stopped)

    async def _stop(self, running: RunningService, grace_s: float) -> None:
        self._health.set_ready(False)
        if self._http is not None:
            self._http.drain()
        self._engine.drain()
        running.generation.drain()
        num_live = running.generation.num_live + running.pooled_calls.num_live
        _log.info("stopping: requests that have %.0f s to finish: %d", grace_s, num_live)
        idle = asyncio.create_task(self._engine.wait_idle())
        hurry = asyncio.create_task(self._hurry.wait())
        await asyncio.wait({idle, hurry}, timeout=grace_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        hurry.cancel()
        running.generation.shut_down()
        running.pooled_calls.shut_down()
        await self._resources.aclose()  # the status page shows until here what the service waits for
        _log.info("stopped")

    def _take_tenants(self, tenants: TenantLimitsFile) -> None:
        config = replace(self._engine.config, default_tenant=tenants.default, tenants=tenants.named)
        self._engine.reconfigure(config)

    def _readiness(self) -> Readiness:
        state = self._engine.state.name.lower()
        if self._running is None:
            state = "starting"
        elif self._stop_requested.is_set():
            state = "stopping"
        return Readiness(self._health.is_ready, state)

    def _is_going_down(self) -> bool:
        return (
            self._stop_requested.is_set()
            or self._stopped is not None
            or self._engine.state in (EngineState.FAILED, EngineState.STOPPED)
        )

    def _on_state(self, state: EngineState) -> None:
        self._health.set_ready(state is EngineState.SERVING and not self._stop_requested.is_set())
        if self._running is not None:
            self._running.generation.send_state()
            if state is EngineState.DRAINING:
                self._running.generation.drain()
