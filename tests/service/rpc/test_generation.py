"""GenerationService over a real socket: one request, many requests, and how they end."""

from typing import Any

import grpc
import pytest
from letters import ENDLESS, begin, cancel, letters, paced
from waiting import until

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig
from penstock.scheduler.policy import Policy
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.requests.live import lifecycle as live
from penstock.service.streaming.outbox import HELD_UP_PART_BYTES

EOS = 256


class TestGenerate:
    """The multiplexed stream."""

    async def test_grpcurls_first_call(self, start_service, new_reading):
        """A lone start, and half-close: the rest is finished."""
        service = await start_service()
        reading = await new_reading().read(service.generation.Generate(iter([begin()])))
        outcome = reading.outcomes[1]
        assert outcome.text == letters(5, 5)
        [accepted], [finished] = outcome.accepted, outcome.finished
        assert len(accepted.request_id) == 26
        assert accepted.prompt_tokens == 5
        assert finished.request_id == accepted.request_id
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (5, 5)
        assert finished.HasField("seed")
        assert finished.timings.total_ms >= finished.timings.first_token_ms > 0

    async def test_256_requests_are_one_message_a_step(self, start_service, new_reading):
        """Shown by 4."""
        service = await start_service(paced())
        call = service.generation.Generate()
        for ref in range(1, 257):
            await call.write(begin(ref, max_tokens=120))
        await call.done_writing()
        reading = await new_reading().read(call)
        assert {ref: outcome.text for ref, outcome in reading.outcomes.items()} == dict.fromkeys(
            range(1, 257), letters(5, 120)
        )
        assert all(len(outcome.finished) == len(outcome.accepted) == 1 for outcome in reading.outcomes.values())
        with_output = [message for message in reading.messages if message.deltas or message.finished]
        # A write that is held up, as on a busy machine, makes the next messages smaller.
        num_parts = sum(message.ByteSize() for message in with_output) // HELD_UP_PART_BYTES
        assert len(with_output) <= service.engine.stats().steps + num_parts
        assert max(len(message.deltas) for message in with_output) > 128
        assert max(message.ByteSize() for message in reading.messages) <= 64 << 10

    async def test_one_cancel_leaves_255_whole(self, start_service, new_reading):
        """Shown by 4."""
        service = await start_service(paced())
        call = service.generation.Generate()
        for ref in range(1, 257):
            await call.write(begin(ref, max_tokens=ENDLESS if ref == 77 else 40))
        reading = await new_reading().read_until(call, lambda r: r.outcomes[77].deltas >= 3)
        await call.write(cancel(77))
        await call.done_writing()
        await reading.read(call)
        cancelled = reading.outcomes.pop(77)
        assert letters(5, ENDLESS).startswith(cancelled.text)
        assert len(cancelled.text) < ENDLESS
        [finished] = cancelled.finished
        assert finished.status.code == grpc.StatusCode.CANCELLED.value[0]
        assert finished.reason == pb.FINISH_REASON_CANCELLED
        assert finished.usage.output_tokens >= len(cancelled.text) >= 3
        assert {outcome.text for outcome in reading.outcomes.values()} == {letters(5, 40)}
        assert {outcome.finished[0].status.code for outcome in reading.outcomes.values()} == {0}

    async def test_a_dropped_stream_frees_its_blocks_within_two_steps(self, start_service, new_reading):
        """Shown by 4."""
        service = await start_service(paced(seconds_per_step=0.01))
        call = service.generation.Generate()
        for ref in range(1, 65):
            await call.write(begin(ref, max_tokens=ENDLESS))
        await new_reading().read_until(call, lambda r: sum(o.deltas > 1 for o in r.outcomes.values()) == 64)
        steps_at_drop = None
        abort = service.engine.abort

        def first_abort(*arguments):
            nonlocal steps_at_drop
            steps_at_drop = steps_at_drop or service.engine.stats().steps
            return abort(*arguments)

        service.engine.abort = first_abort
        assert service.blocks_in_use > 0
        call.cancel()
        await until(lambda: service.blocks_in_use == 0)
        assert service.engine.stats().steps - steps_at_drop <= 2
        assert service.engine.stats().requests == 0

    async def test_a_refusal_is_in_band_and_affects_only_its_request(self, start_service, new_reading, details_of):
        service = await start_service()
        frames = [begin(1), begin(2, max_tokens=0), begin(3), begin(4, n=65), begin(5, tenant="other")]
        reading = await new_reading().read(service.generation.Generate(iter(frames)))
        codes = {ref: outcome.finished[0].status.code for ref, outcome in reading.outcomes.items()}
        assert codes == {1: 0, 2: 3, 3: 0, 4: 3, 5: 7}
        refused = reading.outcomes[2].finished[0]
        assert refused.reason == pb.FINISH_REASON_ERROR
        assert not reading.outcomes[2].accepted
        assert not refused.HasField("seed")
        details = details_of(refused.status)
        assert details["BadRequest"].field_violations[0].field == "sampling.max_tokens"
        assert details["RequestInfo"].request_id == refused.request_id
        assert len({outcome.finished[0].request_id for outcome in reading.outcomes.values()}) == 5

    async def test_a_ref_may_be_used_again_after_its_end(self, start_service, new_reading):
        service = await start_service()
        call = service.generation.Generate()
        for _ in range(3):
            await call.write(begin(7))
            reading = await new_reading().read_until(call, lambda r: bool(r.outcomes[7].finished))
            assert reading.outcomes[7].text == letters(5, 5)

    async def test_unknown_refs_are_ignored(self, start_service, new_reading):
        service = await start_service()
        frames = [cancel(1, 2, 3), pb.GenerateRequest(update=pb.GenerationUpdate(ref=9)), begin(1), cancel(5)]
        reading = await new_reading().read(service.generation.Generate(iter(frames)))
        assert reading.outcomes[1].text == letters(5, 5)
        assert set(reading.outcomes) == {1}

    async def test_starts_keep_their_order(self, start_service, new_reading, monkeypatch):
        """Under first come, first served with one row, requests end in the order in which they were sent."""
        monkeypatch.setattr(live, "ORDER_WAIT_S", 10.0)
        service = await start_service(scheduler=SchedulerConfig(max_num_seqs=1))
        frames = [begin(ref, text="x" * (1 + 300 * (ref % 3))) for ref in range(1, 41)]
        reading = await new_reading().read(service.generation.Generate(iter(frames)))
        ended = [finished.ref for message in reading.messages for finished in message.finished]
        assert ended == list(range(1, 41))

    async def test_priority_decides_the_order_under_the_priority_policy(self, start_service, new_reading):
        scheduler = SchedulerConfig(max_num_seqs=1, policy=Policy.PRIORITY)
        service = await start_service(paced(), scheduler)
        call = service.generation.Generate()
        await call.write(begin(6, max_tokens=ENDLESS))
        reading = await new_reading().read_until(call, lambda r: r.outcomes[6].deltas > 0)
        for ref in range(1, 6):
            await call.write(begin(ref, priority=-ref))
        await reading.read_until(call, lambda r: all(r.outcomes[ref].accepted for ref in range(1, 7)))
        await call.write(cancel(6))
        await call.done_writing()
        await reading.read(call)
        ended = [finished.ref for message in reading.messages for finished in message.finished]
        assert [ref for ref in ended if ref != 6] == [5, 4, 3, 2, 1]

    async def test_a_message_that_is_no_protobuf_ends_the_stream_with_invalid_argument(self, start_service):
        service = await start_service()
        for raw in (b"\xff\xff\xff", b"\x0a\x04\x12\x02\xff\xfe"):  # the second one is text that is no UTF-8
            call = service.channel.stream_stream("/penstock.v1.GenerationService/Generate")(iter([raw]))
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call.read()
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    async def test_stalled_streams_do_not_hold_up_others(self, start_service, new_reading):
        service = await start_service()
        target = service.target
        options = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
        async with grpc.aio.insecure_channel(target, options=options) as channel:
            stalled: list[Any] = [channel.stream_stream("/penstock.v1.GenerationService/Generate")() for _ in range(20)]
            output = pb.OutputOptions(logprobs=20)
            for call in stalled:
                await call.write(begin(1, max_tokens=ENDLESS, output=output).SerializeToString())
            reading = await new_reading().read(service.generation.Generate(iter([begin(1, max_tokens=200)])))
            assert reading.outcomes[1].text == letters(5, 200)
            for call in stalled:
                call.cancel()
        await until(lambda: service.engine.stats().requests == 0)


class TestOutput:
    """What a request gets back."""

    @pytest.mark.parametrize(
        ("form", "text", "ids"),
        [
            (pb.OUTPUT_FORMAT_UNSPECIFIED, "fgh", []),
            (pb.OUTPUT_FORMAT_TEXT, "fgh", []),
            (pb.OUTPUT_FORMAT_TOKEN_IDS, "", list(b"fgh")),
            (pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS, "fgh", list(b"fgh")),
        ],
    )
    @pytest.mark.parametrize("stop", [(), ("never",)])
    async def test_forms(self, start_service, new_reading, form, text, ids, stop):
        service = await start_service()
        frame = begin(1, max_tokens=3, output=pb.OutputOptions(format=form), stop=stop)
        outcome = (await new_reading().read(service.generation.Generate(iter([frame])))).outcomes[1]
        assert (outcome.text, outcome.token_ids) == (text, ids)
        response = await service.generation.Complete(pb.CompleteRequest(start=frame.start))
        assert (response.choices[0].text, list(response.choices[0].token_ids)) == (text, ids)

    async def test_a_stop_string_is_cut_off_and_counts(self, start_service):
        service = await start_service()
        frame = begin(1, max_tokens=20, stop=["jk"])
        response = await service.generation.Complete(pb.CompleteRequest(start=frame.start))
        [choice] = response.choices
        assert (choice.text, choice.end.stop) == ("fghi", "jk")
        assert response.finished.reason == choice.end.reason == pb.FINISH_REASON_STOP
        assert response.finished.usage.output_tokens == 6

    async def test_the_models_own_end_stops_unless_it_is_ignored(self, start_service):
        def ends_at_eight(history, sampling):
            return EOS if len(history) == 8 else ord("x")

        service = await start_service(FakeExecutor(vocab_size=258, next_token=ends_at_eight))
        start = begin(1, max_tokens=10).start
        response = await service.generation.Complete(pb.CompleteRequest(start=start))
        assert (response.choices[0].text, response.choices[0].end.stop_token_id) == ("xxx", EOS)
        assert response.finished.usage.output_tokens == 4
        start.sampling.ignore_eos = True
        response = await service.generation.Complete(pb.CompleteRequest(start=start))
        assert response.choices[0].text == "x" * 9
        assert response.finished.reason == pb.FINISH_REASON_LENGTH

    async def test_choices_and_logprobs(self, start_service):
        service = await start_service()
        output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TEXT_AND_TOKEN_IDS, logprobs=2, prompt_logprobs=1)
        frame = begin(1, max_tokens=4, n=3, output=output)
        response = await service.generation.Complete(pb.CompleteRequest(start=frame.start))
        assert [choice.index for choice in response.choices] == [0, 1, 2]
        for choice in response.choices:
            assert choice.text == letters(5, 4)
            assert (len(choice.logprobs.chosen), len(choice.logprobs.top)) == (4, 8)
        assert response.prompt_logprobs.start == 1
        assert len(response.prompt_logprobs.logprobs.chosen) == 4
        assert response.finished.usage.output_tokens == 12

    @pytest.mark.parametrize("format_", [pb.OUTPUT_FORMAT_TEXT, pb.OUTPUT_FORMAT_TOKEN_IDS])
    async def test_logprobs_have_the_texts_that_describe_tokens_returns(self, start_service, new_reading, format_):
        async def texts_of(token_ids):
            described = await service.tokenizer.DescribeTokens(pb.DescribeTokensRequest(token_ids=token_ids))
            return [token.text for token in described.tokens]

        service = await start_service(FakeExecutor(vocab_size=258, next_token=lambda *_: 0xC3))
        output = pb.OutputOptions(format=format_, logprobs=2, prompt_logprobs=1, include_token_texts=True)
        frame = begin(1, text="abé", max_tokens=3, n=2, output=output)
        whole = await service.generation.Complete(pb.CompleteRequest(start=frame.start))
        reading = await new_reading().read(service.generation.Generate(iter([frame])))
        deltas = [delta for message in reading.messages for delta in message.deltas]
        of_prompt = [part for message in reading.messages for part in message.prompt_logprobs]
        outputs = [each.logprobs for each in (*whole.choices, *deltas)]
        assert sum(len(each.chosen_texts) for each in outputs) == 2 * 2 * 3
        for logprobs in outputs:
            assert list(logprobs.chosen_texts) == [b"\xc3"] * len(logprobs.chosen)
            assert list(logprobs.top_texts) == await texts_of(logprobs.top_token_ids)
        for parts in ([whole.prompt_logprobs], of_prompt):
            assert [text for part in parts for text in part.logprobs.chosen_texts] == [b"b", b"\xc3", b"\xa9"]
            for part in parts:
                assert list(part.logprobs.top_texts) == await texts_of(part.logprobs.top_token_ids)
        frame.start.output.include_token_texts = False
        whole = await service.generation.Complete(pb.CompleteRequest(start=frame.start))
        for logprobs in (whole.choices[0].logprobs, whole.prompt_logprobs.logprobs):
            assert logprobs.chosen
            assert not logprobs.chosen_texts
            assert not logprobs.top_texts

    async def test_ids_without_a_token_have_no_text(self, start_service):
        service = await start_service(FakeExecutor(vocab_size=258, next_token=lambda *_: 255))
        output = pb.OutputOptions(logprobs=20, include_token_texts=True)
        response = await service.generation.Complete(pb.CompleteRequest(start=begin(max_tokens=1, output=output).start))
        logprobs = response.choices[0].logprobs
        assert max(logprobs.top_token_ids) > 257
        assert [not text for text in logprobs.top_texts] == [each > 257 for each in logprobs.top_token_ids]

    async def test_long_prompt_logprobs_come_in_parts(self, start_service, new_reading):
        service = await start_service()
        frame = begin(1, text="x" * 3000, max_tokens=1, output=pb.OutputOptions(prompt_logprobs=20))
        reading = await new_reading().read(service.generation.Generate(iter([frame])))
        parts = [part for message in reading.messages for part in message.prompt_logprobs]
        position = 1
        for part in parts:
            assert part.start == position
            position += len(part.logprobs.chosen)
        assert position == 3000
        assert max(message.ByteSize() for message in reading.messages) <= 64 << 10

    async def test_the_seed_is_reported(self, start_service):
        service = await start_service()
        response = await service.generation.Complete(pb.CompleteRequest(start=begin(seed=2**63 - 1).start))
        assert response.finished.seed == 2**63 - 1

    async def test_the_callers_id_is_echoed(self, start_service, new_reading):
        service = await start_service()
        frames = [begin(1, client_request_id="mine")]
        reading = await new_reading().read(service.generation.Generate(iter(frames)))
        assert reading.outcomes[1].accepted[0].client_request_id == "mine"
