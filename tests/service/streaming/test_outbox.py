"""The outbox alone, over a writer that notes what it is given: when messages leave, and what is in them."""

import asyncio

import pytest
from waiting import turns, until

import penstock.v1 as pb
from penstock.scheduler.plan import TokenLogprobs
from penstock.scheduler.request import EngineFinishReason, PromptLogprobsChunk, SequenceDelta, StopMatch
from penstock.service.errors import Reason, ServiceError
from penstock.service.streaming import pacing as alarm_module
from penstock.service.streaming.buffer_budget import WritePacer
from penstock.service.streaming.pending_message import MAX_MESSAGE_BYTES, MAX_PART_BYTES, PART_BYTES, OutputForm

TEXT = OutputForm(text=True, token_ids=False)
BOTH = OutputForm(text=True, token_ids=True)


def delta(text="a", ids=(97,), choice=0, **fields):
    return SequenceDelta(choice, list(ids), text, **fields)


def logprobs(num_tokens, num_top):
    return TokenLogprobs(
        num_top,
        [float(i) for i in range(num_tokens)],
        list(range(num_tokens * num_top)),
        [float(i) for i in range(num_tokens * num_top)],
    )


async def test_a_step_is_one_message(make_outbox):
    outbox, writer, _ = make_outbox()
    await turns()
    for step in range(3):
        for ref in range(256):
            outbox.delta(ref, delta(f"{step}"), TEXT, False)
        outbox.finished(pb.Finished(ref=999))
        await turns()
        assert len(writer.messages) == step + 1
        assert [d.ref for d in writer.messages[-1].deltas] == list(range(256))


async def test_what_waits_of_a_choice_becomes_one_delta(make_outbox):
    outbox, writer, _ = make_outbox(run=False)
    outbox.delta(1, delta("ab", [1, 2], logprobs=logprobs(2, 1)), BOTH, False)
    outbox.delta(2, delta("x", [9]), TEXT, False)
    outbox.delta(1, delta("c", [3], choice=1), BOTH, False)
    end = StopMatch(EngineFinishReason.STOP, stop="!")
    outbox.delta(1, delta("d", [4], logprobs=logprobs(1, 1), end=end), BOTH, False)
    outbox.close()
    await outbox.run()
    [message] = writer.messages
    first, other, second = message.deltas
    assert (first.ref, first.choice, first.text, list(first.token_ids)) == (1, 0, "abd", [1, 2, 4])
    assert (list(first.logprobs.chosen), first.logprobs.num_top, len(first.logprobs.top)) == ([0, 1, 0], 1, 3)
    assert (first.end.reason, first.end.stop) == (pb.FINISH_REASON_STOP, "!")
    assert (other.ref, other.text, list(other.token_ids)) == (2, "x", [])
    assert (second.ref, second.choice, second.text) == (1, 1, "c")


async def test_nothing_is_sent_of_what_is_not_wanted(make_outbox):
    outbox, writer, _ = make_outbox(run=False)
    outbox.delta(1, delta("", [7]), TEXT, False)
    outbox.delta(1, delta("text", []), OutputForm(text=False, token_ids=True), False)
    outbox.close()
    await outbox.run()
    assert not writer.messages


async def test_no_message_is_above_64_kib_and_nothing_is_lost(make_outbox):
    outbox, writer, _ = make_outbox(run=False)
    outbox.prompt_logprobs(1, PromptLogprobsChunk(1, range(2048), logprobs(2048, 20)), BOTH)
    for ref in range(2000):
        outbox.delta(ref, delta("täxt" * 25, range(100)), BOTH, False)
    outbox.close()
    await outbox.run()
    assert len(writer.messages) > 3
    assert max(message.ByteSize() for message in writer.messages) <= MAX_MESSAGE_BYTES
    parts = [part for message in writer.messages for part in message.prompt_logprobs]
    chosen = [value for part in parts for value in part.logprobs.chosen]
    assert chosen == [float(i) for i in range(2048)]
    assert [top for part in parts for top in part.logprobs.top_token_ids] == list(range(2048 * 20))
    assert [part.start for part in parts] == [1 + chosen.index(part.logprobs.chosen[0]) for part in parts]
    assert [d.ref for message in writer.messages for d in message.deltas] == list(range(2000))


async def sent(make_outbox, delta, form):
    """One delta alone, and then an end, as messages of the outbox."""
    outbox, writer, _ = make_outbox(run=False)
    outbox.delta(1, delta, form, False)
    outbox.finished(pb.Finished(ref=1))
    outbox.close()
    await outbox.run()
    assert max(message.ByteSize() for message in writer.messages) <= MAX_MESSAGE_BYTES
    assert [bool(message.finished) for message in writer.messages] == [False] * (len(writer.messages) - 1) + [True]
    return [part for message in writer.messages for part in message.deltas]


async def test_a_delta_above_64_kib_is_split_where_tokens_end(make_outbox):
    """What a stop string of 1,024 bytes held back, with all that a token may have with it."""
    end = StopMatch(EngineFinishReason.STOP, stop="!" * 1024)
    likely = logprobs(1000, 20)
    held = SequenceDelta(0, list(range(1000)), "x" * 1000, likely, end)
    parts = await sent(make_outbox, held, BOTH)
    assert len(parts) > 2
    assert [i for part in parts for i in part.token_ids] == held.token_ids
    assert [value for part in parts for value in part.logprobs.chosen] == likely.chosen
    assert [i for part in parts for i in part.logprobs.top_token_ids] == likely.top_token_ids
    assert [value for part in parts for value in part.logprobs.top] == likely.top
    for part in parts:
        assert part.logprobs.num_top == 20
        assert len(part.token_ids) == len(part.logprobs.chosen) == len(part.logprobs.top) / 20
    assert [part.text for part in parts] == [""] * (len(parts) - 1) + [held.text]
    assert [part.end.stop for part in parts] == [""] * (len(parts) - 1) + ["!" * 1024]
    assert [part.HasField("end") for part in parts] == [False] * (len(parts) - 1) + [True]


async def test_texts_of_tokens_count(make_outbox):
    def text_of(token_id):
        return bytes([token_id % 256]) * (token_id % 700)

    form, likely = BOTH._replace(token_text=text_of), logprobs(500, 20)
    expected = [text_of(each) for each in range(500)], [text_of(each) for each in likely.top_token_ids]
    held = SequenceDelta(0, list(range(500)), "x" * 500, likely, StopMatch(EngineFinishReason.LENGTH))
    parts = [part.logprobs for part in await sent(make_outbox, held, form)]
    outbox, writer, _ = make_outbox(run=False)
    outbox.prompt_logprobs(1, PromptLogprobsChunk(1, range(500), likely), form)
    outbox.close()
    await outbox.run()
    assert max(message.ByteSize() for message in writer.messages) <= MAX_MESSAGE_BYTES
    of_prompt = [part.logprobs for message in writer.messages for part in message.prompt_logprobs]
    for some in (parts, of_prompt):
        assert [text for part in some for text in part.chosen_texts] == expected[0]
        assert [text for part in some for text in part.top_texts] == expected[1]
        assert all(len(part.chosen) == len(part.chosen_texts) for part in some)
        assert [value for part in some for value in part.chosen] == likely.chosen


@pytest.mark.parametrize("char", ["x", "ä", "\N{GRINNING FACE}"])
async def test_a_text_above_64_kib_is_split_between_characters(make_outbox, char):
    text = f"{char * 70_000}."
    end = StopMatch(EngineFinishReason.LENGTH)
    for form, ids in ((TEXT, []), (BOTH, list(range(30_000)))):
        parts = await sent(make_outbox, SequenceDelta(0, list(range(30_000)), text, end=end), form)
        assert "".join(part.text for part in parts) == text
        assert all(part.text or part.token_ids for part in parts)
        assert [i for part in parts for i in part.token_ids] == ids
        assert [part.HasField("end") for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize(("more", "is_whole"), [(0, True), (1, False)])
async def test_a_delta_at_the_bound_is_whole(make_outbox, more, is_whole):
    parts = await sent(make_outbox, delta("x" * (MAX_PART_BYTES - PART_BYTES + more), []), TEXT)
    assert (len(parts) == 1) == is_whole


async def test_accepted_goes_with_the_first_token(make_outbox):
    outbox, writer, _ = make_outbox()
    await turns()
    outbox.accepted(pb.Accepted(ref=1))
    await turns()
    assert not writer.messages
    outbox.delta(1, delta(), TEXT, True)
    await turns()
    [message] = writer.messages
    assert message.accepted
    assert message.deltas


async def test_accepted_does_not_wait_for_long(make_outbox):
    outbox, writer, _ = make_outbox()
    await turns()
    outbox.accepted(pb.Accepted(ref=1))
    await asyncio.sleep(0.05)
    assert len(writer.messages) == 1


async def test_many_streams_take_turns_but_first_tokens_and_ends_go_at_once(make_outbox):
    pacer = WritePacer(write_cost_s=1.0)
    outbox, writer, _ = make_outbox(pacer)
    outbox.opened()
    await turns()
    outbox.delta(1, delta("a"), TEXT, True)
    await turns()
    assert len(writer.messages) == 1
    outbox.delta(1, delta("b"), TEXT, False)
    outbox.delta(1, delta("c"), TEXT, False)
    await turns()
    assert len(writer.messages) == 1
    outbox.finished(pb.Finished(ref=1))
    await turns()
    assert [d.text for d in writer.messages[1].deltas] == ["bc"]
    assert writer.messages[1].finished


async def test_streams_that_wait_leave_in_the_same_turn_of_the_loop(make_outbox, monkeypatch):
    monkeypatch.setattr(alarm_module, "TURN_S", 1e4)
    pacer = WritePacer(write_cost_s=5.0)
    pacer.add_streams(1)
    waiting = []
    for _ in range(3):
        outbox, _, _ = make_outbox(pacer)
        await turns()
        await asyncio.sleep(0.002)
        outbox.delta(1, delta(), TEXT, False)
        waiting.append(outbox._write_timer)
    timers = [write_timer._timer.when() for write_timer in waiting]
    assert len({write_timer._due for write_timer in waiting}) == 3
    assert len(set(timers)) == 1
    assert timers[0] % 1e4 == 0
    assert all(write_timer._due <= timers[0] for write_timer in waiting)


async def test_only_streams_with_live_requests_count(make_outbox):
    pacer = WritePacer(write_cost_s=1.0)
    outboxes = [make_outbox(pacer) for _ in range(3)]
    await turns()
    assert pacer.interval == 0
    for outbox, _, _ in outboxes:
        outbox.opened()
        outbox.opened()
    assert pacer.interval == 3
    outboxes[0][0].finished(pb.Finished())
    assert pacer.interval == 3
    outboxes[0][0].finished(pb.Finished())
    assert pacer.interval == 2
    outboxes[1][2].cancel()  # its stream was dropped
    outboxes[2][0].fail(ServiceError(Reason.INTERNAL))
    await turns()
    assert pacer.interval == 0
    outboxes[1][0].finished(pb.Finished())
    assert pacer.interval == 0


async def test_an_idle_stream_has_a_heartbeat(make_outbox):
    outbox, writer, _ = make_outbox(heartbeat_s=0.05)
    await asyncio.sleep(0.1)
    assert not writer.messages  # a stream that may still be refused says nothing
    outbox.begin_beats()
    await until(lambda: len(writer.messages) >= 2)
    assert all(message.heartbeat.state == pb.SERVICE_STATE_SERVING for message in writer.messages)


async def test_an_idle_stream_without_heartbeats_sends_nothing(make_outbox):
    outbox, writer, _ = make_outbox(heartbeat_s=0.02)
    outbox.begin_beats(sends=False)
    await asyncio.sleep(0.1)
    assert not writer.messages


async def test_a_busy_stream_has_none(make_outbox):
    outbox, writer, _ = make_outbox(heartbeat_s=1.0)
    outbox.begin_beats()
    for _ in range(150):
        outbox.delta(1, delta(), TEXT, False)
        await asyncio.sleep(0.01)
    assert not any(message.HasField("heartbeat") for message in writer.messages)


@pytest.mark.parametrize("is_blocked", [True, False])
async def test_fail_ends_the_stream_at_once(make_outbox, is_blocked):
    outbox, writer, task = make_outbox()
    await turns()
    if is_blocked:
        writer.open.clear()
        outbox.finished(pb.Finished())
        await turns()
    outbox.fail(ServiceError(Reason.DUPLICATE_REF))
    outbox.fail(ServiceError(Reason.INTERNAL))
    with pytest.raises(ServiceError) as error:
        await task
    assert error.value.reason is Reason.DUPLICATE_REF
    assert task.cancelling() == 0


async def test_a_cancel_is_not_taken_for_a_failure(make_outbox):
    outbox, writer, task = make_outbox()
    writer.open.clear()
    outbox.finished(pb.Finished())
    await turns()
    outbox.fail(ServiceError(Reason.INTERNAL))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_last_words_come_after_all_that_waits(make_outbox):
    outbox, writer, task = make_outbox()
    outbox.delta(1, delta(), TEXT, False)
    outbox.close(ServiceError(Reason.DRAINING))
    with pytest.raises(ServiceError) as error:
        await task
    assert error.value.reason is Reason.DRAINING
    assert len(writer.messages) == 1
    outbox.delta(1, delta(), TEXT, False)
    assert not outbox._has_more
