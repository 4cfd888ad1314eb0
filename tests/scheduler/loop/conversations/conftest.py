"""``Conversations``: a scheduler with a fake worker, and the tokens that each request had computed."""

from collections import deque

import pytest
from known_requests import Received, make_request

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import StepPlan
from penstock.scheduler.testing.fake_windows import WindowedSlots
from penstock.scheduler.testing.fake_worker import CheckedSlots, FakeWorker, token_of_history
from penstock.scheduler.worker_config import WorkerFacts

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE, MAX_MODEL_LEN = 16, 2048, 1000, 16_384


class Conversations:
    """Requests with blocks of 16 tokens, each of which is checked from its first event to its last."""

    def __init__(self, num_state_slots: int = 0, *, caches_prefixes: bool = True, **groups) -> None:
        """``groups``: the groups of layers with a window, as the facts have them."""
        limits = (MAX_MODEL_LEN, 8, 512, "fake", "fake", "cpu", "float32", "float32", 0, 0)
        facts = WorkerFacts(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, *limits, num_state_slots=num_state_slots, **groups)
        config = SchedulerConfig(max_num_batched_tokens=512, enable_prefix_caching=caches_prefixes)
        self.scheduler = Scheduler(facts, config)
        slots = WindowedSlots(facts) if groups else CheckedSlots(NUM_BLOCKS, BLOCK_SIZE)
        self._worker = FakeWorker(facts, token_of_history(VOCAB_SIZE), slots)
        self._plans: deque[StepPlan] = deque()
        self._num_requests = 0
        self.num_computed = 0
        """Tokens of histories that were computed since the last call of ``ask``."""
        self.most_held = 0
        """The maximum number of blocks that were held at a time since then."""

    def ask(self, *prompts: list[int], max_tokens: int = 30, **fields) -> list[list[int]]:
        """Runs requests that arrive together to their ends; returns the first choice of each."""
        self.num_computed = self.most_held = 0
        answers = []
        for prompt in prompts:
            request = make_request(str(self._num_requests), prompt, block_size=16, max_tokens=max_tokens, **fields)
            self._num_requests += 1
            answers.append(Received(request, MAX_MODEL_LEN, VOCAB_SIZE))
            self.scheduler.add_request(request)
        while self.scheduler.requests:
            while (plan := self.scheduler.schedule()) is not None:
                self._plans.append(plan)
                self.num_computed += sum(chunk.end - chunk.start for chunk in plan.chunks)
                pool = self.scheduler.kv.pool
                self.most_held = max(self.most_held, pool.num_blocks - pool.num_free)
            self._answer()
        while self._plans:
            self._answer()
        for received in answers:
            received.check_end()
        self.scheduler.kv.check([])
        assert self.scheduler.kv.states.num_used == self.scheduler.kv.states.num_snapshots, "a row has kept its slot"
        return [received.token_ids[0] for received in answers]

    def _answer(self) -> None:
        self.scheduler.update(self._worker.run(self._plans.popleft()))

    def snapshots(self, token_ids: list[int]) -> list[int]:
        """The positions of a history at which its state is saved."""
        hashes = hash_blocks(token_ids, BLOCK_SIZE, tenant_salt("fake", "default"))
        find = self.scheduler.kv.states.find
        return [BLOCK_SIZE * (index + 1) for index, each in enumerate(hashes) if find(each) is not None]


@pytest.fixture(scope="session")
def conversations_type() -> type[Conversations]:
    return Conversations
