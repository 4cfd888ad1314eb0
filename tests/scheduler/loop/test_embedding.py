"""Requests whose prompts are embedded: rows without output, in the terms of plans, queues, tenants and predictions."""

from dataclasses import replace

import pytest

from penstock.kv.block_hash import hash_blocks, tenant_salt
from penstock.scheduler.admission import control as admission
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import AddedRow, Chunk, Pooling, SamplingParams, StepPlan
from penstock.scheduler.policy import Policy
from penstock.scheduler.request import EngineFinishReason, Prompt, RefusalKind, Refused
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.scheduler.testing.fake_states import BrokenPlan
from penstock.scheduler.testing.fake_worker import CheckedSlots, FakeWorker
from penstock.scheduler.timing.queue_time import QueueLoad, QueueTimeModel
from penstock.scheduler.timing.queued_work import sequence_work, total_work
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork

BLOCK_SIZE = 4


@pytest.fixture
def embed(new_request):
    """A request for the vectors of some prompts."""

    def make(name, prompts, pooling=Pooling.MEAN, tenant="default", **fields):
        salt = tenant_salt("fake", tenant)
        more = [Prompt(prompt, hash_blocks(prompt, BLOCK_SIZE, salt)) for prompt in prompts[1:]]
        return new_request(
            name, prompts[0], tenant, pooling=pooling, more_prompts=more, n=len(prompts), max_tokens=0, **fields
        )

    return make


def test_prompts_that_fit_are_computed_in_one_step(world_type, embed, new_request):
    """Beside a row that decodes; and none of them is ever continued."""
    world = world_type(64, SchedulerConfig())
    world.add(new_request("text", [1] * 5, max_tokens=9))
    world.schedule()
    received = world.add(embed("vectors", [[n % 7] * (n + 1) for n in range(6)]))
    world.schedule()
    plan = world.plans[-1]
    assert len(plan.chunks) == 6
    assert len(plan.decodes) == 1
    world.answer()
    world.answer()
    assert received.finished is not None
    assert received.finished.reason is EngineFinishReason.STOP
    assert received.finished.timings.first_token_us == 0
    world.drain()


def test_blocks_are_free_with_the_answer(world_type, embed):
    world = world_type(64, SchedulerConfig(enable_prefix_caching=False))
    world.add(embed("vectors", [[1] * 20, [2] * 20]))
    world.schedule()
    assert world.scheduler.kv.pool.num_free == 64 - 10
    assert not world.schedule()
    world.answer()
    assert world.scheduler.kv.pool.num_free == 64
    world.drain()


@pytest.mark.parametrize(("pooling", "cached"), [(Pooling.LAST, 16), (Pooling.MEAN, 0), (Pooling.CLS, 0)])
def test_only_the_last_token_needs_no_states_of_others(world_type, embed, pooling, cached):
    world = world_type(64, SchedulerConfig())
    for name in ("first", "second"):
        received = world.add(embed(name, [[3] * 20], pooling))
        world.drain()
    assert received.accepted.cached_tokens == received.finished.usage.cached_tokens == cached


def test_the_worker_finds_a_row_that_begins_too_late():
    """The fake one: a plan that reads the cache where every state is wanted is broken."""
    facts = FakeExecutor(block_size=BLOCK_SIZE).facts
    worker = FakeWorker(facts, lambda history, sampling: 0, CheckedSlots(facts.num_blocks, BLOCK_SIZE))
    worker.run(StepPlan(0, [], [AddedRow(0, 1, [5] * 8, 8, 0, [0, 1], SamplingParams())], [], [Chunk(0, 0, 8)], []))
    added = AddedRow(1, 1, [5] * 8, 8, 4, [0, 2], SamplingParams(), Pooling.MEAN)
    with pytest.raises(BrokenPlan, match="hidden states"):
        worker.run(StepPlan(1, [], [added], [], [Chunk(1, 4, 8)], []))


def test_it_waits_as_one_request_with_all_its_tokens(world_type, embed, new_request):
    world = world_type(64, SchedulerConfig(max_num_seqs=2, max_queued_requests=2))
    world.add(embed("vectors", [[1] * 10] * 8))
    waiting = world.scheduler._planner.waiting
    assert waiting.queued == (1, 80)
    world.schedule()  # two of them begin
    assert waiting.queued == (0, 60)
    assert world.add(new_request("a", [1] * 5)) is not None
    assert world.add(new_request("b", [1] * 5)) is not None
    assert world.add(new_request("c", [1] * 5)) is None
    world.drain()


def test_tenants_are_charged_for_its_tokens(world_type, embed):
    world = world_type(64, SchedulerConfig(policy=Policy.FAIR))
    world.add(embed("vectors", [[1] * 10] * 4, tenant="a"))
    use = world.scheduler.tenants.busiest(1)[0]
    world.schedule()
    assert (use.name, use.served) == ("a", 40)
    world.drain()
    assert use.served == 40


def test_vectors_that_came_stay_when_the_worker_dies(world_type, embed):
    world = world_type(64, SchedulerConfig(max_num_seqs=2))
    received = world.add(embed("vectors", [[n] * 8 for n in range(6)]))
    world.schedule()
    world.answer()
    assert set(received.vectors) == {0, 1}
    world.schedule()
    world.recover(blames_step=False)
    world.drain()
    assert set(received.vectors) == set(range(6))
    assert received.finished.timings.restarts == 1


def test_a_request_is_ranked_once_however_many_prompts_it_has(world_type, embed, monkeypatch):
    """Under this policy a rank takes a prediction, and there may be thousands of prompts."""
    config = SchedulerConfig(policy=Policy.DEADLINE)
    world = world_type(64, config)
    asked = []
    monkeypatch.setattr(world.scheduler.predictor, "service_s", lambda request, cached=0: asked.append(request))
    world.add(embed("vectors", [[1] * 4] * 9))
    assert len(asked) == 1
    world.scheduler.reconfigure(replace(config, max_num_seqs=8))
    assert len(asked) == 2
    world.check()
    world.drain()


def test_lateness_is_checked_once_for_all_prompts_of_a_request(world_type, embed):
    world = world_type(64, SchedulerConfig())
    asked = []

    def is_late(live):
        asked.append(live)
        return True

    world.scheduler._planner.prefill_adder._is_late = is_late
    late = world.add(embed("late", [[1] * 4] * 9, deadline=1000.0))
    assert not world.schedule()
    assert late.finished.reason is EngineFinishReason.DEADLINE
    assert len(asked) == 1
    world.drain()


def test_a_prediction_counts_each_prompt_by_itself():
    """A step takes 10 ms, and each pair of tokens that see each other 1 us."""
    model = StepTimeModel()
    for number in range(400):
        tokens, context = (0, 100, 500)[number % 3], 50 * (number % 7)
        work = StepWork(tokens, tokens * context, 0, 0, min(tokens, 1), context if tokens else 0)
        model.observe(work, 0.010 + 1e-6 * tokens * context)
    forecast = QueueTimeModel(model, 1000, None)
    load = QueueLoad(0.0, 0, 0, (), 200, 200, 1000, 1000, 16)
    many_prompts = total_work([sequence_work(40, 40, 16, is_pooled=True)] * 100)
    one_prompt = sequence_work(4000, 4000, 16, is_pooled=True)
    many, one = (forecast.predict(load, work, 0) for work in (many_prompts, one_prompt))
    assert many is not None
    assert one is not None
    assert many.total_s == many.ttft_s == pytest.approx(4 * 0.010 + 1e-6 * 4000 * 20, rel=0.1)
    assert one.total_s > 10 * many.total_s
    assert forecast.alone_s(many_prompts, 0) == pytest.approx(many.ttft_s, rel=0.01)
    assert forecast.service_s(0, 0, many_prompts, 0) == pytest.approx(many.ttft_s, rel=0.01)


def test_those_ahead_have_their_rows_only_until_their_prompts_are_computed(world_type, embed, new_request):
    """Though there are more of them than rows, whoever comes behind them waits for their tokens alone."""
    world = world_type(600, SchedulerConfig(max_num_seqs=4))
    for name in range(40):  # so that outputs are known to be long
        world.add(new_request(f"text {name}", [name % 7] * 8, max_tokens=30))
        world.drain()
    world.add(embed("vectors", [[n % 7] * 4 for n in range(64)]))
    behind = world.add(new_request("behind", [1] * 8, max_tokens=30))
    asked_at = world.now
    while behind.finished is None and 0 not in behind.token_ids:
        world.schedule()
        world.answer()
    assert behind.accepted.queue_position == 64
    assert behind.accepted.predicted_ttft_s < 3 * (world.now - asked_at)
    world.drain()


def test_so_many_prompts_wait_and_no_more(world_type, embed, monkeypatch):
    monkeypatch.setattr(admission, "MAX_QUEUED_POOLED", 5)
    world = world_type(64, SchedulerConfig())
    world.add(embed("first", [[1], [2], [3]]))
    with pytest.raises(Refused) as refused:
        world.scheduler.add_request(embed("too many", [[1], [2], [3]]))
    assert refused.value.kind is RefusalKind.QUEUE_FULL
    assert world.add(embed("as many as there is room for", [[1], [2]])) is not None
    world.drain()
    assert world.add(embed("many at once", [[n] for n in range(6)])) is not None
    world.drain()
