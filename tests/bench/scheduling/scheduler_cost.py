"""What a step costs the event loop: schedule + update, with requests that all decode, at two lengths of context.

The fake executor's worker answers a plan late, as in production; its own time is not counted, and neither are streams.
"""

import argparse
import statistics
import time
from collections import deque

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import SamplingParams, StepPlan
from penstock.scheduler.request import Event, Request, TextDelta
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import FakeWorker, Slots

BLOCK_SIZE = 16
VOCAB_SIZE = 32_000
STEPS_A_TURN = 5


class IdsOnly:
    """The text state of a request for token ids."""

    def feed(self, token_id: int) -> TextDelta:
        """Lets the token go."""
        return _ONE_TOKEN

    def finish(self) -> TextDelta:
        """Holds nothing."""
        return TextDelta(0, "")

    def restart(self) -> None:
        """Does nothing: nothing is injected."""


_ONE_TOKEN = TextDelta(1, "")


def ignore(_event: Event) -> None:
    """A sink."""


class Running:
    """A scheduler whose requests all decode, with two plans in flight."""

    def __init__(self, num_requests: int, context: int, num_steps: int) -> None:
        num_blocks = num_requests * (-(-(context + num_steps) // BLOCK_SIZE) + 1) * 102 // 100
        facts = FakeExecutor(
            num_blocks=num_blocks,
            vocab_size=VOCAB_SIZE,
            max_model_len=context + num_steps + 1,
            max_num_seqs=num_requests,
            max_num_batched_tokens=65_536,
            slots=Slots,
        ).facts
        self.worker = FakeWorker(facts, lambda history, sampling: len(history) & 0xFF, Slots())
        config = SchedulerConfig(max_num_seqs=num_requests, max_num_batched_tokens=65_536, max_queued_tokens=1 << 40)
        self.scheduler = Scheduler(facts, config)
        self.plans: deque[StepPlan] = deque()
        self.seconds: list[float] = []
        salt = tenant_salt("fake", "default")
        for number in range(num_requests):
            prompt = [number & 0xFF, *range(1, 256)] * (context // 256 + 1)
            del prompt[context - number % BLOCK_SIZE :]  # or all would need a block in the same step
            self.scheduler.add_request(
                Request(
                    str(number),
                    prompt,
                    hash_blocks(prompt, BLOCK_SIZE, salt),
                    SamplingParams(seed=number, stop_token_ids=(VOCAB_SIZE - 1,)),
                    num_steps,
                    ignore,
                    IdsOnly,
                    hash_salt=salt,
                )
            )
        while self.scheduler.waiting or len(self.plans) < 2 or self.plans[0].chunks or self.plans[1].chunks:
            self.step()
        self.seconds.clear()

    def step(self) -> None:
        """Answers a plan and makes one."""
        result = self.worker.run(self.plans.popleft()) if len(self.plans) == 2 else None
        start = time.perf_counter()
        if result is not None:
            self.scheduler.update(result)
        plan = self.scheduler.schedule()
        self.seconds.append(time.perf_counter() - start)
        assert plan is not None, "every request decodes to the end"
        self.plans.append(plan)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256, help="requests that decode (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=1000, help="steps to measure (default: %(default)s)")
    parser.add_argument("--contexts", type=int, nargs=2, default=(1024, 32_768), help="tokens (default: 1024 32768)")
    options = parser.parse_args()
    num_steps = options.steps + 2 * options.requests + 100
    worlds = [Running(options.requests, context, num_steps) for context in options.contexts]
    # In turns, so that whatever else the machine does falls on both.
    for _ in range(-(-options.steps // STEPS_A_TURN)):
        for world in worlds:
            for _ in range(STEPS_A_TURN):
                world.step()
    print(f"schedule + update with {options.requests} requests that decode, {options.steps} steps, one core")
    print(f"{'context':>10} {'median ms':>10} {'p90 ms':>10} {'p99 ms':>10}")
    medians = []
    for context, world in zip(options.contexts, worlds, strict=True):
        milliseconds = [1000 * seconds for seconds in world.seconds]
        cuts = statistics.quantiles(milliseconds, n=100)
        medians.append(statistics.median(milliseconds))
        print(f"{context:>10} {medians[-1]:>10.3f} {cuts[89]:>10.3f} {cuts[98]:>10.3f}")
    short, long = options.contexts
    print(f"the median at {long} differs from that at {short} by {100 * (medians[1] / medians[0] - 1):+.1f} %")


if __name__ == "__main__":
    main()
