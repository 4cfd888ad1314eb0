"""What the tests of the scheduler share: ``World``, a scheduler with a fake worker that checks everything after every
operation."""

import random
import time
from collections import Counter, deque
from dataclasses import replace
from typing import Any

import pytest
from known_requests import (
    BLOCK_SIZE,
    ENGINE_VOCAB_SIZE,
    HIDDEN_SIZE,
    MAX_MODEL_LEN,
    TEXTS,
    VOCAB_SIZE,
    Received,
    make_prompt,
    make_request,
)

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.loop.scheduler import Scheduler
from penstock.scheduler.plan import Pooling, SamplingParams, StepPlan
from penstock.scheduler.planning.queues import WaitingQueue
from penstock.scheduler.planning.sequence import SequenceStatus
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import Change, EngineFinishReason, Prompt, Refused, Request
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_worker import CheckedSlots, FakeRow, FakeWorker, token_of_history
from penstock.scheduler.timing.queued_work import total_work
from penstock.scheduler.worker_config import WorkerFacts


class World:
    """A scheduler, a fake worker and what lies between them: plans, and answers that come when the test says so."""

    def __init__(self, num_blocks: int, config: SchedulerConfig, max_num_batched_tokens: int = 64, **tier: Any) -> None:
        rest = (MAX_MODEL_LEN, config.max_num_seqs, max_num_batched_tokens, "fake", "fake", "cpu", "float32", "float32")
        self.facts = WorkerFacts(num_blocks, BLOCK_SIZE, VOCAB_SIZE, *rest, 0, 0, hidden_size=HIDDEN_SIZE, **tier)
        self.config = config
        self.received: dict[str, Received] = {}
        self.num_refused = 0
        self.now = 0.0
        """A second later with every plan."""
        self.step_us = 1_000_000
        self.row_us = 0
        """What each row adds."""
        self._new_worker()
        self.scheduler = Scheduler(self.facts, self.config, clock=lambda: self.now)
        self.max_plans = config.max_plans_in_flight + self.facts.pipeline_parallel_size - 1

    def _new_worker(self) -> None:
        slots = CheckedSlots(self.facts.num_blocks, BLOCK_SIZE, self.facts.num_host_blocks)
        self.worker = FakeWorker(self.facts, token_of_history(VOCAB_SIZE), slots, self.kills)
        self.plans: deque[StepPlan] = deque()

    def kills(self, row: FakeRow) -> bool:
        """Whether a step with this row is the worker's last."""
        return False

    def alive(self) -> list[str]:
        return [name for name, received in self.received.items() if received.finished is None]

    def add(self, request: Request) -> Received | None:
        received = Received(request)
        try:
            self.scheduler.add_request(request)
        except Refused:
            self.num_refused += 1
            return None
        assert received.accepted is not None
        self.received[request.request_id] = received
        return received

    def add_random(self, random_number: int) -> None:
        """A request out of a few families that share prefixes, with features in every combination."""
        rng = random.Random(random_number)
        prompt = self._random_prompt(rng)
        if rng.random() < 0.15:
            self.add_pooled(rng, [prompt, *(self._random_prompt(rng) for _ in range(rng.choice((0, 0, 1, 5))))])
            return
        sampling = SamplingParams(
            seed=rng.randrange(3),
            min_tokens=rng.choice((0, 0, 3)),
            stop_token_ids=rng.choice(((), (1,), (2, 5))),
            logprobs=rng.choice((None, None, 0, 2)),
            prompt_logprobs=rng.choice((None, None, None, 1)),
        )
        request = make_request(
            str(len(self.received) + self.num_refused),
            prompt,
            tenant=rng.choice(("a", "a", "a", "b")),
            sampling=sampling,
            max_tokens=rng.randint(1, 14),
            make_text=rng.choice(TEXTS),
            n=rng.choice((1, 1, 1, 2, 3)),
            priority=rng.randint(-1, 1),
            retain_s=rng.choice((0.0, 0.0, 5.0, 20.0)),
            deadline=rng.choice((None, None, self.now + rng.randint(1, 80))),
            arrival=self.now,
            max_drafts=rng.choice((0, 0, 2, 5)),
            grammar=rng.choice(("", "", "g", " ", "   ")),
            is_warm_up=rng.random() < 0.1,
            first_token_target=rng.choice((None, self.now + rng.randint(1, 200))),
            target_itl_s=rng.choice((None, 1.5, 30.0)),
        )
        own = [name for name in self.alive() if self.received[name].request.tenant == request.tenant]
        request.supersedes = rng.choice([*own, ""]) if rng.random() < 0.2 else ""
        assert self.add(request) is None or request.supersedes not in self.alive()

    def add_pooled(self, rng: random.Random, prompts: list[list[int]]) -> None:
        """A request whose prompts are embedded."""
        salt = tenant_salt("fake", "a")
        request = make_request(
            str(len(self.received) + self.num_refused),
            prompts[0],
            tenant="a",
            pooling=rng.choice(tuple(Pooling)),
            more_prompts=[Prompt(prompt, hash_blocks(prompt, BLOCK_SIZE, salt)) for prompt in prompts[1:]],
            n=len(prompts),
            max_tokens=0,
            priority=rng.randint(-1, 1),
            deadline=rng.choice((None, None, self.now + rng.randint(1, 80))),
        )
        self.add(request)

    def _random_prompt(self, rng: random.Random) -> list[int]:
        """Of two families; or a conversation that goes on, from what another request's output may have cached."""
        if self.received and rng.random() < 0.4:
            earlier = self.received[rng.choice(list(self.received))]
            prompt = earlier.request.prompt_token_ids + earlier.token_ids.get(0, []) + [rng.randrange(VOCAB_SIZE)]
            if len(prompt) < MAX_MODEL_LEN:
                return prompt
        family = rng.randrange(2)
        return [(family + position * position // 5) % VOCAB_SIZE for position in range(rng.randint(1, 34))]

    def cancel(self, random_number: int) -> None:
        names = self.alive()
        if names:
            assert self.scheduler.abort(names[random_number % len(names)], EngineFinishReason.CANCELLED)
        assert not self.scheduler.abort("nobody", EngineFinishReason.CANCELLED)

    def hold(self, random_number: int) -> None:
        """Nobody reads a request's output any more; or everybody's is read again."""
        names = self.alive()
        if random_number % 3:
            if names:
                self.scheduler.hold(names[random_number % len(names)], True)
            return
        for name in names:
            self.scheduler.hold(name, False)

    def update(self, random_number: int) -> None:
        """A caller changes a request."""
        names = [name for name in self.alive() if self.received[name].request.pooling is None]
        if not names:
            return
        name = names[random_number % len(names)]
        received = self.received[name]
        max_tokens = 1 + random_number % 16 if random_number % 2 else None
        priority = random_number % 3 - 1
        deadline = self.now + random_number % 80 if random_number % 7 == 0 else None
        choices = [sequence for sequence in self.scheduler.requests[name].sequences if sequence.output.end is None]
        if max_tokens is not None:
            limits = {index: max_tokens for index in range(received.request.n) if index not in received.ends}
            # Those that have more already keep them.
            limits |= {sequence.index: max(max_tokens, sequence.output.num_tokens) for sequence in choices}
            before, received.limits = received.limits, received.limits | limits
            received.most_tokens = max(received.most_tokens, *limits.values(), 0)
        try:
            assert self.scheduler.update_request(name, Change(priority, deadline, max_tokens))
        except Refused:
            assert max_tokens is not None
            received.limits = before

    def inject(self, random_number: int) -> None:
        """A caller puts tokens into an output."""
        names = self.alive()
        if not names:
            return
        name = names[random_number % len(names)]
        received = self.received[name]
        token_ids = [(random_number + at) % VOCAB_SIZE for at in range(1 + random_number % 11)]
        received.to_inject += token_ids
        choices = self.scheduler.requests[name].sequences
        try:
            assert self.scheduler.inject(name, token_ids)
        except Refused:
            del received.to_inject[-len(token_ids) :]
        else:
            received.limits[0] = choices[0].output.max_tokens if choices else received.limits.get(0, 0)

    def reconfigure(self, random_number: int) -> None:
        """The operator changes limits and policy."""
        rng = random.Random(random_number)
        self.config = replace(
            self.config,
            policy=rng.choice(tuple(Policy)),
            max_num_seqs=rng.randint(1, self.facts.max_num_seqs),
            max_num_batched_tokens=rng.randint(1, self.facts.max_num_batched_tokens),
            max_queued_requests=rng.choice((2, 100)),
            tenants={"a": TenantLimits(weight=rng.choice((0.5, 3.0)), max_live_requests=rng.choice((None, 4)))},
        )
        self.scheduler.reconfigure(self.config)

    def recover(self, blames_step: bool) -> None:
        """The worker dies; what was in flight is lost, and everybody goes on with a new one."""
        self.scheduler.recover(blames_step)
        self._new_worker()

    def schedule(self) -> bool:
        """Makes a plan; False if there is none to be made."""
        self.now += 1.0
        for name in self.alive():
            deadline = self.scheduler.requests[name].request.deadline
            if deadline is not None and deadline <= self.now:
                self.scheduler.abort(name, EngineFinishReason.DEADLINE)
        if (plan := self.scheduler.schedule()) is None:
            return False
        assert len(self.plans) < self.max_plans
        rows = self.scheduler._planner.rows
        for row in [chunk.row for chunk in plan.chunks] + [decode.row for decode in plan.decodes]:
            assert rows.current(row).state is not SequenceStatus.ENDED, "a step for a row that ended"
        for earlier in self.plans:
            named = {chunk.row for chunk in earlier.chunks} | {decode.row for decode in earlier.decodes}
            again = named.union(earlier.dropped).intersection(added.row for added in plan.added)
            assert not again, f"rows {again} begin again while a plan that names them is unanswered"
        self.plans.append(plan)
        return True

    def next_plan(self) -> StepPlan:
        assert self.schedule(), "nothing is planned"
        self.check()
        return self.plans[-1]

    def begin(self) -> list[str]:
        """Makes a plan and returns the requests that begin in it."""
        rows = self.scheduler._planner.rows
        return [rows.current(added.row).live.request.request_id for added in self.next_plan().added]

    def step(self) -> list[str]:
        """Makes a plan, answers it and returns the requests that began in it."""
        names = self.begin()
        self.answer()
        self.check()
        return names

    def learn_step_time(self) -> None:
        """Has the scheduler find out that a step takes a second, whatever is in it."""
        for number in range(3):
            self.add(make_request(f"teacher {number}", make_prompt(8), max_tokens=20))
            self.drain()

    def answer(self) -> bool:
        """Answers the oldest plan, if there is one. Every token for a choice that lives on is taken."""
        if not self.plans:
            return False
        result = self.worker.run(self.plans.popleft())
        result.computed_us = self.step_us + self.row_us * len(result.rows)
        choices = [self.scheduler._planner.rows.holder(row.row, row.epoch) for row in result.rows]
        lengths = [
            len(sequence.token_ids) - sequence.num_injected + len(row.token_ids)
            for sequence, row in zip(choices, result.rows, strict=True)
        ]
        self.scheduler.update(result)
        for sequence, length in zip(choices, lengths, strict=True):
            is_whole = len(sequence.token_ids) - sequence.num_injected == length
            assert sequence.state is SequenceStatus.ENDED or is_whole, "a token is lost"
        return True

    def die(self) -> None:
        """The worker dies; what was in flight is lost, and everything ends. A new one starts."""
        self.scheduler.abandon(EngineFinishReason.WORKER_DIED, "killed")
        assert not self.alive()
        assert not self.scheduler.requests
        self._new_worker()
        self.scheduler = Scheduler(self.facts, self.config, clock=lambda: self.now)

    def check(self) -> None:
        """What must hold after every operation."""
        planner = self.scheduler._planner
        running = list(planner.running)
        waiting = list(planner.waiting.in_order())
        pinned = [sequence for sequence in waiting if sequence.pinned]
        self.scheduler.kv.check([sequence.held_blocks for sequence in [*running, *pinned]])
        assert Counter(map(id, planner._pinned._sequences)) == Counter(map(id, pinned))
        assert not self.facts.num_state_slots or set(self.scheduler.kv.states._rows) == set(running)
        rows = planner.running
        lanes = [list(lane) for lane in planner.waiting._lanes.values()]
        for line in (*lanes, rows.prefilling, rows.decoding, rows.held):
            assert [sequence.rank for sequence in line] == sorted(sequence.rank for sequence in line)
        live = {id(sequence) for received in self.scheduler.requests.values() for sequence in received.sequences}
        assert {id(sequence) for sequence in [*running, *waiting]} <= live, "a choice that is dead waits or runs"
        new = [sequence for sequence in waiting if sequence.is_new and not sequence.live.request.is_warm_up]
        assert planner.waiting.queued.requests == sum(sequence.index == 0 for sequence in new)
        tokens = [each.num_prompt_tokens + each.live.request.num_resumed_tokens for each in new]
        assert planner.waiting.queued.tokens == sum(tokens)
        assert planner.waiting.num_pooled == sum(sequence.is_pooled for sequence in waiting)
        self.check_work(planner.waiting)
        assert set(map(id, self.scheduler.kv._pending.values())) <= set(map(id, planner.running.prefilling))
        for sequence in running:
            assert sequence.num_computed <= sequence.num_planned or sequence.state is SequenceStatus.DECODING
            confirmed = max(sequence.num_computed, sequence.num_planned)
            assert sequence.num_published * BLOCK_SIZE <= confirmed, "a block without its KV is published"
            request = sequence.live.request
            received = self.received[request.request_id]
            max_tokens = max(received.request.max_tokens, received.most_tokens, *received.limits.values())
            limit = min(sequence.num_input_tokens + max_tokens, MAX_MODEL_LEN) + 2 * len(received.limits)
            assert sequence.length_bound == len(sequence.token_ids) + sum(sequence.in_flight) <= limit
        for use in self.scheduler.tenants:
            assert use.num_rows == sum(sequence.live.tenant is use for sequence in running)
            assert use.num_waiting == sum(sequence.live.tenant is use for sequence in waiting)
            kinds = Counter(r.request.is_warm_up for r in self.scheduler.requests.values() if r.tenant is use)
            assert (use.num_live, use.warm_ups.requests) == (kinds[False], kinds[True]) != (0, 0)
            own = [(each.index == 0, num) for each, num in zip(new, tokens, strict=True) if each.live.tenant is use]
            assert planner.waiting.queued_of(use.name) == (sum(n for n, _ in own), sum(n for _, n in own))
        assert {id(sequence) for sequence in running if sequence.live.held} == set(map(id, planner.running.held))
        assert self.scheduler.num_held == sum(live.held for live in self.scheduler.requests.values())

    def check_work(self, queue: WaitingQueue) -> None:
        """What each waiting choice lacks is what the cache does not have now, and it is counted once."""
        waiting = list(queue)
        self.scheduler.kv.wanted.check(
            [
                (sequence, sequence.hashes[: sequence.num_wanted], sequence.num_missing, sequence.num_evicted)
                for sequence in waiting
            ]
        )
        for lane in (*queue._lanes.values(), *([queue._due] if queue._due else [])):
            choices = list(lane)
            assert lane.work == total_work(sequence.work for sequence in choices)
            for number in (0, 1, len(choices) // 2, len(choices)):
                assert lane.work_of_first(number) == total_work(sequence.work for sequence in choices[:number])
            assert [lane.num_before(lane._key(sequence)) for sequence in choices] == list(range(len(choices)))
        for sequence in waiting:
            assert 0 < sequence.work.tokens <= len(sequence.token_ids) + BLOCK_SIZE * sequence.live.request.n
            work = queue._work(sequence)
            if sequence.work.length == work.length:  # a plan in flight may still bring a preempted one a token
                assert sequence.work == work, "a choice lacks something else now, and its work is old"

    def drain(self) -> None:
        """Runs until everything is finished, and checks every end."""
        for name in self.alive():
            self.scheduler.hold(name, False)
        for _ in range(5000):
            if not self.alive():
                break
            planned = self.schedule()
            self.check()
            progress = self.answer() or planned or not self.alive()
            assert progress, "requests are alive, but nothing is planned or in flight"
            self.check()
        assert not self.alive(), "no end in sight"
        while self.answer():
            pass
        self.check()
        for received in self.received.values():
            received.check_end()
        pool = self.scheduler.kv.pool
        assert pool.num_free == pool.num_blocks, "blocks are lost"
        assert not self.scheduler.kv._pending
        rows = self.scheduler._planner.rows
        assert rows.num_free + len(rows._dropped) == len(rows._holders), "row numbers are lost"


@pytest.fixture(scope="session")
def world_type() -> type[World]:
    return World


@pytest.fixture(scope="session")
def new_request():
    return make_request


@pytest.fixture(scope="session")
def received_type() -> type[Received]:
    return Received


@pytest.fixture
async def executor() -> FakeExecutor:
    return FakeExecutor(num_blocks=400, vocab_size=ENGINE_VOCAB_SIZE)


@pytest.fixture
def submit():
    """Submits a request to an engine; blocks of 16, as the fake executor has them."""

    def submit(engine, name, length=20, first=0, prompt=None, **fields):
        prompt = prompt or [(first + position) % ENGINE_VOCAB_SIZE for position in range(length)]
        request = make_request(name, prompt, block_size=16, **{"arrival": time.monotonic()} | fields)
        received = Received(request, max_model_len=4096, vocab_size=ENGINE_VOCAB_SIZE)
        engine.submit(request)
        return received

    return submit
