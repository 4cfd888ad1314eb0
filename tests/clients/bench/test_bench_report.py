"""Figures against data made by hand, the table, the JSON and the picture."""

import json
import math

import pytest

from penstock.clients.bench.plot import plot
from penstock.clients.bench.report import ClientLoad, Report, Slo, spread
from penstock.clients.bench.table import table
from penstock.clients.bench.target import NOT_SENT, OK, Record, context
from penstock.clients.bench.workload import BenchRequest

IDLE = ClientLoad(loop_share=0.1, busiest_second_share=0.2, process_share=0.15)
BUSY = ClientLoad(loop_share=0.7, busiest_second_share=0.81, process_share=0.9)


def answered(number=0, sent=0.0, messages=((0.1, 1),), ended=None, **known):
    """Times from its being sent."""
    record = Record(BenchRequest(number, [1, 2, 3], 8, arrival_s=sent), 100 + sent)
    for after, num_tokens in messages:
        record.tokens(100 + sent + after, list(range(num_tokens)), num_tokens)
    record.status, record.ended_s = OK, 100 + sent + (messages[-1][0] if ended is None else ended)
    for name, value in known.items():
        setattr(record, name, value)
    return record


def refused(number=0, sent=0.0, after=0.01, status="RESOURCE_EXHAUSTED", reason="QUEUE_FULL"):
    record = Record(BenchRequest(number, [1], 8, arrival_s=sent), 100 + sent)
    record.fail(100 + sent + after, status, "the queue is full", reason)
    return record


def report(*records, seconds=10.0, client=IDLE, **known):
    return Report(list(records), 100.0, 100.0 + seconds, client, **known)


def test_times_of_one_request():
    record = answered(messages=((0.5, 1), (0.6, 2), (0.9, 3)), ended=1.0)
    assert record.ttft_s == pytest.approx(0.5)
    assert record.gaps_s() == pytest.approx([0.1, 0.3])
    assert record.tpot_s == pytest.approx(0.4 / 5)
    assert record.e2e_s == pytest.approx(1.0)
    assert (record.output_tokens, len(record.token_ids)) == (6, 6)
    single = answered(messages=((0.5, 4),))
    assert (single.tpot_s, single.gaps_s()) == (None, [])
    assert refused().ttft_s is None
    # A server that doesn't say how many tokens a message has, but how many there were in all.
    assert answered(messages=((0.5, 1), (0.9, 1)), output_tokens=9).tpot_s == pytest.approx(0.4 / 8)


def test_quantiles_of_known_values():
    assert spread(range(100, -1, -1)) == {"count": 101, "mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert spread([1, 2]) == {"count": 2, "mean": 1.5, "p50": 1.5, "p90": 1.9, "p99": 1.99, "max": 2}
    assert spread([3.0]) == {"count": 1, "mean": 3, "p50": 3, "p90": 3, "p99": 3, "max": 3}
    assert spread([]) is None


def test_a_summary():
    known = {"prompt_tokens": 30, "cached_tokens": 10}
    told = report(
        answered(0, 0.0, ((0.1, 1), (0.2, 1)), **known, predicted_ttft_s=0.15, late_s=0.001),
        answered(1, 1.0, ((0.4, 1), (0.6, 1)), **known, predicted_ttft_s=0.3),
        refused(2, 2.0),
        refused(3, 3.0, after=0.03),
        refused(4, 3.0, status="UNAVAILABLE", reason=""),
        refused(5, 4.0, after=0, status=NOT_SENT, reason=""),
    ).summary()
    assert told["requests"] == {
        "sent": 5,
        "ok": 2,
        "failed": {
            "RESOURCE_EXHAUSTED QUEUE_FULL": {"count": 2, "error": "the queue is full"},
            "UNAVAILABLE": {"count": 1, "error": "the queue is full"},
            "NOT_SENT": {"count": 1, "error": "the queue is full"},
        },
    }
    assert told["requests_per_s"] == pytest.approx(0.2)
    assert (told["prompt_tokens"], told["cached_tokens"], told["output_tokens"]) == (60, 20, 4)
    assert told["output_tokens_per_s"] == pytest.approx(0.4)
    assert told["times_s"]["ttft"]["mean"] == pytest.approx(0.25)
    assert told["times_s"]["itl"]["max"] == pytest.approx(0.2)
    assert told["times_s"]["e2e"]["p50"] == pytest.approx(0.4)
    assert told["failed_after_s"]["count"] == 3
    assert told["failed_after_s"]["max"] == pytest.approx(0.03)
    assert told["predicted_ttft"]["p50"] == pytest.approx((0.5 + 0.25) / 2)
    assert told["sent_late_s"]["max"] == 0.001
    assert "goodput" not in told


def test_times_are_of_requests_that_were_answered_whole():
    cut = answered(1, 0, ((5.0, 1), (9.0, 2)))
    cut.fail(109.5, "UNAVAILABLE", "the worker is gone")
    told = report(answered(0, 0, ((0.1, 1), (0.2, 1))), cut).summary()
    assert [told["times_s"][name]["count"] for name in ("ttft", "itl", "tpot", "e2e")] == [1, 1, 1, 1]
    assert told["output_tokens"] == 5  # but what came counts as throughput
    assert told["requests_per_s"] == pytest.approx(0.1)


def test_goodput_counts_requests_that_keep_every_bound():
    good = answered(0, 0, ((0.1, 1), (0.14, 1), (0.18, 1)))
    slow_start = answered(1, 0, ((0.6, 1), (0.64, 1)))
    one_gap = answered(2, 0, ((0.1, 1), (0.19, 1), (0.2, 1)))
    refusal = refused(3)
    everyone = report(good, slow_start, one_gap, refusal)
    assert everyone.summary(Slo(ttft=0.5))["goodput"]["ok"] == 2
    assert everyone.summary(Slo(itl=0.05))["goodput"]["ok"] == 2
    assert everyone.summary(Slo(tpot=0.045))["goodput"]["ok"] == 2
    assert everyone.summary(Slo(e2e=0.19))["goodput"]["ok"] == 1
    assert everyone.summary(Slo(ttft=0.5, itl=0.05, e2e=1))["goodput"]["ok"] == 1
    told = everyone.summary(Slo(ttft=0.5, itl=0.05))["goodput"]
    assert told == {"slo_s": {"ttft": 0.5, "itl": 0.05}, "ok": 1, "share": 0.25, "requests_per_s": pytest.approx(0.1)}


def test_an_slo_is_read():
    assert Slo.parse("ttft=500ms,itl=50ms, e2e=5s") == Slo(ttft=0.5, itl=0.05, e2e=5)
    assert Slo.parse("tpot=900us").tpot == pytest.approx(0.0009)


@pytest.mark.parametrize(
    "text", ["", "ttft", "ttft=5", "ttft=-5ms", "speed=5ms", "ttft=1s,ttft=2s", "itl=xms", "itl=1h"]
)
def test_other_slos_are_refused(text):
    with pytest.raises(ValueError, match="expected bounds of ttft, itl, tpot, e2e"):
        Slo.parse(text)


def test_the_table():
    text = table(report(answered(prompt_tokens=40, cached_tokens=10), refused(1)).summary(Slo(ttft=0.5, e2e=2)))
    assert "1 of 2 answered\n              1 RESOURCE_EXHAUSTED QUEUE_FULL: the queue is full\n" in text
    assert "(25% cached)" in text
    assert "50.0% of all requests (within ttft 500 ms, e2e 2.00 s)" in text
    assert "until failed or refused    10.0 ms" in text
    assert "between messages" not in text  # there were none
    assert "15% of a core (its event loop 10%, 20% in the busiest second)" in text
    assert "WARNING" not in text


def test_drafts_of_all_requests():
    records = [
        answered(drafts=2, drafted_tokens=8, accepted_tokens=3),
        answered(1),
        answered(2, drafts=6, drafted_tokens=24, accepted_tokens=5),
    ]
    summary = report(*records).summary()
    assert summary["speculation"] == {
        "drafts": 8,
        "drafted_tokens": 32,
        "accepted_tokens": 8,
        "accepted_share": 0.25,
        "mean_length": 2.0,
    }
    assert "drafts        32 tokens, 25% of them accepted; 2.00 tokens per step with drafts" in table(summary)
    assert report(answered()).summary()["speculation"] is None


def test_the_table_warns():
    assert "WARNING: this client was busy" in table(report(answered(), client=BUSY).summary())
    assert "WARNING: requests were sent late" in table(report(answered(late_s=0.5)).summary())
    assert "WARNING: no request was answered" in table(report(refused()).summary())
    assert "(stopped early)" in table(report(answered(), was_stopped=True).summary())
    assert "0 of 0 answered" in table(report(seconds=0).summary(Slo(ttft=1)))


def test_the_json():
    record = answered(3, 2.0, ((0.5, 2), (0.75, 1)), ended=0.8, request_id="R", predicted_ttft_s=0.4, prompt_tokens=3)
    (told,) = json.loads(json.dumps(report(record).requests()))
    assert told == {
        "number": 3,
        "conversation": None,
        "status": "OK",
        "reason": None,
        "error": None,
        "finish_reason": None,
        "request_id": "R",
        "new_prompt_tokens": 3,
        "max_tokens": 8,
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "output_tokens": 3,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "arrival_s": 2.0,
        "sent_s": 2.0,
        "ended_s": 2.8,
        "predicted_ttft_s": 0.4,
        "message_s": [2.5, 2.75],
        "message_tokens": [2, 1],
        "token_ids": [0, 1, 0],
    }
    numbers = json.dumps(report(record, refused(1)).summary(Slo(ttft=1)), allow_nan=False)
    assert math.isclose(json.loads(numbers)["seconds"], 10)


def test_the_picture(tmp_path):
    records = [answered(i, i / 10, ((0.1 + i / 1000, 1), (0.15 + i / 900, 1)), ended=0.3) for i in range(90)]
    for name, told in (("full", report(*records, refused(1))), ("empty", report())):
        plot(told, "a title", tmp_path / name, Slo(ttft=0.12))
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "full").stat().st_size < 100_000


def test_the_context_of_a_turn():
    first = answered(messages=((0.1, 2), (0.2, 1)))
    unknown = Record(BenchRequest(1, [7, 8], 8), 0.0, output_tokens=3)
    assert context(BenchRequest(2, [9], 8), [first, unknown]) == [1, 2, 3, 0, 1, 0, 7, 8, 7, 8, 7, 9]


def test_a_table_without_times_has_no_heading_for_them():
    assert "p99" in table(report(answered()).summary())
    assert "p99" not in table(report(seconds=0).summary())
