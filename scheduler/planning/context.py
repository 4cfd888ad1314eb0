"""The state that the parts of planning share. They read and change it; only the planner sets the limits."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import WorkerFacts, num_row_numbers
from penstock.scheduler.planning.queues import RunningQueue, WaitingQueue
from penstock.scheduler.planning.rows import RowIdAllocator
from penstock.scheduler.planning.sequence import SequenceState
from penstock.scheduler.planning.tenants import TenantAccounting, TenantUse
from penstock.scheduler.recovery.crash_bisector import CrashBisector


@dataclass(slots=True)
class PlanningContext:
    """The blocks, queues and rows of one scheduler, and its limits."""

    kv: KVCacheManager
    waiting: WaitingQueue
    running: RunningQueue
    rows: RowIdAllocator[SequenceState]
    tenants: TenantAccounting
    bisector: CrashBisector
    clock: Callable[[], float]
    max_rows: int
    """The maximum number of running rows."""
    budget: int
    """The maximum number of tokens in a step."""
    decode_kv: int = 0
    """Positions that the decoding rows of the last plan read."""

    def is_above_share(self, tenant: TenantUse) -> bool:
        """Returns whether a tenant's running rows hold more than its share of the blocks."""
        num_held = sum(len(sequence.block_ids) for sequence in self.running if sequence.live.tenant is tenant)
        return num_held > self.kv.pool.num_blocks * self.tenants.share(tenant)


def new_context(
    kv: KVCacheManager, facts: WorkerFacts, config: SchedulerConfig, clock: Callable[[], float]
) -> PlanningContext:
    """Returns a context with empty queues."""
    return PlanningContext(
        kv=kv,
        waiting=WaitingQueue(config.policy, kv.wanted, kv.block_size),
        running=RunningQueue(),
        rows=RowIdAllocator(num_row_numbers(facts.max_num_seqs)),
        tenants=TenantAccounting(config, clock),
        bisector=CrashBisector(),
        clock=clock,
        max_rows=config.max_rows(facts),
        budget=config.token_budget(facts),
    )
