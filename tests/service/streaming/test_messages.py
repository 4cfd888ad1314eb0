"""What the engine says reaches the wire whole."""

import pytest
from google.rpc import status_pb2

import penstock.v1 as pb
from penstock.scheduler.request import EngineFinishReason, RequestAccepted, RequestFinished, RequestTimings, TokenUsage
from penstock.service.streaming.messages import finished_message


@pytest.mark.parametrize("reason", EngineFinishReason)
def test_every_end_has_its_reason(reason):
    finished = RequestFinished(reason, TokenUsage(), RequestTimings())
    message = finished_message(1, 2, "R", finished, status_pb2.Status(), None, False)
    assert message.reason != pb.FINISH_REASON_UNSPECIFIED


def test_a_finished_message_carries_all_known_facts():
    finished = RequestFinished(EngineFinishReason.STOP, TokenUsage(1, 2, 3), RequestTimings(10, 20, 30, 40, 5, 6))
    message = finished_message(7, 0, "R", finished, status_pb2.Status(), 2**63 - 1, True)
    assert message == pb.Finished(
        ref=7,
        status=status_pb2.Status(),
        usage=pb.Usage(prompt_tokens=1, cached_tokens=2, output_tokens=3),
        timings=pb.Timings(
            queued_ms=0.01, prefill_ms=0.02, first_token_ms=0.03, total_ms=0.04, preemptions=5, restarts=6
        ),
        may_continue=True,
        reason=pb.FINISH_REASON_STOP,
        seed=2**63 - 1,
        request_id="R",
    )


@pytest.mark.parametrize("predicted_ttft_s", [None, 1.5, 1e9])
async def test_a_prediction_counts_from_arrival(start_service, new_reading, monkeypatch, predicted_ttft_s):
    service = await start_service()
    submit = service.engine.submit

    def with_prediction(request):
        sink = request.sink

        def predicting(event):
            if isinstance(event, RequestAccepted):
                event.predicted_ttft_s = predicted_ttft_s
            sink(event)

        request.sink = predicting
        [live] = service.server._running.generation._live
        live._arrival -= 10
        submit(request)

    monkeypatch.setattr(service.engine, "submit", with_prediction)
    frame = pb.GenerateRequest(start=pb.GenerationStart(ref=1, text="x", sampling=pb.SamplingParams(max_tokens=1)))
    reading = await new_reading().read(service.generation.Generate(iter([frame])))
    [accepted] = reading.outcomes[1].accepted
    assert accepted.HasField("predicted_ttft_ms") == (predicted_ttft_s is not None)
    if predicted_ttft_s == 1.5:
        assert 11_500 <= accepted.predicted_ttft_ms < 20_000
    elif predicted_ttft_s:
        assert accepted.predicted_ttft_ms == 2**32 - 1
