"""Figure 6: cancels at random points: compute stops within two steps, and all blocks are free.

A step that was submitted before the cancel may still compute the request's row; there are two at most. So no plan after
the cancel may name it.
"""

import asyncio
import random
import time
from collections import Counter

import pytest
from waiting import until

from penstock.models.checkpoint.checkpoint import DEMO, resolve_model
from penstock.models.executor.process import WorkerProcess
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.engine_stats import EngineState
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.planning.sequence import SequenceStatus, sampling_of_choice
from penstock.scheduler.request import EngineFinishReason, TextDelta
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.worker_config import WorkerConfig

VOCAB_SIZE = 100
NUM_LIVE = 24
CANCELS_A_DEATH = 150


class Watched:
    """An executor that knows which requests each plan computes. Every choice has a seed of its own."""

    def __init__(self, executor):
        self.executor = executor
        self.plans_made = 0
        self.last_plan = {}
        """Of each seed: the last plan that computes it."""
        self._seeds = {}

    async def start(self):
        self._seeds.clear()
        return await self.executor.start()

    async def load_adapter(self, load):
        return await self.executor.load_adapter(load)

    def submit(self, plan):
        self.executor.submit(plan)
        for number in plan.dropped:
            del self._seeds[number]
        for added in plan.added:
            self._seeds[added.row] = added.sampling.seed
        self.plans_made += 1
        for row in (*plan.chunks, *plan.decodes):
            self.last_plan[self._seeds[row.row]] = self.plans_made

    def results(self):
        return self.executor.results()

    def kill(self, why):
        self.executor.kill(why)

    async def stop(self):
        await self.executor.stop()

    def die(self):
        """There is no other worker until ``let_start``."""
        self.executor.may_start.clear()
        self.executor.die()

    def let_start(self):
        if isinstance(self.executor, FakeExecutor):
            self.executor.may_start.set()


class Ids:
    """Lets every token go, without text."""

    def feed(self, token_id):
        return TextDelta(1, "")

    def finish(self):
        return TextDelta(0, "")

    def restart(self):
        pass


class Load:
    """Requests that come, are held and released, and are cancelled."""

    def __init__(self, engine, executor, new_request, received_type, seed):
        self.rng = random.Random(seed)
        self.engine = engine
        self.executor = executor
        self.new_request = new_request
        self.received_type = received_type
        self.live = {}
        self.num_submitted = 0
        self.cancelled = []
        """(the seeds of its choices, plans made before) of each cancel."""
        self.points: Counter[str] = Counter()

    def submit(self):
        self.num_submitted += 1
        name = str(self.num_submitted)
        # Some begin alike, so that blocks are shared.
        first, length = self.rng.choice((0, self.num_submitted)), self.rng.choice((5, 40, 150, 300))
        prompt = [(first + position) % VOCAB_SIZE for position in range(length)]
        request = self.new_request(
            name,
            prompt,
            block_size=16,
            make_text=Ids,
            arrival=time.monotonic(),
            n=self.rng.choice((1, 1, 1, 3)),
            max_tokens=self.rng.choice((2, 30, 200)),
            sampling=SamplingParams(seed=self.num_submitted << 8),
        )
        self.live[name] = self.received_type(request, max_model_len=4096, vocab_size=VOCAB_SIZE)
        self.engine.submit(request)

    def cancel(self, name):
        received = self.live.pop(name)
        if received.finished is not None:
            return
        self.points[self.point_of(name)] += 1
        seeds = [sampling_of_choice(received.request.sampling, i).seed for i in range(received.request.n)]
        assert self.engine.abort(name, EngineFinishReason.CANCELLED)
        assert received.finished
        assert received.finished.reason is EngineFinishReason.CANCELLED
        self.cancelled.append((seeds, self.executor.plans_made))
        if self.engine.state is EngineState.RECOVERING:
            self.executor.let_start()

    def point_of(self, name):
        if self.engine.state is EngineState.RECOVERING:
            return "recovering"
        live = self.engine._scheduler.requests[name]
        if live.held:
            return "held"
        states = {sequence.state for sequence in live.sequences}
        if states == {SequenceStatus.WAITING}:
            return "waiting" if live.started_at is None else "preempted"
        return "prefilling" if SequenceStatus.PREFILLING in states else "decoding"

    async def run(self, num_cancels):
        held: set[str] = set()
        num_deaths = 1
        while len(self.cancelled) < num_cancels:
            self.live = {name: received for name, received in self.live.items() if received.finished is None}
            while self.engine.state is EngineState.SERVING and len(self.live) < NUM_LIVE:
                self.submit()
            for _ in range(self.rng.randrange(8)):
                await asyncio.sleep(0)
            if not self.live:
                self.executor.let_start()
                await asyncio.sleep(0.01)
                continue
            name = self.rng.choice(list(self.live))
            if self.rng.random() < 0.3:
                held ^= {name}
                self.engine.hold(name, name in held)
            else:
                self.cancel(name)
            if len(self.cancelled) > num_deaths * CANCELS_A_DEATH and self.engine.state is EngineState.SERVING:
                num_deaths += 1
                self.executor.die()
            if self.rng.random() < 0.02:
                await self.cancel_the_rest()

    async def cancel_the_rest(self):
        for name in list(self.live):
            self.cancel(name)
        await until(lambda: not self.engine.stats().kv_usage)

    def check(self):
        for seeds, plans_made in self.cancelled:
            for seed in seeds:
                assert self.executor.last_plan.get(seed, 0) <= plans_made, "a plan computes what was cancelled"


async def cancel_at_random_points(executor, new_request, received_type, num_cancels, seed):
    watched = Watched(executor)
    engine = Engine(watched, SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16))
    await engine.start()
    load = Load(engine, watched, new_request, received_type, seed)
    try:
        await load.run(num_cancels)
        watched.let_start()
        while engine.state is EngineState.RECOVERING:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await load.cancel_the_rest()
        # Others run on, and so would what was forgotten.
        load.submit()
        await engine.wait_idle()
        assert engine.stats().requests == 0
    finally:
        await engine.stop()
    load.check()
    return load.points


def fake_executor():
    return FakeExecutor(num_blocks=60, vocab_size=VOCAB_SIZE, max_num_batched_tokens=64, max_num_seqs=16)


async def test_reliability_figure_6_300_cancels(new_request, received_type):
    points = await cancel_at_random_points(fake_executor(), new_request, received_type, 300, seed=1)
    assert points.keys() == {"waiting", "prefilling", "decoding", "preempted", "held", "recovering"}, points


@pytest.mark.soak
async def test_reliability_figure_6_10000_cancels(new_request, received_type):
    points = await cancel_at_random_points(fake_executor(), new_request, received_type, 10_000, seed=2)
    print(f"\n{points}")


async def test_reliability_figure_6_100_cancels_on_the_demo_model(new_request, received_type):
    config = WorkerConfig(
        model=str(resolve_model(DEMO)),
        num_threads=1,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        max_model_len=512,
        kv_cache_bytes=4 << 20,
    )
    points = await cancel_at_random_points(WorkerProcess(config), new_request, received_type, 100, seed=3)
    assert points.keys() >= {"waiting", "prefilling", "decoding", "held"}, points
