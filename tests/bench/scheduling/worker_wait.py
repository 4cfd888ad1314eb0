"""How long the worker waits between steps, by its own clock, with two plans in flight and with one.

64 rows that decode; all of it real but the streams: engine, scheduler, socket and the worker process with the demo
model. With two plans the next one lies ready when a step ends; with one the worker waits for a turn of the service's
loop.
"""

import argparse
import asyncio
import statistics
from collections.abc import AsyncIterator

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, SamplingParams, StepPlan, StepResult
from penstock.scheduler.request import Event, Request, TextDelta
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts

TARGET_US = 300
PROMPT_TOKENS = 32
SKIPPED_STEPS = 10


class Observed:
    """A worker process whose answers are kept."""

    def __init__(self, worker: WorkerProcess) -> None:
        self._worker = worker
        self.answers: list[StepResult] = []

    async def start(self) -> WorkerFacts:
        """The worker's."""
        return await self._worker.start()

    def submit(self, plan: StepPlan) -> None:
        """To the worker."""
        self._worker.submit(plan)

    async def load_adapter(self, load: AdapterLoad) -> AdapterLoaded:
        """To the worker."""
        return await self._worker.load_adapter(load)

    async def results(self) -> AsyncIterator[StepResult]:
        """The worker's, noted on the way."""
        async for result in self._worker.results():
            self.answers.append(result)
            yield result

    def kill(self, why: str) -> None:
        """The worker."""
        self._worker.kill(why)

    async def stop(self) -> None:
        """The worker."""
        await self._worker.stop()


class IdsOnly:
    """The text state of a request for token ids."""

    def feed(self, token_id: int) -> TextDelta:
        """Lets the token go."""
        return TextDelta(1, "")

    def finish(self) -> TextDelta:
        """Holds nothing."""
        return TextDelta(0, "")

    def restart(self) -> None:
        """Does nothing: nothing is injected."""


def make_request(number: int, max_tokens: int) -> Request:
    """A prompt of its own, greedy, without a stop."""
    prompt = [(number * 31 + i) % 4000 for i in range(PROMPT_TOKENS)]
    salt = tenant_salt(DEMO, "bench")
    return Request(
        request_id=str(number),
        prompt_token_ids=prompt,
        block_hashes=hash_blocks(prompt, 16, salt),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        sink=ignore,
        make_text=IdsOnly,
        hash_salt=salt,
    )


def ignore(_event: Event) -> None:
    """A sink."""


async def measure(plans_in_flight: int, num_rows: int, num_steps: int, threads: int) -> list[StepResult]:
    """The answers of the steps in which all rows decode."""
    config = WorkerConfig(
        model=str(resolve_model(DEMO)), num_threads=threads, kv_cache_bytes=256 << 20, max_model_len=4096
    )
    executor = Observed(WorkerProcess(config))
    engine = Engine(executor, SchedulerConfig(max_plans_in_flight=plans_in_flight))
    await engine.start()
    try:
        for number in range(num_rows):
            engine.submit(make_request(number, num_steps))
        await engine.wait_idle()
    finally:
        await engine.stop()
    full = [
        answer for answer in executor.answers if len(answer.rows) == num_rows and all(r.token_ids for r in answer.rows)
    ]
    return full[SKIPPED_STEPS:]


def run(loop_factory: "type[asyncio.AbstractEventLoop] | None", **kwargs: int) -> list[StepResult]:
    """``measure`` in a loop of its own."""
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(measure(**kwargs))


def main() -> None:
    """Prints both figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64, help="rows that decode together (default %(default)s)")
    parser.add_argument("--steps", type=int, default=200, help="steps of each measurement (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the worker (default %(default)s)")
    args = parser.parse_args()
    print(f"worker's wait between steps: {args.rows} rows, {args.steps} steps, {args.threads} compute thread(s)")
    print(f"{'plans in flight':>16}{'wait p50 us':>13}{'wait p99 us':>13}{'step p50 ms':>13}")
    medians = {}
    for plans in (1, 2):
        answers = run(
            uvloop_or_none(), plans_in_flight=plans, num_rows=args.rows, num_steps=args.steps, threads=args.threads
        )
        waits = sorted(answer.waited_us for answer in answers)
        medians[plans] = statistics.median(waits)
        step_ms = statistics.median(answer.computed_us for answer in answers) / 1000
        print(f"{plans:>16}{medians[plans]:>13.0f}{waits[len(waits) * 99 // 100]:>13}{step_ms:>13.2f}")
    good = medians[2] < TARGET_US and medians[2] < medians[1]
    print(
        f"target: under {TARGET_US} us with two plans in flight, and less than with one: {'met' if good else 'NOT met'}"
    )


def uvloop_or_none() -> "type[asyncio.AbstractEventLoop] | None":
    """The loop that the service uses."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop


if __name__ == "__main__":
    main()
