"""The fit of costs to a step log."""

from statistics import median

import msgspec
import pytest
from simulations.step_logs import COSTS, header, random_steps

from penstock.scheduler.simulation.costs import StepCosts
from penstock.scheduler.simulation.fit import fit_costs
from penstock.scheduler.simulation.step_log import StepLog, StepLogError


def errors(costs, steps):
    return [abs(costs.seconds(step.work) / COSTS.seconds(step.work) - 1) for step in steps]


def test_costs_that_explain_all_steps_are_found():
    fit = fit_costs(StepLog(header(), random_steps()))
    assert max(errors(fit.costs.step, random_steps(seed=1))) < 0.01
    assert fit.median_error < 0.001
    assert fit.num_steps == 400
    assert fit.most_rows == 32


@pytest.mark.parametrize("rows", [4, 16])
def test_rows_that_cost_more_from_some_number_on(rows):
    """A step computes for longer than it reads, as on a CPU; the log has few such steps."""
    bent = COSTS._replace(bent_decodes=8 * COSTS.decodes, bend=rows)
    steps = [step for step in random_steps(2000, costs=bent, noise=0.05) if step.decodes <= rows or step.step % 8 == 0]
    costs = fit_costs(StepLog(header(), steps)).costs.step
    assert costs.bend == rows
    assert max(abs(costs.seconds(step.work) / step.seconds - 1) for step in random_steps(seed=1, costs=bent)) < 0.1


def test_there_is_no_bend_where_there_is_none():
    assert fit_costs(StepLog(header(), random_steps(1000, noise=0.2))).costs.step.bend == 0


def test_noise_hardly_matters_and_is_kept():
    fit = fit_costs(StepLog(header(), random_steps(1000, noise=0.2)))
    assert median(errors(fit.costs.step, random_steps(seed=1))) < 0.08
    for noise in (fit.costs.noise.decoding, fit.costs.noise.chunked):
        factors = [measured.factor for measured in noise]
        assert sum(factors) / len(factors) == pytest.approx(1.0, abs=0.1)
        assert max(factors) > 1.3


def replayed(noise, has_chunks):
    """A thousand factors, over the time for which there are some."""
    return sorted(noise.factor(noise.seconds(has_chunks) * part / 1000, has_chunks) for part in range(1000))


def test_pauses_do_not_count_as_time_of_the_noise():
    """The step after a pause is slow: caches are cold."""
    steps = random_steps(400)
    for place in range(0, 400, 20):
        steps[place] = msgspec.structs.replace(steps[place], seconds=2.5 * steps[place].seconds)
        for number, step in enumerate(steps[place:], place):
            steps[number] = msgspec.structs.replace(step, answered_s=step.answered_s + 1.0)
    noise = fit_costs(StepLog(header(), steps)).costs.noise
    both = noise.seconds(False) + noise.seconds(True)
    assert both == pytest.approx(sum(step.seconds for step in steps))
    for has_chunks in (False, True):
        assert replayed(noise, has_chunks)[700] == pytest.approx(1.0, abs=0.05)


def test_steps_with_prompts_do_not_count_as_time_of_the_noise_of_others():
    """The step after one with a prompt is slow, for the same reason, and much shorter."""
    steps = random_steps(1000)
    slow = [place for place in range(1, 1000) if steps[place - 1].chunks and not steps[place].chunks]
    for place in slow:
        steps[place] = msgspec.structs.replace(steps[place], seconds=2.0 * steps[place].seconds)
    decoding = [step.seconds for step in steps if not step.chunks]
    share = sum(steps[place].seconds for place in slow) / sum(decoding)
    factors = replayed(fit_costs(StepLog(header(), steps)).costs.noise, False)
    assert sum(factor > 1.5 for factor in factors) / 1000 == pytest.approx(share, abs=0.05)


def test_a_few_steps_that_took_far_too_long_hardly_matter():
    steps = random_steps(400)
    for place in range(0, 400, 50):
        steps[place] = msgspec.structs.replace(steps[place], seconds=1.0)
    fit = fit_costs(StepLog(header(), steps))
    assert median(errors(fit.costs.step, random_steps(seed=1))) < 0.1


def test_no_cost_is_negative():
    steps = [msgspec.structs.replace(step, seconds=0.05 / (1 + step.decodes)) for step in random_steps(200)]
    fit = fit_costs(StepLog(header(), steps))
    assert min(fit.costs.step) >= 0
    assert fit.costs.step.constant > 0


def test_the_time_outside_of_the_worker():
    service = fit_costs(StepLog(header(), random_steps())).costs.service
    assert service.submit_s + service.answer_s == pytest.approx(0.002, abs=1e-5)
    # Plans take eight times as long on their way as on a machine with free cores, and so do requests.
    assert service.request_s + service.message_s == pytest.approx(0.008, abs=1e-4)
    assert service.handling_s(16) == pytest.approx(1e-4, abs=1e-5)


def test_drafts_are_counted_if_they_were_frequent():
    steps = [
        msgspec.structs.replace(step, drafts=2 * step.decodes, accepted=step.decodes) for step in random_steps(100)
    ]
    first = msgspec.structs.replace(header(), max_drafts=5)
    rates = fit_costs(StepLog(first, steps)).costs.drafts
    assert (rates.per_row, rates.accepted, rates.most) == (2.0, 0.5, 5)
    assert fit_costs(StepLog(first, random_steps())).costs.drafts.most == 0


def test_the_time_of_copies_is_not_that_of_steps():
    steps = [msgspec.structs.replace(step, copied_blocks=10, seconds=step.seconds + 1e-3) for step in random_steps()]
    first = header(copy_us_per_block=100)
    fit = fit_costs(StepLog(first, steps))
    assert fit.costs.copy_s == pytest.approx(1e-4)
    assert median(errors(fit.costs.step, random_steps(seed=1))) < 0.01


@pytest.mark.parametrize(
    ("steps", "problem"),
    [
        ([], "has 0 steps, and a fit needs 32; log a longer and more varied load"),
        (random_steps(31), "has 31 steps, and a fit needs 32"),
        (random_steps(5) * 10, "has 5 different steps, and a fit needs 8"),
        ([step for step in random_steps(200) if not step.chunks], "has no step with a prompt"),
        (
            [msgspec.structs.replace(step, decodes=0, decode_kv=0) for step in random_steps(200)],
            "has no step with decoding rows",
        ),
        ([msgspec.structs.replace(step, seconds=0.0) for step in random_steps(200)], "has 0 steps"),
    ],
)
def test_too_few_or_too_similar_steps_are_refused(steps, problem):
    with pytest.raises(StepLogError, match=problem):
        fit_costs(StepLog(header(), steps))


def test_costs_count_each_unit_of_work():
    work = random_steps(1, seed=3)[0].work
    assert StepCosts(constant=1.0).seconds(work) == 1.0
    assert StepCosts(decodes=1.0, drafts=2.0).seconds(work, 3) == work.decodes + 6.0
    assert StepCosts(bent_decodes=0.5, bend=10).seconds(work._replace(decodes=14)) == 2.0
    assert StepCosts(bent_decodes=0.5, bend=10).seconds(work._replace(decodes=6)) == 0.0
