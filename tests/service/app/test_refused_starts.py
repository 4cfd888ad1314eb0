"""A stream on which one request after the other is refused is read slowly; nothing else is."""

import asyncio

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.request import RefusalKind, Refused
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.rpc import frame_dispatcher

FOR_EVER_S = 60.0
PAUSE_S = 0.0123
NUM_FREE = 4


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Refusals that cost no pause."""
    monkeypatch.setattr(frame_dispatcher, "MAX_REFUSED_IN_A_ROW", NUM_FREE)


@pytest.fixture
def endless_pauses(monkeypatch):
    """A stream that is paused at all does not end while the test waits."""
    monkeypatch.setattr(frame_dispatcher, "REFUSED_PAUSE_S", FOR_EVER_S)


@pytest.fixture
def pauses(monkeypatch):
    """The pauses that streams have begun: by count, since a loop's timer may fire a little early."""
    begun = []
    sleep = asyncio.sleep

    def note(delay, *args):
        if delay == PAUSE_S:
            begun.append(delay)
        return sleep(delay, *args)

    monkeypatch.setattr(frame_dispatcher, "REFUSED_PAUSE_S", PAUSE_S)
    monkeypatch.setattr(asyncio, "sleep", note)
    return begun


def begin(ref, top_p=1.0, **fields):
    sampling = pb.SamplingParams(max_tokens=1, top_p=top_p)
    prompt = fields if "chat" in fields else {"text": "x"}
    return pb.GenerateRequest(start=pb.GenerationStart(ref=ref, sampling=sampling, **prompt))


def codes(reading):
    return {ref: outcome.finished[0].status.code for ref, outcome in reading.outcomes.items()}


async def test_all_are_refused_one_by_one_and_slowly(start_service, new_reading, pauses):
    service = await start_service()
    frames = [*(begin(ref, top_p=2.0) for ref in range(1, 21)), begin(21)]
    reading = await new_reading().read(service.generation.Generate(iter(frames)))
    assert len(pauses) == 20 - NUM_FREE
    assert codes(reading) == dict.fromkeys(range(1, 21), grpc.StatusCode.INVALID_ARGUMENT.value[0]) | {21: 0}


MANY = pb.Chat(messages=[pb.ChatMessage(role="user")] * 50_000)
REFUSED = {
    "update": pb.GenerateRequest(update=pb.GenerationUpdate(ref=1, priority=5000)),
    "append": pb.GenerateRequest(append=pb.GenerationAppend(ref=1)),
    "append to nothing": pb.GenerateRequest(append=pb.GenerationAppend(ref=2, text="x")),
    "replacement": pb.GenerateRequest(append=pb.GenerationAppend(ref=1, text="x", replace_from=0)),
    "commit": pb.GenerateRequest(commit=pb.GenerationCommit(ref=1)),
    "cancel": pb.GenerateRequest(cancel=pb.GenerationCancel(refs=range(65_537))),
    "duplicate": begin(1),
    "no ref": begin(0),
    "empty": pb.GenerateRequest(),
    "too many fields": begin(2, chat=MANY),
}


@pytest.mark.parametrize("what", REFUSED)
async def test_other_refused_frames_count(start_service, new_reading, pauses, what):
    service = await start_service(FakeExecutor(vocab_size=258, seconds_per_step=0.01))
    bad = REFUSED[what]
    start = begin(1)
    start.start.sampling.MergeFrom(pb.SamplingParams(max_tokens=4000, ignore_eos=True))
    call = service.generation.Generate(iter([start, *[bad] * 20]))
    await new_reading().read_until(
        call, lambda reading: sum(len(message.frames_refused) for message in reading.messages) == 20
    )
    assert len(pauses) == 20 - NUM_FREE
    call.cancel()


@pytest.mark.usefixtures("endless_pauses")
async def test_one_that_is_taken_begins_the_count_anew(start_service, new_reading):
    service = await start_service()
    frames = [begin(ref, top_p=2.0 if ref % NUM_FREE else 1.0) for ref in range(1, 1 + 10 * NUM_FREE)]
    reading = await new_reading().read(service.generation.Generate(iter(frames)))
    assert len(codes(reading)) == 10 * NUM_FREE


@pytest.mark.usefixtures("endless_pauses")
async def test_what_a_full_queue_refuses_does_not_slow_a_stream(start_service, new_reading, monkeypatch):
    service = await start_service()

    def submit(request):
        raise Refused(RefusalKind.QUEUE_FULL, "full", 10)

    monkeypatch.setattr(service.engine, "submit", submit)
    frames = [begin(ref) for ref in range(1, 1 + 10 * NUM_FREE)]
    reading = await new_reading().read(service.generation.Generate(iter(frames)))
    assert set(codes(reading).values()) == {grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]}
