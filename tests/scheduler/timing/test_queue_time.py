"""What the fluid model foretells, where it can be worked out by hand."""

from typing import Any

import pytest

from penstock.scheduler.timing.queue_time import _USUAL_LATENESS, OutputLengths, Prediction, QueueLoad, QueueTimeModel
from penstock.scheduler.timing.queued_work import QueuedWork, sequence_work, total_work
from penstock.scheduler.timing.step_time import StepTimeModel, StepWork

STEP_S, TOKEN_S = 0.010, 0.0001


def flat_model():
    """A step takes 10 ms, and 0.1 ms more for each token of a prompt."""
    model = StepTimeModel()
    for number in range(400):
        tokens = (0, 100, 500)[number % 3]
        work = StepWork(tokens, tokens * 50 * (number % 7), 4, 4 * (number % 11), min(tokens, 1), tokens)
        model.observe(work, STEP_S + TOKEN_S * tokens)
    return model


def load(**fields: Any) -> QueueLoad:
    defaults: dict[str, Any] = {
        "in_flight_s": 0.0,
        "decodes": 0,
        "decode_kv": 0,
        "remaining": (),
        "free_rows": 4,
        "max_rows": 4,
        "free_blocks": 1000,
        "num_blocks": 1000,
        "block_size": 16,
    }
    return QueueLoad(**defaults | fields)


def always_full_forecast(budget=1000, model=None):
    """Outputs are always as long as they may be."""
    forecast = QueueTimeModel(model or flat_model(), budget, None)
    for _ in range(200):
        forecast.learn(100, 100)
    return forecast


def work(num_tokens, num_new_tokens=None):
    return sequence_work(num_tokens, num_tokens if num_new_tokens is None else num_new_tokens, 16)


def ahead(number, num_tokens):
    """So many requests with ``num_tokens`` of prompts together."""
    return {"ahead": total_work([work(num_tokens // number)] * number)}


def predict(forecast: QueueTimeModel, load: QueueLoad, own: QueuedWork, max_tokens: int) -> Prediction:
    prediction = forecast.predict(load, own, max_tokens)
    assert prediction is not None
    return prediction


def full(remaining):
    return {"decodes": 4, "remaining": remaining, "free_rows": 0}


def test_nothing_is_foretold_while_nothing_is_known():
    forecast = QueueTimeModel(StepTimeModel(), 1000, None)
    assert forecast.predict(load(), work(100), 100) is None
    assert forecast.service_s(0, 0, work(100), 100) is None
    assert forecast.alone_s(work(100), 100) is None


@pytest.mark.parametrize(
    ("fields", "tokens", "expected_s"),
    [
        ({}, 500, STEP_S + 500 * TOKEN_S),
        ({"in_flight_s": 0.3}, 500, 0.3 + STEP_S + 500 * TOKEN_S),
        ({}, 2500, 3 * STEP_S + 2500 * TOKEN_S),
        (ahead(2, 1500), 500, 2 * STEP_S + 2000 * TOKEN_S),
        (full((30, 10, 40, 20)), 500, 11 * STEP_S + 500 * TOKEN_S),
        (full((30, 10, 40, 20)) | ahead(2, 1000), 500, 31 * STEP_S + 1500 * TOKEN_S),
        (full((30, 10, 40, 20)) | ahead(4, 400), 500, 111 * STEP_S + 900 * TOKEN_S),
        (
            {"decodes": 2, "remaining": (30, 10), "free_rows": 2, "free_blocks": 5, "num_blocks": 105},
            500,
            11 * STEP_S + 500 * TOKEN_S,
        ),
    ],
    ids=["idle", "in flight", "chunks", "behind others", "no row", "third in line", "second round", "no blocks"],
)
def test_time_to_first_token(fields, tokens, expected_s):
    prediction = predict(always_full_forecast(), load(**fields), work(tokens), 100)
    assert prediction.ttft_s == pytest.approx(expected_s, rel=0.1)


def test_what_was_foretold_to_take_no_time_teaches_a_little_all_the_same():
    """A model that has seen few kinds of steps may find that another one is free."""
    forecast = QueueTimeModel(flat_model(), 1000, None)
    before = predict(forecast, load(), work(100), 10)
    for took_s in (0.0, 1.0, float("inf")):
        forecast.learn_total(work(100), 0.0, took_s)
    forecast.learn_ttft(work(100), 0.0, 1.0)
    assert before.ttft_s < predict(forecast, load(), work(100), 10).ttft_s < 2 * before.ttft_s


def test_what_is_cached_takes_no_time():
    prediction = predict(always_full_forecast(), load(), work(900, 100), 1)
    assert prediction.ttft_s == pytest.approx(STEP_S + 100 * TOKEN_S, rel=0.1)


def test_the_whole_output_is_foretold():
    forecast = always_full_forecast()
    prediction = predict(forecast, load(), work(500), 100)
    slowdown = forecast._model.slowdown
    assert prediction.total_s - prediction.ttft_s == pytest.approx(99 * STEP_S * slowdown, rel=0.1)
    assert forecast.alone_s(work(500), 100) == pytest.approx(100 * STEP_S + 500 * TOKEN_S, rel=0.1)


def test_a_target_makes_chunks_smaller_and_the_first_token_later():
    forecast = QueueTimeModel(flat_model(), 1000, target_itl_s=0.020)
    prediction = predict(forecast, load(decodes=2, remaining=(500, 500), free_rows=2), work(1000), 10)
    assert prediction.ttft_s == pytest.approx(10 * 0.020, rel=0.2)


def test_outputs_that_end_early_free_their_rows_early():
    forecast = QueueTimeModel(flat_model(), 1000, None)
    for _ in range(400):
        forecast.learn(10, 1000)
    prediction = predict(forecast, load(**full((1000, 1000, 1000, 1000))), work(100), 1000)
    assert prediction.ttft_s < 16 * STEP_S
    assert prediction.total_s < 60 * STEP_S


def test_the_latest_time_follows_what_predictions_were_worth():
    forecast = always_full_forecast()

    def factor():
        prediction = predict(forecast, load(), work(100), 100)
        return prediction.latest_s / prediction.total_s

    total_s = predict(forecast, load(), work(100), 100).total_s
    assert factor() == _USUAL_LATENESS
    for number in range(100):
        forecast.learn_total(work(100), total_s, 1.5 * total_s if number % 10 == 0 else total_s)
    assert factor() == pytest.approx(1.5)
    for _ in range(100):
        forecast.learn_total(work(100), 10 * total_s, 30 * total_s)
        forecast.learn_total(work(1000, 10), total_s, 3 * total_s)
    assert factor() == pytest.approx(1.5), "other requests' times say little about this one"
    for _ in range(100):
        forecast.learn_total(work(100), total_s, 0.9 * total_s)
    assert factor() == 1.0


def test_a_burst_corrects_predictions_once():
    """All of its predictions are made before the first of them is put to the test."""
    forecast = always_full_forecast()
    prediction = predict(forecast, load(), work(100), 10)
    for _ in range(500):
        forecast.learn_ttft(work(100), prediction.modelled_ttft_s, 1.5 * prediction.modelled_ttft_s)
    again = predict(forecast, load(), work(100), 10)
    assert again.modelled_ttft_s == prediction.modelled_ttft_s
    assert again.ttft_s == pytest.approx(1.5 * prediction.ttft_s, rel=0.01)


def test_short_outputs_leave_their_rows_while_others_begin():
    """Of 200 requests whose outputs have two tokens few decode at once."""
    forecast = always_full_forecast()
    for _ in range(200):
        forecast.learn(2, 2)
    rows = {"free_rows": 256, "max_rows": 256, "free_blocks": 10**6, "num_blocks": 10**6}
    prediction = predict(forecast, load(**rows, **ahead(200, 200_000)), work(1000), 2)
    assert prediction.ttft_s == pytest.approx(201 * (STEP_S + 1000 * TOKEN_S), rel=0.1)
    load_ = load(**rows, **ahead(200, 200_000))
    assert forecast._prefill(load_, 201_000, 1000, 1000).rows < 10


def test_a_slow_past_of_long_prompts_does_not_slow_down_cached_ones():
    forecast = always_full_forecast()
    forecast._model._whole_s, forecast._model._decoding_s = 1.0, 0.1  # prompts made steps ten times as long
    for _ in range(20):
        forecast.learn_arrival(work(10_000))
        forecast.learn_arrival(work(10_000, 10))
    full, cached = (predict(forecast, load(), own, 100) for own in (work(10_000), work(10_000, 10)))
    assert full.total_s - full.ttft_s > 1.4 * 99 * STEP_S
    assert cached.total_s - cached.ttft_s < 1.1 * 99 * STEP_S


@pytest.mark.parametrize("length", [1, 5, 100, 3000])
def test_truncated_outputs_still_inform_the_length_estimate(length):
    lengths = OutputLengths()
    for number in range(300):
        limit = (50, 200, 10_000)[number % 3]
        lengths.learn(min(length, limit), ended=length < limit)
    for limit in (10, 100, 10_000):
        true = min(length, limit)
        assert true * 0.6 <= lengths.expected(limit) <= true * 1.6
        assert true * 0.6 <= lengths.long(limit, 0.05) <= max(2 * true, limit if limit <= length else 0)


def test_a_request_gets_the_longest_output_only_if_it_may():
    assert OutputLengths().long(7, 0.0) == 7
    assert OutputLengths().expected(1) <= 1
