"""The step loop: submits plans, applies results in order, replaces a failed worker, and ends requests. The only
asynchronous part of the scheduler.

It does not depend on gRPC or processes. All of it runs on one event loop, without locks: ``submit`` and ``abort``
change the scheduler at once, and schedule planning for the next iteration of the loop, so that requests that arrive
together are planned together.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict

from penstock.kv.events import KvEventLog
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import Counters, EngineLoad, EngineState, EngineStats
from penstock.scheduler.executor import Executor, ExecutorError
from penstock.scheduler.loop.adapter_loader import AdapterLoader
from penstock.scheduler.loop.live_requests import LiveRequestFilter, LiveRequestScan
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.loop.stats import with_current_values
from penstock.scheduler.planning.rate_limit import Rated
from penstock.scheduler.planning.tenants import TenantUse
from penstock.scheduler.recovery.restarts import FIRST_DELAY_S
from penstock.scheduler.recovery.supervisor import WorkerSupervisor
from penstock.scheduler.recovery.watchdog import StepWatchdog
from penstock.scheduler.request import Change, EngineFinishReason, RefusalKind, Refused, Request
from penstock.scheduler.timeline import Timeline
from penstock.scheduler.worker_config import WorkerFacts

logger = logging.getLogger(__name__)

STEP_LIMIT_S = 30.0
"""The maximum time of a step, unless ten times its predicted time is longer."""
TIMER_S = 0.001
"""The resolution of the loop's timers, which count whole milliseconds. A shorter timer would fire at once, and would be
set again and again."""


class Engine:
    """Serves requests with one executor."""

    def __init__(
        self,
        executor: Executor,
        config: SchedulerConfig | None = None,
        *,
        step_limit_s: float = STEP_LIMIT_S,
        restart_delay_s: float = FIRST_DELAY_S,
    ) -> None:
        self.state = EngineState.STARTING
        self.config = config or SchedulerConfig()
        self._executor = executor
        self._facts: WorkerFacts | None = None
        self._scheduler: Scheduler | None = None
        self._adapters: AdapterLoader | None = None
        self._callbacks: list[Callable[[EngineState], None]] = []
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._pump_is_due = False
        self._pump_timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None
        self._num_finished = 0
        self._num_refused = 0
        self.is_draining = False
        """Whether new requests are refused, even if the worker is being replaced."""
        self._supervisor = WorkerSupervisor(executor, restart_delay_s)
        self._watchdog = StepWatchdog(step_limit_s, self._predicted_step_s, self._on_step_expired)

    @property
    def facts(self) -> WorkerFacts:
        """The worker's facts; not available before ``start``."""
        assert self._facts is not None, "the engine has not started"
        return self._facts

    @property
    def adapters(self) -> AdapterLoader:
        """Loads LoRA adapters; not available before ``start``."""
        assert self._adapters is not None, "the engine has not started"
        return self._adapters

    def watch(self, callback: Callable[[EngineState], None]) -> None:
        """Calls ``callback`` at every change of ``state``, synchronously."""
        self._callbacks.append(callback)

    async def start(self) -> WorkerFacts:
        """Starts the executor, then serves. Raises ExecutorError."""
        assert self._scheduler is None, "an engine starts once"
        try:
            self._facts = await self._supervisor.start()
        except Exception:
            self._set_state(EngineState.FAILED)
            raise
        self._scheduler = Scheduler(self._facts, self.config, on_finished=self._on_finished)
        self._adapters = AdapterLoader(self._executor, self._scheduler, self.abort, self._pump_soon)
        self._task = asyncio.create_task(self._run(), name="penstock engine")
        self._watchdog.start()
        self._set_ready()
        return self._facts

    def submit(self, request: Request) -> None:
        """Adds a request; its sink has ``Accepted`` when this returns. Raises Refused."""
        if self.state is not EngineState.SERVING or self._scheduler is None:
            self._num_refused += not request.is_warm_up
            raise self._refusal()
        # Before the request is added, because its sink may end it at once.
        self._idle.clear()
        if request.deadline is not None:
            self._set_deadline(request.request_id, request.deadline)
        try:
            self._scheduler.add_request(request)
        except BaseException:
            self._forget(request.request_id)
            is_added = request.request_id in self._scheduler.requests  # in part: another request's end failed
            with self._failing_on_error() if is_added else nullcontext():
                raise
        self._pump_soon()

    def charge(self, tenant: str, kind: Rated) -> None:
        """Counts a request or call against its tenant's rate. Raises Refused if that is used up."""
        if self._scheduler is not None:
            self._scheduler.charge(tenant, kind)

    def abort(self, request_id: str, reason: EngineFinishReason, message: str = "") -> bool:
        """Ends a request early; its sink has ``Finished`` when this returns. False if it is not alive."""
        if self._scheduler is None:
            return False
        with self._failing_on_error():
            if not self._scheduler.abort(request_id, reason, message):
                return False
        self._pump_soon()  # other requests may be waiting for its blocks
        return True

    def update(self, request_id: str, change: Change) -> bool:
        """Changes a live request from the next plan on; returns False if it is not alive. Raises Refused."""
        if self._scheduler is None:
            return False
        with self._failing_on_error():
            if not self._scheduler.update_request(request_id, change):
                return False
        if change.deadline is not None and request_id in self._scheduler.requests:
            self._set_deadline(request_id, change.deadline)
        self._pump_soon()
        return True

    def inject(self, request_id: str, token_ids: Sequence[int]) -> bool:
        """Puts tokens into the history of a live request, after its tokens in flight; its sink then gets
        ``TokensInjected``. Returns False if it is not alive. Raises Refused, without changing anything."""
        if self._scheduler is None:
            return False
        with self._failing_on_error():
            if not self._scheduler.inject(request_id, token_ids):
                return False
        self._pump_soon()
        return True

    def hold(self, request_id: str, held: bool) -> None:
        """Holds a request back while its output is not read, or releases it. While it is held, it is in no plan, and
        loses its blocks before any other request."""
        if self._scheduler is not None:
            with self._failing_on_error():
                self._scheduler.hold(request_id, held)
            self._pump_soon()

    def _refusal(self) -> Refused:
        if self.is_draining or self.state is EngineState.STOPPED:
            return Refused(RefusalKind.DRAINING, "the service is shutting down")
        retry_ms = self._supervisor.retry_ms if self.state is EngineState.RECOVERING else None
        return Refused(RefusalKind.WORKER_DOWN, "the worker is not running", retry_ms)

    def reconfigure(self, config: SchedulerConfig) -> None:
        """Applies ``config`` from the next plan on, without losing a request. Raises ValueError."""
        if self._scheduler is not None:
            self._scheduler.reconfigure(config)
        self.config = config
        self._pump_soon()

    def flush_cache(self) -> int:
        """Drops every cached block that is not held; returns their number."""
        return 0 if self._scheduler is None else self._scheduler.kv.flush()

    def release(self, block_hashes: Sequence[bytes], tenant: str) -> None:
        """Gives up the KV that is retained under these hashes for contexts of a tenant. Running requests keep theirs,
        and KV that was computed ahead stays."""
        if self._scheduler is not None:
            self._scheduler.release(block_hashes, tenant)

    def explain(self, request_id: str) -> Timeline | None:
        return None if self._scheduler is None else self._scheduler.explain(request_id)

    def scan(self, wanted: LiveRequestFilter, after: int = -1) -> LiveRequestScan:
        """Returns a scan of the live requests that match and arrived after number ``after``; not available before
        ``start``."""
        assert self._scheduler is not None, "the engine has not started"
        return self._scheduler.scan(wanted, after)

    @property
    def kv_events(self) -> KvEventLog:
        """The log of the prefix cache's content and changes; not available before ``start``."""
        assert self._scheduler is not None, "the engine has not started"
        return self._scheduler.kv.events

    def busiest_tenants(self, limit: int) -> list[TenantUse]:
        return [] if self._scheduler is None else self._scheduler.tenants.busiest(limit)

    def busy_tenants(self) -> Iterator[TenantUse]:
        return iter(()) if self._scheduler is None else iter(self._scheduler.tenants)

    def _set_deadline(self, request_id: str, deadline: float) -> None:
        """Starts the request's timer, in place of an earlier one."""
        self._drop_deadline(request_id)
        # Both clocks are CLOCK_MONOTONIC, but a loop may round its own.
        delay = max(0.0, deadline - time.monotonic())
        self._deadlines[request_id] = asyncio.get_running_loop().call_later(delay, self._on_deadline, request_id)

    def _drop_deadline(self, request_id: str) -> None:
        timer = self._deadlines.pop(request_id, None)
        if timer is not None:
            timer.cancel()

    def _on_deadline(self, request_id: str) -> None:
        self.abort(request_id, EngineFinishReason.DEADLINE, "the request's deadline passed")

    def _on_finished(self, request: Request) -> None:
        self._num_finished += not request.is_warm_up
        self._forget(request.request_id)

    def _forget(self, request_id: str) -> None:
        self._drop_deadline(request_id)
        if self._scheduler is not None and not self._scheduler.requests:
            self._idle.set()

    def _pump_soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            asyncio.get_running_loop().call_soon(self._pump_due)

    def _pump_due(self) -> None:
        self._pump_is_due = False
        if self._task is None or self._task.done():
            return
        with suppress(Exception), self._failing_on_error():
            self._pump()

    def _pump(self) -> None:
        """Submits plans until the executor has as many as it may have; the last one as late as possible."""
        if self._pump_timer is not None:
            self._pump_timer.cancel()
            self._pump_timer = None
        if self._scheduler is None or self.state not in (EngineState.SERVING, EngineState.DRAINING):
            return
        with suppress(ExecutorError):  # the worker is gone: ``results`` raises it too, after the last result
            while True:
                spare_s = self._scheduler.predictor.spare_s
                if spare_s >= TIMER_S:
                    self._pump_timer = asyncio.get_running_loop().call_later(spare_s, self._pump_due)
                    return
                plan = self._scheduler.schedule()
                if plan is None:
                    return
                self._executor.submit(plan)
                self._watchdog.submitted()

    async def _run(self) -> None:
        with suppress(Exception), self._failing_on_error():
            while await self._replace_worker(await self._apply_results()):
                pass

    async def _apply_results(self) -> ExecutorError:
        """Applies results until the worker is gone; returns the error."""
        assert self._scheduler is not None
        try:
            async for result in self._executor.results():
                self._watchdog.answered()
                self._supervisor.restarts.answered()
                self._scheduler.update(result)
                self._pump()
                await asyncio.sleep(0)  # lets tasks write to streams, even if more results are there already
        except ExecutorError as error:
            return error
        return ExecutorError("the worker has stopped")

    def _predicted_step_s(self) -> float | None:
        return None if self._scheduler is None else self._scheduler.predictor.oldest_step_s

    def _on_step_expired(self, limit_s: float) -> None:
        self._executor.kill(f"a step took more than {limit_s:.3g} s")

    @contextmanager
    def _failing_on_error(self) -> Iterator[None]:
        """Fails the engine after an internal error, because the state of rows and blocks is then unknown."""
        try:
            yield
        except Refused:
            raise
        except Exception:
            logger.exception("the scheduler failed")
            self._fail(EngineFinishReason.INTERNAL, "the scheduler failed")
            raise

    def _fail(self, reason: EngineFinishReason, message: str) -> None:
        if self.state in (EngineState.FAILED, EngineState.STOPPED):
            return
        logger.error("the engine failed: %s", message)
        assert self._scheduler is not None
        self._set_state(EngineState.FAILED)
        self._scheduler.abandon(reason, message)

    async def _replace_worker(self, error: ExecutorError) -> bool:
        """Starts another worker, for which all admitted requests wait; returns False if the engine cannot continue."""
        if self._scheduler is None or self.state in (EngineState.FAILED, EngineState.STOPPED):
            return False
        blames_step = error.blames_step and self._watchdog.num_unanswered > 0
        self._supervisor.died(error, in_a_step=blames_step)
        self._set_state(EngineState.RECOVERING)
        self._watchdog.restarted()
        self._scheduler.recover(blames_step)
        logger.error("%s; requests that wait for another worker: %d", error, len(self._scheduler.requests))
        began = time.monotonic()
        failure = await self._supervisor.replace(error)
        if failure is not None:
            self._fail(EngineFinishReason.WORKER_DIED, str(failure))
            return False
        duration = time.monotonic() - began
        logger.warning("another worker runs after %.1f s; %d requests go on", duration, len(self._scheduler.requests))
        self._set_ready()
        self._pump()
        return True

    def drain(self) -> None:
        """Refuses new requests from now on. Admitted requests continue, even if the worker must be replaced first."""
        self.is_draining = True
        if self.state in (EngineState.STARTING, EngineState.SERVING):
            self._set_state(EngineState.DRAINING)

    def resume(self) -> bool:
        """Accepts new requests again after ``drain``; returns False if the engine was not draining, or has failed or
        stopped."""
        if not self.is_draining or self.state in (EngineState.FAILED, EngineState.STOPPED):
            return False
        self.is_draining = False
        if self.state is EngineState.DRAINING:
            self._set_state(EngineState.STARTING if self._scheduler is None else EngineState.SERVING)
        return True

    async def wait_idle(self) -> None:
        await self._idle.wait()

    async def stop(self) -> None:
        """Ends every request with SHUTDOWN, then stops the executor. Safe to call twice, and concurrently."""
        if self._end is None:
            self._end = asyncio.create_task(self._stop(), name="penstock engine's end")
        await asyncio.shield(self._end)

    async def _stop(self) -> None:
        self._set_state(EngineState.STOPPED)
        if self._scheduler is not None:
            self._scheduler.abandon(EngineFinishReason.SHUTDOWN, "the service is shutting down")
        self._watchdog.stop()
        if self._pump_timer is not None:
            self._pump_timer.cancel()
        if self._task is not None:  # before the executor, which it may be about to start
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._executor.stop()

    def _set_ready(self) -> None:
        self._set_state(EngineState.DRAINING if self.is_draining else EngineState.SERVING)

    def _set_state(self, state: EngineState) -> None:
        if self.state in (state, EngineState.STOPPED):
            return  # STOPPED is final
        self.state = state
        for callback in self._callbacks:
            callback(state)

    @property
    def counters(self) -> Counters:
        """Totals since the start; 0 until a worker has started."""
        return Counters() if self._scheduler is None else self._scheduler.counters

    def load(self) -> EngineLoad:
        """Returns how busy the engine is. Cheap enough to call for each step."""
        return EngineLoad(state=self.state) if self._scheduler is None else self._scheduler.load(self.state)

    def stats(self) -> EngineStats:
        """Returns a snapshot, cheap enough to take every second."""
        stats = EngineStats(
            **vars(deepcopy(self.counters)),
            **asdict(self.load()),
            finished=self._num_finished,
            restarts=self._supervisor.restarts.total,
        )
        stats.refused += self._num_refused
        return with_current_values(stats, self._scheduler)
