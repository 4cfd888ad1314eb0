"""The state that the parts of planning share. They read and change it; only the scheduler sets the limits."""

from collections.abc import Callable

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.adapters import AdapterSlots
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import Counters
from penstock.scheduler.plan import num_row_numbers
from penstock.scheduler.planning.queues import RunningQueue, WaitingQueue
from penstock.scheduler.planning.rows import RowIdAllocator
from penstock.scheduler.planning.tenants import TenantAccounting, TenantUse
from penstock.scheduler.recovery.crash_bisector import CrashBisector
from penstock.scheduler.worker_config import WorkerFacts


class PlanningContext:
    """The blocks, queues and rows of one scheduler, its limits and its totals."""

    def __init__(
        self, kv: KVCacheManager, facts: WorkerFacts, config: SchedulerConfig, clock: Callable[[], float]
    ) -> None:
        self.kv = kv
        self.facts = facts
        self.waiting = WaitingQueue(config.policy, kv)
        self.running = RunningQueue()
        self.rows = RowIdAllocator(num_row_numbers(facts.max_num_seqs))
        self.tenants = TenantAccounting(config, clock)
        self.bisector = CrashBisector()
        self.adapters = AdapterSlots(facts.max_loras)
        self.counters = Counters()
        self.clock = clock
        self.decode_kv = 0
        """Positions that the decoding rows of the last plan read."""
        self.configure(config)

    def configure(self, config: SchedulerConfig) -> None:
        """Sets the limits."""
        self.config = config
        self.max_rows = min(config.max_rows(self.facts), self.facts.num_state_slots or self.facts.max_num_seqs)
        """The maximum number of running rows."""
        self.budget = config.token_budget(self.facts)
        """The maximum number of tokens in a step."""
        self.max_plans_in_flight = config.max_plans_in_flight + self.facts.pipeline_parallel_size - 1
        """One step is in each stage, and one waits."""
        assert 0 < self.max_rows <= self.budget, "every running row can decode in every step, so that none starves"

    def is_above_share(self, tenant: TenantUse) -> bool:
        """Returns whether a tenant's running rows hold more than its share of the blocks."""
        num_held = sum(sequence.num_held for sequence in self.running if sequence.live.tenant is tenant)
        return num_held > self.kv.pool.num_blocks * self.tenants.share(tenant)
