"""A reader that is slow stalls its stream, loses nothing, and is cut off only if it takes too little for too long."""

import asyncio

import pytest
from waiting import turns

import penstock.v1 as pb
from penstock.scheduler.request import SequenceDelta
from penstock.service.errors import Reason, ServiceError
from penstock.service.streaming import buffer_budget as backlog_module, outbox as outbox_module
from penstock.service.streaming.buffer_budget import BufferBudget
from penstock.service.streaming.pending_message import OutputForm

TEXT = OutputForm(text=True, token_ids=False)


def put(outbox, text, *token_ids):
    outbox.delta(1, SequenceDelta(0, list(token_ids), text), TEXT, False)


def pending(outbox):
    return outbox._buffer_budget.num_bytes


async def fill(outbox, num_bytes):
    """In parts of 1 KB, as steps bring them."""
    for _ in range(num_bytes // 1000):
        put(outbox, "x" * 952)
        await asyncio.sleep(0)


@pytest.fixture
def small(monkeypatch):
    """Bounds that a test fills at once."""
    monkeypatch.setattr(backlog_module, "MAX_STREAM_BYTES", 200_000)
    monkeypatch.setattr(outbox_module, "MAX_STALLED_BYTES", 400_000)
    monkeypatch.setattr(outbox_module, "BLOCKED_S", 0.0)


async def test_a_stream_that_is_not_read_is_stalled_and_goes_on_when_it_has_drained(make_outbox, small):
    outbox, writer, task = make_outbox()
    writer.open.clear()
    await fill(outbox, 199_000)
    assert (writer.stalls, outbox.is_stalled) == ([], False)
    await fill(outbox, 101_000)  # what was under way
    assert (writer.stalls, outbox.is_stalled) == ([True], True)
    assert pending(outbox) > 280_000
    writer.pace = asyncio.Event()
    writer.open.set()
    while pending(outbox) > 100_000:
        assert outbox.is_stalled
        await turns(2)
        writer.pace.set()
    await turns()
    assert (writer.stalls, outbox.is_stalled) == ([True, False], False)
    pace, writer.pace = writer.pace, None
    pace.set()
    outbox.close()
    await task
    assert sum(len(d.text) for message in writer.messages for d in message.deltas) == 300 * 952
    assert pending(outbox) == 0


async def test_a_stall_is_reported_after_the_call_and_never_during_it(make_outbox, small):
    outbox, writer, _ = make_outbox(run=False)
    put(outbox, "x" * 50_000)
    for _ in range(5):
        put(outbox, "x" * 50_000)
        assert not writer.stalls
    await turns(1)
    assert writer.stalls == [True]


async def test_a_stalled_reader_that_takes_nothing_is_cut_off_and_holds_no_memory(make_outbox, small, monkeypatch):
    monkeypatch.setattr(outbox_module, "STALLED_S", 0.05)
    monkeypatch.setattr(outbox_module, "SLOWEST_BYTES_PER_S", 1e9)
    outbox, writer, task = make_outbox()
    writer.open.clear()
    await fill(outbox, 250_000)
    assert not task.done()
    with pytest.raises(ServiceError) as error:
        await task
    assert error.value.reason is Reason.READER_TOO_SLOW
    assert len(writer.messages) == 1
    assert not outbox._has_more
    assert pending(outbox) == 0


@pytest.mark.parametrize("sends", [True, False])
async def test_the_unread_rest_of_an_ended_request_is_cut_off(make_outbox, monkeypatch, sends):
    """It is too little for a stall."""
    monkeypatch.setattr(outbox_module, "STALLED_S", 0.05)
    outbox, writer, task = make_outbox(heartbeat_s=0.02)
    outbox.begin_beats(sends=sends)
    writer.open.clear()
    outbox.opened()
    outbox.finished(pb.Finished())
    outbox.close()
    with pytest.raises(ServiceError) as error:
        await task
    assert error.value.reason is Reason.READER_TOO_SLOW


async def test_a_slow_reader_that_takes_something_is_not_cut_off(make_outbox, small, monkeypatch):
    """A message of 64 KB at 1 KB/s takes longer than the time in which a reader must take something."""
    monkeypatch.setattr(outbox_module, "STALLED_S", 0.05)
    monkeypatch.setattr(outbox_module, "SLOWEST_BYTES_PER_S", 10_000)
    outbox, writer, task = make_outbox()
    writer.pace = asyncio.Event()
    await fill(outbox, 250_000)
    writer.pace.set()  # takes the first part, which left alone
    for _ in range(3):
        await turns()
        assert outbox.is_stalled
        await asyncio.sleep(0.1)
        assert not task.done()
        writer.pace.set()
    while outbox.is_stalled:
        await turns(2)
        writer.pace.set()
    await turns()
    assert writer.stalls == [True, False]
    assert not task.done()


async def test_messages_behind_one_that_is_held_up_are_small(make_outbox, monkeypatch):
    monkeypatch.setattr(outbox_module, "BLOCKED_S", 0.0)
    outbox, writer, task = make_outbox()
    writer.open.clear()
    await fill(outbox, 200_000)
    writer.open.set()
    outbox.close()
    await task
    assert max(message.ByteSize() for message in writer.messages) <= outbox_module.HELD_UP_PART_BYTES
    assert len(writer.messages) > 20


async def test_a_stalled_stream_that_fills_on_is_cut_off_at_once(make_outbox, small):
    outbox, writer, task = make_outbox()
    writer.open.clear()
    await fill(outbox, 500_000)
    with pytest.raises(ServiceError) as error:
        await task
    assert error.value.reason is Reason.READER_TOO_SLOW
    assert pending(outbox) == 0


async def test_all_streams_together_have_a_bound_and_the_fullest_is_stalled_first(make_outbox, monkeypatch):
    monkeypatch.setattr(backlog_module, "MAX_TOTAL_BYTES", 2_000_000)
    monkeypatch.setattr(backlog_module, "REQUEST_BYTES", 4_000_000)
    buffer_budget = BufferBudget()
    streams = [make_outbox(buffer_budget=buffer_budget) for _ in range(12)]
    for _, writer, _ in streams:
        writer.open.clear()
    first = streams[0][0]
    while not first.is_stalled:
        await fill(first, 1_000)
    assert 990_000 <= buffer_budget.num_bytes < 1_010_000  # alone it has half
    while not all(outbox.is_stalled for outbox, _, _ in streams[:10]):
        for outbox, _, _ in streams[:10]:
            if not outbox.is_stalled:
                await fill(outbox, 1_000)
    assert 1_890_000 < buffer_budget.num_bytes <= 2_000_000
    reader, writer, _ = streams[11]
    writer.open.set()
    await fill(reader, 1_000_000)
    assert not reader.is_stalled  # it is read, however slow the others are
    held = [task for _, _, task in streams]
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert buffer_budget.num_bytes == 0


async def test_a_message_that_cannot_be_made_ends_the_stream(make_outbox, monkeypatch):
    """Also if it is made early, because the next one begins. The part that begins it is not the cause."""
    outbox, writer, task = make_outbox()
    writer.open.clear()
    await turns()
    monkeypatch.setattr(outbox, "_encode", lambda batch: 1 / 0)
    await fill(outbox, 200_000)
    writer.open.set()
    with pytest.raises(ZeroDivisionError):
        await task
    assert pending(outbox) == 0


async def test_a_reader_that_comes_back_gets_everything(make_outbox):
    outbox, writer, task = make_outbox()
    writer.open.clear()
    for step in range(200):
        put(outbox, f"{step},", 97)
        await asyncio.sleep(0)
    writer.open.set()
    outbox.close()
    await task
    text = "".join(d.text for message in writer.messages for d in message.deltas)
    assert text == "".join(f"{step}," for step in range(200))
    assert len(writer.messages) < 10
