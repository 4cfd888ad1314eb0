"""Deadlines, and what may happen before a request is in the queue; over a real socket."""

import threading
import time

import grpc
import pytest
from letters import ENDLESS, begin, cancel, paced
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig

LONGER = (150, 1500, 6000)
"""Milliseconds for a request that has to begin and must not end: more are given where a busy machine needs them."""
HELLO = "fghij"
TOO_LONG = pb.GenerationStart(text="xx", sampling=pb.SamplingParams(min_tokens=4095))
"""Refused once it is known how many tokens the prompt leaves."""
"""What the worker says to a prompt of five tokens."""


class TestDeadlines:
    """timeout_ms, and the call's own deadline."""

    async def test_a_request_has_a_deadline_of_its_own(self, start_service, new_reading):
        service = await start_service(paced())
        for timeout_ms in LONGER:
            frames = [begin(1, max_tokens=ENDLESS, timeout_ms=timeout_ms), begin(2, max_tokens=100)]
            reading = await new_reading().read(service.generation.Generate(iter(frames)))
            [finished] = reading.outcomes[1].finished
            assert finished.status.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            assert finished.reason == pb.FINISH_REASON_DEADLINE
            if finished.usage.output_tokens:
                break
        assert finished.usage.output_tokens > 0
        assert len(reading.outcomes[2].text) == 100

    async def test_in_the_queue_too(self, start_service, new_reading):
        service = await start_service(paced(), SchedulerConfig(max_num_seqs=1))
        frames = [begin(1, max_tokens=ENDLESS, timeout_ms=300), begin(2, timeout_ms=50)]
        reading = await new_reading().read(service.generation.Generate(iter(frames)))
        assert not reading.outcomes[2].deltas
        assert reading.outcomes[2].finished[0].reason == pb.FINISH_REASON_DEADLINE

    async def test_the_calls_deadline_counts_where_there_is_no_other(self, start_service):
        service = await start_service(paced())
        left = []
        submit = service.engine.submit

        def noted(request):
            left.append(request.deadline - time.monotonic())
            submit(request)

        service.engine.submit = noted
        start = begin(max_tokens=ENDLESS).start
        for number, (timeout_ms, expected) in enumerate(((None, 600), (300_000, 300)), 1):
            if timeout_ms is not None:
                start.timeout_ms = timeout_ms
            call = service.generation.Complete(pb.CompleteRequest(start=start), timeout=600)
            await until(lambda number=number: len(left) == number)
            assert expected - 300 < left[-1] <= expected
            call.cancel()
        await until(lambda: service.blocks_in_use == 0)
        await service.generation.Complete(pb.CompleteRequest(start=begin(timeout_ms=60_000).start))
        assert left[-1] > 50

    async def test_a_failed_complete_call_reports_its_usage(self, start_service, details_of):
        """It is billed, and there is no message to say it in."""
        service = await start_service(paced())
        for timeout_ms in LONGER:
            start = begin(max_tokens=ENDLESS, timeout_ms=timeout_ms).start
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await service.generation.Complete(pb.CompleteRequest(start=start))
            details = details_of(error.value)
            if "Finished" in details:
                break
        finished = details["Finished"]
        assert finished.reason == pb.FINISH_REASON_DEADLINE
        assert (finished.usage.prompt_tokens, finished.usage.output_tokens > 0) == (5, True)
        assert finished.request_id == details["RequestInfo"].request_id
        assert not finished.HasField("status")
        assert len(dict(error.value.trailing_metadata())["grpc-status-details-bin"]) < 1024
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.generation.Complete(pb.CompleteRequest(start=TOO_LONG))
        assert "Finished" not in details_of(error.value)

    async def test_a_deadline_that_passes_during_preparation(
        self, start_service, new_reading, byte_tokenizer, monkeypatch
    ):
        told = threading.Event()
        monkeypatch.setattr(byte_tokenizer, "encode", lambda *arguments: told.wait(120))
        service = await start_service()
        try:  # while the text is still with the tokenizer
            reading = await new_reading().read(service.generation.Generate(iter([begin(1, timeout_ms=50)])))
        finally:
            told.set()
        assert reading.outcomes[1].finished[0].reason == pb.FINISH_REASON_DEADLINE
        assert not reading.outcomes[1].accepted


class TestPreparation:
    """What happens before a request is in the queue."""

    @pytest.fixture
    def slow_tokenizer(self, byte_tokenizer, monkeypatch):
        """Takes 0.1 s for a text with an x."""
        encode = byte_tokenizer.encode

        def slow(text, *arguments):
            if "x" in text:
                time.sleep(0.1)
            return encode(text, *arguments)

        monkeypatch.setattr(byte_tokenizer, "encode", slow)

    async def test_a_cancel_during_preparation(self, start_service, new_reading, slow_tokenizer):
        service = await start_service()
        reading = await new_reading().read(service.generation.Generate(iter([begin(1, text="x"), cancel(1), begin(2)])))
        [finished] = reading.outcomes[1].finished
        assert finished.reason == pb.FINISH_REASON_CANCELLED
        assert not reading.outcomes[1].accepted
        assert reading.outcomes[2].text == HELLO

    async def test_a_stream_dropped_during_preparation(self, start_service, byte_tokenizer, monkeypatch):
        encode, held = byte_tokenizer.encode, threading.Event()
        service = await start_service()
        submit, submitted = service.engine.submit, []

        def note(request):
            submitted.append(request)
            submit(request)

        service.engine.submit = note
        for hold_s in (0.1, 1.0, 10.0, 60.0):  # until the service hears of the cancel in time

            def hold(text, *arguments, hold_s=hold_s):
                if "x" in text and not held.is_set():
                    held.set()
                    time.sleep(hold_s)
                return encode(text, *arguments)

            monkeypatch.setattr(byte_tokenizer, "encode", hold)
            call = service.generation.Generate()
            for ref in range(1, 11):
                await call.write(begin(ref, text="x"))
            await until(held.is_set)
            call.cancel()
            # Its text is behind theirs in the tokenizer's line.
            await service.generation.Complete(pb.CompleteRequest(start=begin().start))
            if len(submitted) == 1:
                return
            submitted.clear()
            held.clear()
        pytest.fail("requests of a stream that is gone were submitted")

    async def test_no_heartbeat_comes_before_accepted(self, start_service, slow_tokenizer):
        """It would commit the call, which then could not be tried again."""
        service = await start_service(paced(0.1), heartbeat_s=0.02)
        call = service.generation.GenerateOne(pb.GenerateOneRequest(start=TOO_LONG))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        call = service.generation.GenerateOne(pb.GenerateOneRequest(start=begin(text="xx").start))
        messages = [message async for message in call]
        assert messages[0].HasField("accepted")
        assert any(message.HasField("heartbeat") for message in messages[1:])

    async def test_a_long_prompt_may_be_overtaken(self, start_service, new_reading, slow_tokenizer):
        service = await start_service(paced(max_model_len=1 << 17, num_blocks=1 << 13))
        frames = [begin(1, text="x" * 100_000), *[begin(ref) for ref in range(2, 6)]]
        reading = await new_reading().read(service.generation.Generate(iter(frames)))
        accepted = [accepted.ref for message in reading.messages for accepted in message.accepted]
        assert accepted == [2, 3, 4, 5, 1]
