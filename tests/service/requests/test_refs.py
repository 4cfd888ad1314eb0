"""Frames that are refused on a stream, whose requests go on; and requests that are repeated."""

import grpc
import pytest
from letters import ENDLESS, begin, cancel, letters, paced
from waiting import until

import penstock.v1 as pb


@pytest.fixture
def exchange(start_service, new_reading, details_of):
    """Sends frames on a stream to its end; returns what it brought, and the refused frames: kind, ref and reason."""

    async def exchange(*frames):
        service = await start_service(paced())
        reading = await new_reading().read(service.generation.Generate(iter(frames)))
        refused = [
            (pb.FrameKind.Name(each.frame).removeprefix("FRAME_KIND_"), each.ref, details_of(each.status)["ErrorInfo"])
            for message in reading.messages
            for each in message.frames_refused
        ]
        return reading, [(kind, ref, info.reason) for kind, ref, info in refused]

    return exchange


class TestRefs:
    """A ref that is missing or taken refuses only that frame."""

    async def test_zero(self, exchange):
        reading, refused = await exchange(begin(0), begin(1))
        assert refused == [("START", 0, "MISSING_REF")]
        assert reading.outcomes[1].text == letters(5, 5)
        assert set(reading.outcomes) == {1}

    async def test_taken(self, exchange):
        reading, refused = await exchange(begin(1, max_tokens=50), begin(1, text="other"), begin(2))
        assert refused == [("START", 1, "DUPLICATE_REF")]
        assert reading.outcomes[1].text == letters(5, 50)
        assert reading.outcomes[2].text == letters(5, 5)

    async def test_an_empty_frame(self, exchange):
        reading, refused = await exchange(pb.GenerateRequest(), begin(1))
        assert refused == [("UNSPECIFIED", 0, "INVALID_FIELD")]
        assert reading.outcomes[1].text == letters(5, 5)

    async def test_a_frame_with_too_many_fields(self, exchange):
        many = pb.Chat(messages=[pb.ChatMessage(role="user")] * 50_000)
        reading, refused = await exchange(begin(1, max_tokens=50), begin(2, text=None, chat=many))
        assert refused == [("UNSPECIFIED", 0, "TOO_EXPENSIVE")]
        assert reading.outcomes[1].text == letters(5, 50)
        assert set(reading.outcomes) == {1}

    async def test_a_cancel_of_too_many(self, exchange):
        reading, refused = await exchange(begin(1, max_tokens=50), cancel(*range(65_537)))
        assert refused == [("CANCEL", 0, "INVALID_FIELD")]
        assert reading.outcomes[1].text == letters(5, 50)

    async def test_bytes_that_are_no_message_end_the_stream(self, start_service):
        service = await start_service()
        call = service.channel.stream_stream("/penstock.v1.GenerationService/Generate")()
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_ref_zero_of_a_single_call_means_none(self, start_service):
        service = await start_service()
        request = pb.GenerateOneRequest(start=begin(0, text="x").start)
        assert (await service.generation.GenerateOne(request).read()).accepted.prompt_tokens == 1


class TestIdempotencyKey:
    """A request that is repeated is computed once."""

    @pytest.fixture
    async def service(self, start_service):
        return await start_service(paced())

    async def complete(self, service, key="k"):
        return await service.generation.Complete(pb.CompleteRequest(start=begin(idempotency_key=key).start))

    async def repeated(self, service):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.complete(service)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        return caught.value

    async def test_after_its_end(self, service, details_of):
        first = await self.complete(service)
        info = details_of(await self.repeated(service))["ErrorInfo"]
        assert (info.reason, dict(info.metadata)) == ("DUPLICATE_REQUEST", {"request_id": first.request_id})
        assert (await self.complete(service, "other")).finished.status.code == 0

    async def test_while_it_lives_and_after_it_failed(self, service, new_reading):
        call = service.generation.Generate()
        await call.write(begin(1, max_tokens=ENDLESS, idempotency_key="k"))
        reading = await new_reading().read_until(call, lambda reading: reading.outcomes[1].deltas)
        await self.repeated(service)
        await call.write(cancel(1))
        await reading.read_until(call, lambda reading: reading.outcomes[1].finished)
        await until(lambda: not service.engine.stats().requests)
        assert (await self.complete(service)).finished.status.code == 0
        call.cancel()
