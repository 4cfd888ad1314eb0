"""What a request meets on its way into the queue: how much of it is cached, its rank and place, what is foretold of it,
and whether it may enter. Counts refusals, and changes nothing else."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.kv.manager import KVCacheManager
from penstock.scheduler.admission import Admission, check_rates
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.forecast import Prediction
from penstock.scheduler.outlook import Outlook
from penstock.scheduler.plan import WorkerFacts
from penstock.scheduler.planner import Planner
from penstock.scheduler.policy import Policy, Rank, rank_of
from penstock.scheduler.request import Refused, Request
from penstock.scheduler.tenants import Tenants


@dataclass(frozen=True, slots=True)
class Entry:
    """How a request enters the queue."""

    rank: Rank
    """Of its first choice."""
    num_cached_tokens: int
    """Of its prompts, as things stand."""
    position: int
    """How many are before it."""
    prediction: Prediction | None


class Intake:
    """Examines requests. For what it looks at see the planner and the tenants, whose owner this is not."""

    def __init__(
        self,
        kv: KVCacheManager,
        planner: Planner,
        outlook: Outlook,
        tenants: Tenants,
        facts: WorkerFacts,
        config: SchedulerConfig,
        clock: Callable[[], float],
    ) -> None:
        self._kv = kv
        self._planner = planner
        self._outlook = outlook
        self._tenants = tenants
        self._facts = facts
        self._clock = clock
        self.configure(config)

    def configure(self, config: SchedulerConfig) -> None:
        """For the requests that come from now on."""
        self._policy = config.policy
        self.admission = Admission(config, self._facts)

    def rank(self, request: Request, number: int, choice: int) -> Rank:
        """Of one choice of the request that arrived as number ``number``."""
        predicted_s = self._outlook.service_s(request) or 0.0 if self._policy is Policy.DEADLINE else 0.0
        return rank_of(self._policy, request, predicted_s, number, choice)

    def check_rates(self, tenant: str) -> None:
        """Raises Refused where no request of a tenant would be taken now: before anything is spent on one."""
        try:
            check_rates(1, self._tenants.allowance(tenant), self._clock())
        except Refused:
            self._planner.counters.refused += 1
            raise

    def examine(self, request: Request, number: int, *, is_first: bool) -> Entry:
        """How it enters as number ``number``; ``is_first``: there is no other request. Raises Refused."""
        num_cached = self._num_cached(request)
        rank = self.rank(request, number, 0)
        position = self._planner.waiting.num_ahead(request.tenant, rank)
        prediction = self._outlook.predict(request, num_cached, position, rank)
        # While nobody is there, trying again later cannot help, and nothing would be learned.
        self._admit(request, num_cached, None if is_first or self._outlook.needs_test else prediction)
        return Entry(rank, num_cached, position, prediction)

    def _num_cached(self, request: Request) -> int:
        if not request.reads_cache:
            return 0
        kv, num_blocks = self._kv, 0
        for index in range(request.num_prompts):
            prompt = request.prompt(index)
            hashes, num_tokens = kv.hashing.first(prompt.block_hashes), len(prompt.token_ids)
            num_found = len(kv.find_prefix(hashes, num_tokens))
            num_blocks += num_found + len(self._planner.restoring.find(hashes, num_found, num_tokens))
        return num_blocks * kv.block_size

    def _admit(self, request: Request, num_cached_tokens: int, prediction: Prediction | None) -> None:
        waiting, tenants = self._planner.waiting, self._tenants
        try:
            self.admission.check(
                request,
                queue=waiting.queued,
                own_queue=waiting.queued_of(request.tenant),
                queue_share=tenants.share_of(request.tenant) if waiting.by_turns else 0.0,
                num_pooled=waiting.num_pooled,
                num_tenant_live=tenants.num_live(request.tenant),
                allowance=tenants.allowance(request.tenant),
                prediction=prediction,
                alone_s=self._outlook.alone_s(request, num_cached_tokens),
                now=self._clock(),
            )
        except Refused:
            self._planner.counters.refused += 1
            raise
