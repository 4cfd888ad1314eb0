"""What the step model learns, from steps whose times are known."""

import random
from statistics import median

import pytest
from simulations.step_logs import COSTS, random_steps

from penstock.scheduler.testing.simulation import cpu_step_s
from penstock.scheduler.timing.step_time import COMFORT_S, MIN_CHUNK, MIN_SHARE, StepTimeModel, StepWork
from penstock.scheduler.worker_config import MeasuredStep


def some_work(rng):
    decodes = rng.randrange(33)
    chunk, context = rng.choice((0, 0, 16, 200, 1500)), rng.randrange(4000)
    decode_kv = decodes * rng.randrange(50, 1000)
    if not chunk:
        return StepWork(0, 0, max(1, decodes), max(50, decode_kv))
    return StepWork(chunk, chunk * (context + chunk // 2), decodes, decode_kv, 1, context + chunk)


def taught(seed=0, num_steps=60, noise=0.1, first_s=None):
    rng = random.Random(seed)
    model = StepTimeModel()
    if first_s is not None:
        model.observe(StepWork(16, 128, 0, 0, 1, 16), first_s)
    for _ in range(num_steps):
        work = some_work(rng)
        model.observe(work, cpu_step_s(work) * rng.lognormvariate(0, noise))
    return model


def predict(model: StepTimeModel, work: StepWork) -> float:
    seconds = model.predict(work)
    assert seconds is not None
    return seconds


def error(model, work):
    return abs(predict(model, work) / cpu_step_s(work) - 1)


def median_error(model, seed=99):
    rng = random.Random(seed)
    return sorted(error(model, some_work(rng)) for _ in range(101))[50]


def test_copies_come_on_top_of_what_is_computed():
    model, twin = StepTimeModel(copy_s=1e-3), StepTimeModel()
    for tokens in range(16, 1600, 16):
        work = StepWork(tokens, tokens * tokens / 2, 0, 0, 1, tokens)
        twin.observe(work, cpu_step_s(work))
        copied = min(tokens // 16, 1000 * cpu_step_s(work))  # half of the step at most
        model.observe(work._replace(copied_blocks=copied), cpu_step_s(work) + copied * 1e-3)
    work = StepWork(512, 512 * 256, 0, 0, 1, 512)
    assert predict(model, work) == pytest.approx(predict(twin, work))
    assert predict(model, work._replace(copied_blocks=20)) == pytest.approx(predict(twin, work) + 0.02)


def test_a_step_is_never_attributed_to_copies_only():
    model = StepTimeModel(copy_s=1.0)
    for _ in range(50):
        model.observe(StepWork(0, 0, 8, 800, copied_blocks=10), 0.1)
    assert predict(model, StepWork(0, 0, 8, 800)) == pytest.approx(0.05, rel=0.1)


def test_no_prediction_is_made_from_too_little_data():
    model = StepTimeModel()
    assert model.predict(StepWork(0, 0, 1, 10)) is None
    assert model.max_prefill(4, 100, 0, 0.01, at_most=512) == 512


@pytest.mark.parametrize("num_decodes", [1, 4, 16])
@pytest.mark.parametrize("context", [0, 500])
def test_what_a_worker_measured_at_its_start_is_enough_to_size_chunks(num_decodes, context):
    """As of a model of 1.2 GB on two cores."""

    def step_s(work: StepWork) -> float:
        return 0.045 + 6e-4 * work.prefill_tokens + 1e-3 * work.decodes

    model = StepTimeModel()
    for start, end, decodes in ((0, 128, 0), (128, 144, 0), (0, 0, 1), (0, 0, 16)):
        work = StepWork.measured(MeasuredStep(start, end, decodes, 0))
        model.observe(work, step_s(work))
    tokens = model.max_prefill(num_decodes, 10 * num_decodes, context, None, at_most=2048)
    chunk = StepWork(tokens, tokens * (context + tokens // 2), num_decodes, 10 * num_decodes, 1, context + tokens)
    target_s = max(COMFORT_S, MIN_SHARE * step_s(StepWork(0, 0, num_decodes, 10 * num_decodes)))
    assert step_s(chunk) == pytest.approx(target_s, rel=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_few_dozen_steps_are_enough(seed):
    assert median_error(taught(seed)) < 0.15


def test_a_first_step_that_is_far_too_slow_is_forgotten():
    assert median_error(taught(first_s=20.0)) < 0.15


def test_a_slow_step_now_and_then_changes_little():
    model = taught()
    work = StepWork(0, 0, 16, 4000)
    for number in range(300):
        model.observe(work, cpu_step_s(work) * (30 if number % 50 == 7 else 1))
    assert error(model, work) < 0.15


def test_decoding_for_long_does_not_wipe_out_what_chunks_cost():
    model = taught()
    rng = random.Random(1)
    for step in range(20_000):
        work = StepWork(0, 0, 16, 16 * (100 + step % 800))
        model.observe(work, cpu_step_s(work) * rng.lognormvariate(0, 0.1))
    assert error(model, StepWork(1500, 1500 * 2000, 16, 4000, 1, 2750)) < 0.2


def test_a_machine_that_is_suddenly_slower_is_noticed_at_once():
    model = taught()
    rng = random.Random(2)
    for _ in range(24):
        work = some_work(rng)
        model.observe(work, 2.5 * cpu_step_s(work))
    work = StepWork(200, 200 * 1000, 16, 4000, 1, 1100)
    assert model.predict(work) == pytest.approx(2.5 * cpu_step_s(work), rel=0.25)


def test_no_coefficient_is_negative():
    """A step with more work never takes less time, however odd what was seen."""
    rng = random.Random(3)
    model = StepTimeModel()
    for _ in range(200):
        work = some_work(rng)
        model.observe(work, rng.uniform(0.001, 0.1))
        smaller = StepWork(*(value // 2 for value in work))
        assert model.predict(work) is None or predict(model, smaller) <= predict(model, work)


@pytest.mark.parametrize("context", [0, 1000, 7000])
@pytest.mark.parametrize("target_s", [0.01, 0.02, 0.1])
def test_the_largest_chunk_that_keeps_the_target(context, target_s):
    model = taught(num_steps=400, noise=0.0)
    tokens = model.max_prefill(16, 4000, context, target_s, at_most=2048)
    assert MIN_CHUNK <= tokens <= 2048

    def step_s(num: int) -> float:
        return predict(model, StepWork(num, num * (context + num / 2), 16, 4000, 1, context + num))

    assert tokens == MIN_CHUNK or step_s(tokens) <= target_s * 1.001
    assert tokens == 2048 or step_s(tokens + 1) >= target_s * 0.999


@pytest.mark.parametrize(("decodes", "decode_kv"), [(1, 100), (16, 4000)])
def test_without_a_target_a_step_is_comfortable(decodes, decode_kv):
    model = taught()
    tokens = model.max_prefill(decodes, decode_kv, 0, None, at_most=1 << 20)
    assert tokens == model.max_prefill(decodes, decode_kv, 0, COMFORT_S, at_most=1 << 20)


def test_without_a_target_a_step_whose_decodes_are_slow_may_take_longer():
    model = taught()
    alone = predict(model, StepWork(0, 0, 2000, 4_000_000))
    assert alone > COMFORT_S
    tokens = model.max_prefill(2000, 4_000_000, 0, None, at_most=1 << 20)
    assert tokens == model.max_prefill(2000, 4_000_000, 0, MIN_SHARE * alone, at_most=1 << 20) > MIN_CHUNK


def test_a_chunk_is_never_more_than_it_may_be():
    assert taught().max_prefill(16, 4000, 0, 1e-6, at_most=3) == 3


def test_slowdown_is_what_chunks_add_to_steps_with_decoding_rows():
    model = taught(noise=0.0)
    alone, beside = StepWork(0, 0, 16, 4000), StepWork(100, 100 * 50, 16, 4000, 1, 100)
    for _ in range(600):
        model.observe(alone, cpu_step_s(alone))
    assert model.slowdown == pytest.approx(1.0, abs=0.05)
    for _ in range(600):
        model.observe(beside, cpu_step_s(beside))
    assert model.slowdown == pytest.approx(cpu_step_s(beside) / cpu_step_s(alone), rel=0.1)


@pytest.mark.parametrize(("bend", "most"), [(4, 0.02), (10, 0.05), (16, 0.02)])
def test_rows_that_cost_more_from_some_number_on(bend, most):
    """As on a CPU: up to there, a step takes the time to read the weights. The steps of a log, in its order."""
    costs = COSTS._replace(bent_decodes=8 * COSTS.decodes, bend=bend)
    model, found = StepTimeModel(), []
    for step in random_steps(600, costs=costs, noise=0.05, most_rows=48):
        predicted = model.predict(step.work)
        if predicted is not None and step.step > 300 and not step.chunks:
            found.append(abs(predicted / costs.seconds(step.work) - 1))
        model.observe(step.work, step.seconds)
    assert median(found) < most  # without bends: 0.03, 0.09 and 0.15


def test_rows_beyond_a_bend_share_what_they_cost():
    costs = COSTS._replace(bent_decodes=8 * COSTS.decodes, bend=4)
    model = StepTimeModel()
    for step in random_steps(600, costs=costs):
        model.observe(step.work, step.seconds)
    few, many = (model.decode_costs(rows, 200 * rows, costs.constant) for rows in (4, 32))
    assert many.row_s > 3 * few.row_s
    whole_s = predict(model, StepWork(0, 0, 32, 6400))
    assert 32 * many.row_s + 6400 * many.position_s == pytest.approx(whole_s - costs.constant)
