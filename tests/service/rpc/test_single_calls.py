"""GenerateOne and Complete: the status of the call is the status of the request."""

import json
from contextlib import suppress

import grpc
import pytest
from letters import ENDLESS, begin, letters, paced
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import RefusalKind, Refused, SequenceDelta
from penstock.service.rpc import generation
from penstock.service.streaming.pending_message import OutputForm
from penstock.v1.generation_pb2_grpc import GenerationServiceStub


class TestSingle:
    """GenerateOne and Complete: the call's status is the request's."""

    async def test_generate_one(self, start_service):
        service = await start_service()
        call = service.generation.GenerateOne(pb.GenerateOneRequest(start=begin(9).start))
        messages = [message async for message in call]
        assert messages[0].accepted.ref == 9
        assert "".join(delta.text for message in messages for delta in message.deltas) == letters(5, 5)
        assert [message.HasField("finished") for message in messages] == [False] * (len(messages) - 1) + [True]
        assert await call.code() is grpc.StatusCode.OK

    async def test_a_refusal_has_no_message_so_that_it_may_be_retried(self, start_service, details_of):
        service = await start_service()
        call = service.generation.GenerateOne(pb.GenerateOneRequest(start=begin(max_tokens=0).start))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call.read()
        assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = details_of(error.value)
        assert len(details["RequestInfo"].request_id) == 26
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.generation.Complete(pb.CompleteRequest(start=begin(max_tokens=0).start))
        assert details_of(error.value)["BadRequest"].field_violations[0].field == "sampling.max_tokens"

    @pytest.mark.parametrize(("retry_after_ms", "expected"), [(20, 3), (None, 1)])
    async def test_clients_retry_exactly_when_the_service_gives_a_delay(self, start_service, retry_after_ms, expected):
        """gRPC's own retries: they need a refusal without a message, and heed the pushback."""
        service = await start_service()
        submitted = []
        submit = service.engine.submit

        def refuse_twice(request):
            submitted.append(request)
            if len(submitted) < 3:
                raise Refused(RefusalKind.QUEUE_FULL, "full", retry_after_ms)
            submit(request)

        service.engine.submit = refuse_twice
        policy = {
            "maxAttempts": 4,
            "initialBackoff": "5s",
            "maxBackoff": "5s",
            "backoffMultiplier": 1,
            "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
        }
        config = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})
        async with grpc.aio.insecure_channel(service.target, options=[("grpc.service_config", config)]) as channel:
            call = GenerationServiceStub(channel).GenerateOne(pb.GenerateOneRequest(start=begin().start))
            if retry_after_ms is None:
                with pytest.raises(grpc.aio.AioRpcError):
                    await call.read()
            else:
                assert [message async for message in call][-1].finished.reason == pb.FINISH_REASON_LENGTH
        assert len(submitted) == expected

    async def test_a_full_queue_is_refused_with_a_hint(self, start_service, new_reading):
        scheduler = SchedulerConfig(max_num_seqs=1, max_queued_requests=1)
        service = await start_service(paced(), scheduler)
        call = service.generation.Generate()
        await call.write(begin(1, max_tokens=ENDLESS))
        reading = await new_reading().read_until(call, lambda r: r.outcomes[1].deltas > 0)
        await call.write(begin(2))
        await reading.read_until(call, lambda r: bool(r.outcomes[2].accepted))
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.generation.Complete(pb.CompleteRequest(start=begin().start))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert int(dict(error.value.trailing_metadata())["grpc-retry-pushback-ms"]) > 0

    async def test_a_start_is_required(self, start_service):
        service = await start_service()
        for call in (
            service.generation.Complete(pb.CompleteRequest()),
            service.generation.GenerateOne(pb.GenerateOneRequest()).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_a_whole_answer_has_no_more_logprobs_than_clients_take(self, start_service, details_of):
        service = await start_service()
        start = begin(max_tokens=3, output=pb.OutputOptions(logprobs=20)).start
        response = await service.generation.Complete(pb.CompleteRequest(start=start))
        assert len(response.choices[0].logprobs.top) == 60
        start.sampling.max_tokens, start.sampling.n = 4000, 6
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await service.generation.Complete(pb.CompleteRequest(start=start))
        assert details_of(error.value)["BadRequest"].field_violations[0].field == "output.logprobs"
        assert "GenerateOne" in (error.value.details() or "")
        start.sampling.ignore_eos = True
        call = service.generation.GenerateOne(pb.GenerateOneRequest(start=start))
        assert (await call.read()).HasField("accepted")
        call.cancel()

    async def test_a_whole_answer_is_filled_as_it_comes(self, monkeypatch):
        """All at once at its end, a long one would hold up every other request."""
        answer = generation._WholeAnswer()
        form = OutputForm(text=True, token_ids=True)
        for choice in (1, 0, 1):
            answer.delta(0, SequenceDelta(choice, [97], "a\r\n", TokenLogprobs(1, [-1.0], [98], [-2.0])), form, False)
        monkeypatch.delattr(generation, "fill_delta")
        answer.finished(pb.Finished(request_id="id"))
        response = await answer.whole
        assert [(choice.index, choice.text) for choice in response.choices] == [(0, "a\r\n"), (1, "a\r\n" * 2)]
        assert list(response.choices[1].token_ids) == [97, 97]
        assert list(response.choices[1].logprobs.top) == [-2, -2]

    async def test_ended_streams_do_not_slow_others_down(self, start_service):
        """Whatever becomes of a request, its stream no longer counts for the pace of others."""
        service = await start_service()
        pacer = service.server._running.generation._pacer
        for request in (pb.GenerationStart(), begin(max_tokens=0).start, begin().start):
            with suppress(grpc.aio.AioRpcError):
                async for _ in service.generation.GenerateOne(pb.GenerateOneRequest(start=request)):
                    pass
            with suppress(grpc.aio.AioRpcError):
                await service.generation.GenerateOne(pb.GenerateOneRequest()).read()
            await until(lambda: pacer.interval == 0)

    @pytest.mark.parametrize("method", ["GenerateOne", "Complete"])
    async def test_a_dropped_call_is_aborted(self, start_service, method, caplog):
        service = await start_service(paced())
        start = begin(max_tokens=ENDLESS).start
        if method == "Complete":
            call = service.generation.Complete(pb.CompleteRequest(start=start))
        else:
            call = service.generation.GenerateOne(pb.GenerateOneRequest(start=start))
        await until(lambda: service.blocks_in_use > 0)
        call.cancel()
        await until(lambda: service.blocks_in_use == 0 and service.engine.stats().requests == 0)
        assert not [record for record in caplog.records if record.levelname == "ERROR"]
