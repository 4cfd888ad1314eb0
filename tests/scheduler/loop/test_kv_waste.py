"""How many slots of the KV cache are taken and hold nothing, at the lengths of the benchmarks' mixed workload."""

from collections import deque

import pytest
from cpu_bench.workloads import build

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import SamplingParams, StepPlan
from penstock.scheduler.request import Request, TextDelta
from penstock.scheduler.testing.fake_worker import CheckedSlots, FakeWorker, token_of_history
from penstock.scheduler.worker_config import WorkerFacts

BLOCK_SIZE, NUM_BLOCKS, VOCAB_SIZE = 16, 1024, 5000


class Text:
    """Lets every token go at once."""

    def feed(self, token_id):
        return TextDelta(1, "a")

    def finish(self):
        return TextDelta(0, "")

    def restart(self):
        pass


def requests():
    """Those of W2: 16 at once, prompts of 32 to 1024 tokens and outputs of 16 to 128."""
    salt = tenant_salt("fake", "default")
    for number, (prompt, num_output) in enumerate(build("W2", 0)):
        hashes = hash_blocks(prompt, BLOCK_SIZE, salt)
        yield Request(
            str(number), prompt, hashes, sampling=SamplingParams(), max_tokens=num_output, make_text=Text,
            sink=lambda _: None, hash_salt=salt,
        )  # fmt: skip


# A prompt that is computed in chunks has the slots of all its tokens from the first chunk on: the smaller the chunks,
# the longer some wait for theirs.
@pytest.mark.parametrize(("step_tokens", "most"), [(128, 0.05), (256, 0.04), (2048, 0.04)])
def test_few_slots_are_taken_and_hold_nothing(step_tokens, most):
    """Summed over all steps: of the slots of blocks that rows hold in a step, those in which nothing lies after it."""
    limits = (4096, 256, step_tokens, "fake", "fake", "cpu", "float32", "float32")
    facts = WorkerFacts(NUM_BLOCKS, BLOCK_SIZE, VOCAB_SIZE, *limits, 0, 0)
    scheduler = Scheduler(facts, SchedulerConfig(max_num_batched_tokens=step_tokens))
    worker = FakeWorker(facts, token_of_history(VOCAB_SIZE), CheckedSlots(NUM_BLOCKS, BLOCK_SIZE))
    for request in requests():
        scheduler.add_request(request)
    plans: deque[StepPlan] = deque()
    taken = behind_the_end = empty = 0
    while scheduler.requests:
        while (plan := scheduler.schedule()) is not None:
            plans.append(plan)
        result = worker.run(plans.popleft())
        rows = list(worker._rows.values())
        assert len({block for row in rows for block in row.block_ids}) == sum(len(row.block_ids) for row in rows)
        slots = [len(row.block_ids) * BLOCK_SIZE for row in rows]
        taken += sum(slots)
        empty += sum(slots) - sum(row.num_computed for row in rows)
        behind_the_end += sum(slots) - sum(len(row.history) for row in rows)
        scheduler.update(result)
    print(
        f"{step_tokens} tokens a step: {empty / taken:.2%}, behind the ends of histories {behind_the_end / taken:.2%}"
    )
    assert behind_the_end / taken < 0.02
    assert empty / taken < most
