"""A service in virtual time: the real scheduler, its loop, and a worker that only takes time."""

from collections import deque

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import TIMER_S
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import StepPlan, StepResult
from penstock.scheduler.request import EngineFinishReason, Request
from penstock.scheduler.simulation.clock import VirtualClock
from penstock.scheduler.simulation.costs import NO_SERVICE_COSTS, ServiceCosts
from penstock.scheduler.simulation.stages import StageTimes
from penstock.scheduler.simulation.worker import TimedWorker
from penstock.scheduler.worker_config import WorkerFacts


class SimulatedReplica:
    """Does what ``Engine`` does, on a virtual clock and without asyncio."""

    def __init__(
        self,
        clock: VirtualClock,
        facts: WorkerFacts,
        config: SchedulerConfig,
        worker: TimedWorker,
        service: ServiceCosts = NO_SERVICE_COSTS,
        *,
        hop_s: float = 0.0,
        delays_plans: bool = True,
    ) -> None:
        """``delays_plans``: whether plans are made as late as the engine makes them, or as early as possible."""
        self.scheduler = Scheduler(facts, config, clock=lambda: clock.now)
        self.stages = StageTimes(facts.pipeline_parallel_size, hop_s)
        self.delivered_at = 0.0
        """When clients have the messages that result from what the scheduler does now."""
        self.most_kv = 0.0
        """The maximum share of the KV cache that rows held."""
        self._clock = clock
        self._worker = worker
        self._service = service
        self._delays_plans = delays_plans
        self._results: deque[StepResult] = deque()
        self._loop_free_at = 0.0
        self._pump_is_due = False
        self._timer = 0
        self._kv_area = self._kv_until = 0.0

    @property
    def num_live(self) -> int:
        """The number of requests that have not finished."""
        return len(self.scheduler.requests)

    @property
    def mean_kv(self) -> float:
        """The mean share of the KV cache that rows held, over the time until the last result."""
        return self._kv_area / self._kv_until if self._kv_until else 0.0

    def add_request(self, request: Request) -> None:
        """Adds a request, as ``Engine.submit`` does. Raises Refused."""
        self.delivered_at = self._clock.now + self._service.message_s
        self.scheduler.add_request(request)
        if request.deadline is not None:
            self._clock.at(request.deadline, lambda: self._pass_deadline(request.request_id))
        self._pump_soon()

    def _pass_deadline(self, request_id: str) -> None:
        self.delivered_at = self._clock.now + self._service.message_s
        if self.scheduler.abort(request_id, EngineFinishReason.DEADLINE, "the request's deadline passed"):
            self._pump_soon()

    def _pump_soon(self) -> None:
        """Plans after what else happens now, so that requests that arrive together are planned together."""
        if not self._pump_is_due:
            self._pump_is_due = True
            self._clock.at(max(self._clock.now, self._loop_free_at), self._pump_due)

    def _pump_due(self) -> None:
        self._pump_is_due = False
        self._pump()

    def _pump(self) -> None:
        self._timer += 1
        scheduler = self.scheduler
        while True:
            if self._delays_plans:
                spare_s = scheduler.predictor.spare_s
                if spare_s >= TIMER_S:
                    self._set_timer(spare_s)
                    return
            plan = scheduler.schedule()
            if plan is None:
                return
            self._submit(plan)

    def _set_timer(self, delay_s: float) -> None:
        number = self._timer
        self._clock.at(self._clock.now + delay_s, lambda: self._timer_due(number))

    def _timer_due(self, number: int) -> None:
        if number == self._timer:  # otherwise a result or a request came first
            self._pump()

    def _submit(self, plan: StepPlan) -> None:
        result = self._worker.run(plan)
        end = self.stages.run(plan, result, self._clock.now + self._service.submit_s)
        self._results.append(result)
        self._clock.at(end + self._service.answer_s, self._answer)

    def _answer(self) -> None:
        now = self._clock.now
        if now < self._loop_free_at:
            self._clock.at(self._loop_free_at, self._answer)
            return
        result = self._results.popleft()
        kv = self.scheduler.kv.usage
        self.most_kv = max(self.most_kv, kv)
        self._kv_area += kv * (now - self._kv_until)
        self._kv_until = now
        self._loop_free_at = now + self._service.handling_s(len(result.rows))
        self.delivered_at = self._loop_free_at + self._service.message_s
        self.scheduler.update(result)
        self._pump()
