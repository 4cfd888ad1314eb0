"""Frames that are refused in band, and requests that are repeated."""

import grpc
import pytest
from wire.frames import begin, paced

import penstock.v1 as pb


class TestRefs:
    """A ref that is missing or taken refuses only that frame."""

    async def test_zero(self, open_frames):
        stream = await open_frames()
        await stream.send(begin(0, text="x"), begin(1, text="x"))
        assert (await stream.finished(1)).status.code == 0
        assert stream.refused == [("START", 0, "MISSING_REF")]

    async def test_taken(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(1, text="x", max_tokens=50), begin(1, text="other"), begin(2, text="x"))
        assert (await stream.finished(1)).usage.output_tokens == 50
        assert (await stream.finished(2)).status.code == 0
        assert stream.refused == [("START", 1, "DUPLICATE_REF")]

    async def test_an_empty_frame(self, open_frames):
        stream = await open_frames()
        await stream.send(pb.GenerateRequest(), begin(1, text="x"))
        assert (await stream.finished(1)).status.code == 0
        assert stream.refused == [("UNSPECIFIED", 0, "INVALID_FIELD")]

    async def test_a_frame_with_too_many_fields(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(1, text="x", max_tokens=50))
        await stream.send(begin(2, chat=pb.Chat(messages=[pb.ChatMessage(role="user")] * 50_000)))
        assert (await stream.finished(1)).status.code == 0
        assert stream.refused == [("UNSPECIFIED", 0, "TOO_EXPENSIVE")]

    async def test_a_cancel_of_too_many(self, open_frames):
        stream = await open_frames(paced())
        cancel = pb.GenerateRequest(cancel=pb.GenerationCancel(refs=range(65_537)))
        await stream.send(begin(1, text="x", max_tokens=50), cancel)
        assert (await stream.finished(1)).usage.output_tokens == 50
        assert stream.refused == [("CANCEL", 0, "INVALID_FIELD")]

    async def test_bytes_that_are_no_message_end_the_stream(self, open_frames):
        stream = await open_frames()
        call = stream.service.channel.stream_stream("/penstock.v1.GenerationService/Generate")()
        await call.write(b"\xff\xff")
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_ref_zero_of_a_single_call_means_none(self, open_frames):
        stream = await open_frames()
        answer = await stream.service.generation.GenerateOne(
            pb.GenerateOneRequest(start=begin(0, text="x").start)
        ).read()
        assert answer.accepted.prompt_tokens == 1


class TestIdempotencyKey:
    """A request that is repeated is computed once."""

    async def repeated(self, stream, key="k", **fields):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.whole(text="x", idempotency_key=key, **fields)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        return caught.value

    async def test_after_its_end(self, open_frames, details_of):
        stream = await open_frames()
        first = await stream.whole(text="x", idempotency_key="k")
        info = details_of(await self.repeated(stream))["ErrorInfo"]
        assert (info.reason, dict(info.metadata)) == ("DUPLICATE_REQUEST", {"request_id": first.request_id})
        assert (await stream.whole(text="x", idempotency_key="other")).finished.status.code == 0

    async def test_while_it_lives(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(text="x", max_tokens=100, idempotency_key="k"))
        await stream.until(lambda: stream.outcome().deltas)
        await self.repeated(stream)
        assert (await stream.finished()).usage.output_tokens == 100

    async def test_one_that_failed_may_be_repeated(self, open_frames):
        stream = await open_frames(paced())
        await stream.send(begin(text="x", max_tokens=400, idempotency_key="k"))
        await stream.until(lambda: stream.outcome().deltas)
        await stream.send(pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1])))
        await stream.finished()
        assert (await stream.whole(text="x", idempotency_key="k")).finished.status.code == 0
