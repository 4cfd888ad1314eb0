"""Predicted outputs: where the output is in the prediction, how long drafts get, and that nothing changes."""

import asyncio
import os
import random
import signal

import pytest
import torch
from engines import SteadyCost

from penstock.models.batch.rows import RowTable
from penstock.models.executor.process import WorkerProcess
from penstock.models.speculative.controller import SpeculationController
from penstock.models.speculative.cost_model import StepCost
from penstock.models.speculative.drafter import NoDrafter, Wanted
from penstock.models.speculative.prediction import MAX_REPLACED, NEAR, WINDOW, Predictions
from penstock.models.worker.speculation import make_drafter
from penstock.scheduler.plan import AddedRow, SamplingParams, StepPlan
from penstock.scheduler.worker_config import MAX_PREDICTED_DRAFTS, DraftMethod, SpeculationConfig

PROMPT = [7] * 5
TEXT = [3 * at % 101 + 200 * (at // 101) for at in range(160)]
"""No token occurs twice."""
OTHERS = range(5000, 5100)
GREEDY = SamplingParams(temperature=0.0)


# The place ----------------------------------------------------------------------------------------------------------


def row_of(prediction, output=()):
    table = RowTable(num_blocks=1, block_size=1 << 20, hidden_size=8)
    history = [*PROMPT, *output]
    added = AddedRow(
        0, 0, history, len(PROMPT), 0, [0], GREEDY, max_drafts=MAX_PREDICTED_DRAFTS, prediction=list(prediction)
    )
    table.apply(StepPlan(0, [], [added], [], [], []))
    return table[0]


def drafts_of(predictions, row, most=4):
    proposal = predictions.propose([Wanted(row, most)]).get(row)
    if proposal is None:
        return None
    assert proposal.is_predicted
    assert len(proposal.confidences) == len(proposal.token_ids)
    assert all(0.0 < sure < 1.0 for sure in proposal.confidences)
    return proposal.token_ids


def after(output, prediction=TEXT, most=4):
    """Returns the drafts after an output whose tokens come one by one, each with a proposal."""
    predictions, row = Predictions(), row_of(prediction)
    for token in output:
        row.append(token)
        drafts = drafts_of(predictions, row, most)
    # The same if the row restarts, as after preemption, unless the last tokens are ambiguous.
    assert drafts_of(Predictions(), row_of(prediction, output), most) in (drafts, None)
    return drafts


def test_drafts_follow_the_output():
    predictions, row = Predictions(), row_of(TEXT)
    assert drafts_of(predictions, row) == TEXT[:4]
    for at, token in enumerate(TEXT):
        row.append(token)
        assert (drafts_of(predictions, row) or []) == TEXT[at + 1 : at + 5]
    row.append(5000)
    assert drafts_of(predictions, row) is None


@pytest.mark.parametrize("number", [1, 2, 3, 10])
@pytest.mark.parametrize("at", [0, 1, 2, 30])
def test_the_place_is_found_after_replaced_tokens(at, number):
    replaced = [*TEXT[:at], *OTHERS[:number]]
    guessed = after(replaced) if replaced else TEXT[:4]
    assert guessed == (TEXT[at + number :][:4] if number <= MAX_REPLACED else None)
    assert after([*replaced, *TEXT[at + number :][:2]]) == TEXT[at + number + 2 :][:4]


@pytest.mark.parametrize("number", [1, 2, 5, WINDOW, 40])
def test_the_place_is_found_after_tokens_that_are_left_out(number):
    """The place is found at once if few tokens are replaced."""
    begun = [*TEXT[:20], *TEXT[20 + number :][:2]]
    assert after(begun) == TEXT[22 + number :][:4]
    if number < WINDOW:
        assert after(begun[:-1]) == TEXT[21 + number :][:4]


@pytest.mark.parametrize("number", [1, 2, 5, 100])
def test_the_place_is_found_after_tokens_that_are_added(number):
    """Tokens may be added, including injected ones."""
    added = [*TEXT[:20], *OTHERS[:number]]
    assert after([*added, TEXT[20]]) == TEXT[21:25]
    assert after([*added, *TEXT[20:22]]) == TEXT[22:26]


def test_the_nearest_of_equal_places_counts():
    prediction = [*TEXT[:30], 1, 2, *TEXT[30:60], 1, 2, *TEXT[60:90], 1, 2, *TEXT[90:]]
    assert after([*prediction[:28], 6000, 6001, 1, 2], prediction) == TEXT[30:34]
    assert after([*prediction[:60], 6000, 6001, 1, 2], prediction) == TEXT[60:64]
    far = [*TEXT[:20], *TEXT[20 + NEAR + 50 :][:2]]
    row = row_of(TEXT, far)
    near, sure = (Predictions().propose([Wanted(one, 2)])[one] for one in (row, row_of(TEXT, TEXT[:2])))
    assert near.token_ids == TEXT[22 + NEAR + 50 :][:2]
    assert near.confidences[0] < sure.confidences[0]


def test_a_prediction_that_has_nothing_of_the_output_is_soon_of_no_use():
    predictions, row = Predictions(), row_of(TEXT)
    proposed = []
    for token in OTHERS:
        row.append(token)
        proposed.append(drafts_of(predictions, row))
    assert None not in proposed[:MAX_REPLACED]
    assert set(map(str, proposed[MAX_REPLACED:])) == {"None"}


# How much is drafted ------------------------------------------------------------------------------------------------


def real(n):
    """A device on which reading the weights takes a while, and which can compute some tokens meanwhile."""
    return 0.05 + 0.0005 * n + 0.002 * max(0, n - 40)


@pytest.fixture
def predicting(simulation, player, asked):
    """Runs rows on a device with predictions and without a drafter; returns their speed and results."""

    def run(num_tokens, edit, num_rows=1):
        world = simulation(real, lambda row, at: False)
        expected = [[(at * 7 + row * 13) % 97 for at in range(1, num_tokens + 1)] for row in range(num_rows)]
        controller = SpeculationController(NoDrafter(), 0, StepCost(2048), runs_ahead=False, clock=world.clock.seconds)
        controller.learn_steps({1: real(1), 16: real(16)})
        rows = [
            asked([1], max_drafts=MAX_PREDICTED_DRAFTS, prediction=edit(row, output))
            for row, output in enumerate(expected)
        ]
        began = world.clock.now
        told = player(world.device, controller, world.clock.nanoseconds).run(rows, num_tokens)
        assert [one.token_ids for one in told] == expected
        return num_tokens * real(num_rows) / (world.clock.now - began), told

    return run


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_right_prediction_is_drafted_in_long_parts(predicting, num_rows):
    speed, told = predicting(400, lambda row, output: output, num_rows)
    assert speed > (10 if num_rows == 1 else 4)
    assert all(one.num_accepted > 0.9 * 400 * (num_rows == 1) for one in told)
    assert all(one.num_drafted == one.num_accepted for one in told)


def test_a_prediction_that_is_right_by_95_percent_gains_much(predicting):
    rng = random.Random(1)
    speed, _ = predicting(400, lambda row, output: [token if rng.random() < 0.95 else 98 for token in output])
    assert speed > 5


@pytest.mark.parametrize("num_rows", [1, 4])
def test_a_wrong_prediction_is_soon_left_alone(predicting, num_rows):
    """Tests one with none of the output's tokens, and one with all of them in another order."""
    rng = random.Random(2)
    for edit in (lambda row, output: [98] * 400, lambda row, output: rng.sample(output, len(output))):
        speed, told = predicting(400, edit, num_rows)
        assert speed > 0.97
        assert all(one.num_drafted - one.num_accepted < 100 for one in told)


def test_rows_without_a_prediction_are_not_drafted_for(predicting):
    _, told = predicting(60, lambda row, output: output if row else [], num_rows=2)
    assert told[0].num_drafted == 0 < told[1].num_drafted


# Nothing changes ----------------------------------------------------------------------------------------------------


def edited(output):
    """Returns an output in which tokens are replaced, left out and added."""
    return [*output[:6], 99, *output[7:12], *output[14:20], 98, 97, *output[20:]]


async def predicted(model, engine, prompts, num_tokens=40, **more):
    """Generates for all prompts with predictions of many kinds. Each output must be that of transformers."""
    expected = [greedy(model, prompt, num_tokens) for prompt in prompts]
    kinds = (edited, lambda output: output, lambda output: output[::-1], lambda output: output[:9])
    answers = [
        engine.submit(
            prompt, GREEDY, num_tokens, max_drafts=MAX_PREDICTED_DRAFTS, prediction=kinds[at % 4](output), **more
        )
        for at, (prompt, output) in enumerate(zip(prompts, expected, strict=True))
    ]
    await engine.finish(answers)
    assert [answer.token_ids for answer in answers] == expected
    return answers


def greedy(model, prompt, num_tokens):
    """By transformers."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        whole = model.module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
    return whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("backend", ["reference", "cpu"])
async def test_the_output_is_that_of_transformers(
    request, tiny_model, worker_config, in_process_executor, start_engine, prompts, backend
):
    """Also holds with chunked prefill, and if rows are preempted."""
    if backend == "cpu":
        request.getfixturevalue("cpu_library")
    model = tiny_model("llama")
    config = worker_config(model.path, num_blocks=26, max_model_len=400, backend=backend)
    engine = await start_engine(in_process_executor(config, is_eager=True), max_num_batched_tokens=100)
    answers = await predicted(model, engine, prompts)
    assert engine.stats.preemptions > 0
    speculation = [answer.finished.speculation for answer in answers]
    assert [one is not None and one.accepted_predicted >= 15 for one in speculation] == [True, True, False, False] * 2
    assert all(one is None or one.predicted == one.drafted for one in speculation)


@pytest.mark.parametrize("method", ["ngram", "draft_model"])
async def test_the_service_has_another_drafter_too(
    tiny_model, worker_config, in_process_executor, start_engine, prompts, method, tmp_path
):
    """The drafter takes over where the prediction does not match."""
    model = tiny_model("llama")
    path = str(model.path) if method == "draft_model" else None
    config = worker_config(model.path, speculation=SpeculationConfig(DraftMethod(method), 4, path))
    executor = in_process_executor(config)
    executor._drafting = lambda config, backend: SpeculationController(
        make_drafter(config, backend), 4, SteadyCost(), runs_ahead=False, clock=lambda: 0.0
    )
    engine = await start_engine(executor)
    counts = engine.engine.counters.speculation
    while counts.drafted == counts.predicted:  # what pays depends on the rows that share a step, and so on time
        answers = await predicted(model, engine, prompts)
    assert counts.predicted > counts.accepted_predicted > 80
    assert len(counts.drafted_at) > 4
    right = answers[1].finished.speculation
    assert right.accepted_predicted > 20


async def test_sampled_choices_are_those_without_a_prediction(
    tiny_model, worker_config, in_process_executor, start_engine, prompts
):
    """Tests each of n choices, with log-probabilities, penalties and stop tokens."""
    model = tiny_model("llama")
    sampling = SamplingParams(temperature=0.9, top_k=20, seed=5, logprobs=2, frequency_penalty=0.3)
    engine = await start_engine(in_process_executor(worker_config(model.path, dtype="float64"), is_eager=True))
    plain = [engine.submit(prompt, sampling, 40, n=2) for prompt in prompts[:4]]
    await engine.finish(plain)
    again = [
        engine.submit(
            prompt, sampling, 40, n=2, max_drafts=MAX_PREDICTED_DRAFTS, prediction=edited(answer.others[1].token_ids)
        )
        for prompt, answer in zip(prompts, plain, strict=False)
    ]
    await engine.finish(again)
    for answer, expected in zip(again, plain, strict=True):
        assert answer.token_ids == expected.token_ids
        assert answer.others[1].token_ids == expected.others[1].token_ids
        assert answer.others[1].logprobs == pytest.approx(expected.others[1].logprobs)
        assert answer.finished.speculation.accepted_predicted > 10


async def test_a_new_worker_gets_the_prediction_again(
    tiny_model, worker_config, in_process_executor, start_engine, prompts
):
    model = tiny_model("llama")
    executor = in_process_executor(worker_config(model.path), is_eager=True, deaths=(3, 6))
    engine = await start_engine(executor)
    answers = await predicted(model, engine, prompts[:2])
    assert engine.stats.restarts == 2
    assert all(answer.finished.speculation.accepted_predicted > 10 for answer in answers)
    added = [row for plan in executor.plans for row in plan.added]
    assert len(added) >= 6
    assert all(row.prediction for row in added)


async def test_a_worker_process_that_is_killed(cpu_library, tiny_model, worker_config, start_engine, prompts):
    """The service drafts without any flag."""
    model = tiny_model("llama")
    worker = WorkerProcess(worker_config(model.path, backend="cpu"))
    engine = await start_engine(worker)
    expected = greedy(model, prompts[3], 200)
    answer = engine.submit(prompts[3], GREEDY, 200, max_drafts=MAX_PREDICTED_DRAFTS, prediction=edited(expected))
    while len(answer.token_ids) < 20:  # noqa: ASYNC110 - there is no event for it
        await asyncio.sleep(0.001)
    os.kill(worker.pid, signal.SIGKILL)
    await engine.finish([answer])
    assert answer.token_ids == expected
