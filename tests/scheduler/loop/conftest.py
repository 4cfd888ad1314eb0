"""Fixtures of the scheduler's loop: engines over a fake executor, and the exploration of a scheduler with random
operations."""

import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from known_requests import BLOCK_SIZE, VOCAB_SIZE

from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.loop.engine import Engine
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import EngineFinishReason, Request
from penstock.scheduler.testing.fake_windows import WindowedSlots
from penstock.scheduler.testing.fake_worker import FakeRow, FakeWorker, WorkerKilled, token_of_history

NUMBERS = st.integers(0, 2**16)


def random_config(number: int) -> tuple[int, SchedulerConfig, int, int]:
    """Pools that hold the largest request hardly more than once, so that most sequences preempt and evict; and slots of
    the host tier, none, few or many."""
    rng = random.Random(number)
    budget = rng.choice((4, 9, 32, 64))
    config = SchedulerConfig(
        max_num_seqs=rng.randint(1, 5),
        max_num_batched_tokens=budget,
        max_queued_requests=rng.choice((2, 100)),
        max_queued_tokens=rng.choice((40, 1000)),
        policy=rng.choice(tuple(Policy)),
        enable_prefix_caching=rng.random() < 0.75,
        max_plans_in_flight=rng.choice((1, 2, 2, 2)),
        target_itl_s=rng.choice((None, None, 0.5, 3.0)),
    )
    return rng.randint(8, 22), config, budget, rng.choice((0, 3, 40))


class SchedulerMachine(RuleBasedStateMachine):
    """One world a sequence."""

    new_world: Callable[..., Any]

    @initialize(number=NUMBERS)
    def begin(self, number):
        *limits, num_host_blocks = random_config(number)
        tier = {"num_host_blocks": num_host_blocks, "num_state_slots": (0, 0, 1, 2, 5, 12)[number % 6]}
        stages = ((), (), (1, 1), (1, 1, 1))[number % 4]
        self.world = self.new_world(*limits, stage_layers=stages, **tier)
        self.world.row_us = (0, 200_000)[number % 2]
        self.is_whole = True

    def do(self, operation, *args):
        self.is_whole = False
        operation(*args)
        self.world.check()
        self.is_whole = True

    @rule(number=NUMBERS)
    def add(self, number):
        self.do(self.world.add_random, number)

    @rule(number=NUMBERS)
    def add_three(self, number):
        for offset in range(3):
            self.do(self.world.add_random, number + offset)

    @rule(number=NUMBERS)
    def cancel(self, number):
        self.do(self.world.cancel, number)

    @rule()
    def schedule(self):
        self.do(self.world.schedule)

    @rule()
    def answer(self):
        self.do(self.world.answer)

    @rule(count=st.integers(1, 8))
    def turns(self, count):
        for _ in range(count):
            self.do(self.world.schedule)
            if len(self.world.plans) == self.world.max_plans:
                self.do(self.world.answer)

    @rule(number=NUMBERS)
    def hold(self, number):
        self.do(self.world.hold, number)

    @rule(number=NUMBERS)
    def update(self, number):
        self.do(self.world.update, number)

    @rule(number=NUMBERS)
    def inject(self, number):
        self.do(self.world.inject, number)

    @rule(number=NUMBERS, chance=st.integers(0, 3))
    def reconfigure(self, number, chance):
        if chance == 3:
            self.do(self.world.reconfigure, number)

    @rule(blames_step=st.booleans(), chance=st.integers(0, 3))
    def recover(self, blames_step, chance):
        if chance == 3:
            self.do(self.world.recover, blames_step)

    @rule(chance=st.integers(0, 7))
    def die(self, chance):
        if chance == 7:
            self.do(self.world.die)

    def teardown(self):
        # What is broken already would only break again, for other reasons.
        if getattr(self, "is_whole", False):
            self.world.drain()


def run_machine(world_type, num_sequences: int, num_operations: int, *, shrink: bool = True) -> None:
    run_state_machine_as_test(
        type("Machine", (SchedulerMachine,), {"new_world": world_type}),
        settings=settings(
            max_examples=num_sequences,
            stateful_step_count=num_operations,
            deadline=None,
            database=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
        ),
    )


@pytest.fixture(scope="session")
def explore() -> Callable[..., None]:
    """Runs this many sequences of this many random operations in worlds of a type."""
    return run_machine


@pytest.fixture(scope="session")
def deadly_world_type(world_type):
    """A world with requests that end their worker."""

    class DeadlyWorld(world_type):  # type: ignore[valid-type, misc]
        """Some requests kill the worker with their third token. No other request is ever blamed."""

        def is_killer(self, request: Request) -> bool:
            return request.sampling.seed == 2 and len(request.prompt_token_ids) % 4 == 0

        def kills(self, row: FakeRow) -> bool:
            killing = row.sampling.seed == 2 and row.num_prompt_tokens % 4 == 0
            return killing and len(row.history) - row.num_prompt_tokens >= 2

        def answer(self):
            try:
                return super().answer()
            except WorkerKilled:
                super().recover(blames_step=True)
                return True

        def recover(self, blames_step: bool) -> None:
            super().recover(blames_step=False)

        def schedule(self):
            planned = super().schedule()
            on_trial, rows = self.scheduler._bisector.on_trial, self.scheduler._planner.rows
            if planned and on_trial:
                plan = self.plans[-1]
                for row in [chunk.row for chunk in plan.chunks] + [decode.row for decode in plan.decodes]:
                    request_id = rows.current(row).live.request.request_id
                    assert request_id in on_trial, f"request {request_id} runs beside those on trial"
            return planned

        def drain(self) -> None:
            super().drain()
            for name, received in self.received.items():
                assert received.finished is not None
                refused = received.finished.reason is EngineFinishReason.KILLED_WORKER
                assert not refused or self.is_killer(received.request), f"request {name} is innocent"
            assert not self.scheduler._bisector
            assert not self.scheduler._bisector._records

    return DeadlyWorld


@pytest.fixture(scope="session")
def stateful_world_type(world_type):
    """A world whose model has recurrent states, always."""

    class StatefulWorld(world_type):  # type: ignore[valid-type, misc]
        """Checks that no plan writes to a slot in which the result of an earlier plan may still be awaited."""

        def __init__(self, *limits, num_state_slots: int, **tier) -> None:
            super().__init__(*limits, num_state_slots=num_state_slots or 7, **tier)

        def schedule(self):
            unanswered = list(self.plans)
            planned = super().schedule()
            if planned:
                plan, dropped = self.plans[-1], set(self.plans[-1].dropped)
                written = {each.slot for each in plan.snapshots} | {each.state_slot for each in plan.added}
                for earlier in reversed(unanswered):
                    named = {each.slot for each in earlier.snapshots if each.row not in dropped}
                    assert not written & named, f"slots {written & named} are used while a result is awaited"
                    dropped.update(earlier.dropped)
            return planned

    return StatefulWorld


@pytest.fixture(scope="session")
def windowed_world_type(world_type):
    """A world whose model has a window of less than two blocks in two groups of its layers, and more in a third."""

    class WindowedWorld(world_type):  # type: ignore[valid-type, misc]
        """Checks that each row has the blocks that its next query sees, and hardly more."""

        def __init__(self, num_blocks: int, *limits, **tier) -> None:
            super().__init__(3 * num_blocks, *limits, num_window_groups=2, window=7, **tier)

        def _new_worker(self) -> None:
            super()._new_worker()
            self.worker = FakeWorker(self.facts, token_of_history(VOCAB_SIZE), WindowedSlots(self.facts), self.kills)

        def check(self) -> None:
            super().check()
            for sequence in self.scheduler.running:
                held = len(sequence.window.block_ids) // 2
                # Its drafts may have blocks as well.
                assert held <= self.facts.groups.most_held + 1 + 3 * sequence.live.request.max_drafts // BLOCK_SIZE

    return WindowedWorld


@pytest.fixture
async def engine(executor):
    engine = Engine(executor)
    await engine.start()
    yield engine
    await engine.stop()
