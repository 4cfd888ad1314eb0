"""Live requests that are changed, within two steps, or refused in band; wherever they are on their way."""

import asyncio

import grpc
import pytest

import penstock.v1 as pb
from penstock.scheduler.config import SchedulerConfig, TenantLimits
from penstock.scheduler.policy import Policy
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.requests.live.lifecycle import MAX_EARLY_UPDATES

ENDLESS = 4000
INVALID = grpc.StatusCode.INVALID_ARGUMENT.value[0]
DEADLINE_EXCEEDED = grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
RESOURCE_EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


def begin(ref=1, text="hello", max_tokens=ENDLESS, min_tokens=0, n=None, **fields):
    sampling = pb.SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, n=n, ignore_eos=True)
    output = pb.OutputOptions(format=pb.OUTPUT_FORMAT_TOKEN_IDS)
    return pb.GenerateRequest(start=pb.GenerationStart(ref=ref, text=text, sampling=sampling, output=output, **fields))


def update(ref=1, **fields):
    return pb.GenerateRequest(update=pb.GenerationUpdate(ref=ref, **fields))


def paced(seconds_per_step=0.002, **options):
    """A worker that takes its time, so that a request lives long enough to be changed."""
    return FakeExecutor(vocab_size=258, seconds_per_step=seconds_per_step, **options)


class Stream:
    """One multiplexed stream, and what it brought."""

    def __init__(self, service, reading):
        self.service = service
        self.call = service.generation.Generate()
        self.reading = reading

    async def send(self, *frames):
        for frame in frames:
            await self.call.write(frame)

    async def until(self, enough):
        async with asyncio.timeout(120):
            await self.reading.read_until(self.call, lambda reading: bool(enough()))

    def outcome(self, ref=1):
        return self.reading.outcomes[ref]

    async def finished(self, ref=1):
        await self.until(lambda: self.outcome(ref).finished)
        return self.outcome(ref).finished[0]

    @property
    def refused(self):
        return [refused for message in self.reading.messages for refused in message.frames_refused]


@pytest.fixture
def open_stream(start_service, new_reading):
    async def open_stream(executor=None, scheduler=None, **config):
        service = await start_service(executor or paced(), scheduler, **config)
        return Stream(service, new_reading())

    return open_stream


class TestMaxTokens:
    """A new limit on the output."""

    async def test_below_what_is_out_ends_with_length_within_two_steps(self, open_stream):
        stream = await open_stream()
        await stream.send(begin())
        await stream.until(lambda: len(stream.outcome().token_ids) > 20)
        steps = []
        change = stream.service.engine.update

        def watched(*arguments):
            steps.append(stream.service.engine.stats().steps)
            return change(*arguments)

        stream.service.engine.update = watched
        await stream.send(update(max_tokens=10))
        finished = await stream.finished()
        assert finished.reason == pb.FINISH_REASON_LENGTH
        assert finished.status.code == 0
        assert finished.usage.output_tokens == len(stream.outcome().token_ids) > 10
        await asyncio.sleep(0.02)
        assert stream.service.engine.stats().steps - steps[0] <= 2
        assert not stream.refused

    async def test_above_what_is_out_is_kept_to_the_token(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(1, max_tokens=300), begin(2))
        await stream.until(lambda: stream.outcome(1).deltas and stream.outcome(2).deltas)
        await stream.send(update(1, max_tokens=330), update(2, max_tokens=320))
        for ref, num_tokens in ((1, 330), (2, 320)):
            assert (await stream.finished(ref)).reason == pb.FINISH_REASON_LENGTH
            assert len(stream.outcome(ref).token_ids) == num_tokens

    async def test_of_each_choice(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(n=3))
        await stream.until(lambda: stream.outcome().deltas > 10)
        await stream.send(update(max_tokens=2))
        assert (await stream.finished()).reason == pb.FINISH_REASON_LENGTH


class TestDeadline:
    """A new deadline, from now on."""

    async def test_an_earlier_one_ends_the_request(self, open_stream):
        stream = await open_stream()
        await stream.send(begin(1), begin(2, timeout_ms=60_000))
        await stream.until(lambda: stream.outcome(1).deltas and stream.outcome(2).deltas)
        await stream.send(update(1, timeout_ms=20), update(2, timeout_ms=20))
        for ref in (1, 2):
            assert (await stream.finished(ref)).status.code == DEADLINE_EXCEEDED

    async def test_a_later_one_lets_it_go_on(self, open_stream):
        stream = await open_stream(paced(0.01))
        for ref, timeout_ms in enumerate((400, 4000), 1):  # longer where a busy machine takes the update too late
            max_tokens = timeout_ms * 3 // 20
            await stream.send(begin(ref, max_tokens=max_tokens, timeout_ms=timeout_ms))
            await stream.send(update(ref, timeout_ms=600_000))
            code = (await stream.finished(ref)).status.code
            if code == 0:
                break
        assert code == 0
        assert len(stream.outcome(ref).token_ids) == max_tokens


@pytest.fixture
async def queue(open_stream):
    """A stream on which request 4 runs and 1 to 3 wait."""
    stream = await open_stream(scheduler=SchedulerConfig(max_num_seqs=1, policy=Policy.PRIORITY))
    await stream.send(begin(4), *(begin(ref, max_tokens=5) for ref in (1, 2, 3)))
    await stream.until(lambda: stream.outcome(4).deltas and all(stream.outcome(ref).accepted for ref in (1, 2, 3)))
    return stream


class TestQueued:
    """A request that waits."""

    async def test_priority(self, queue):
        await queue.send(update(3, priority=-1), update(1, priority=7))
        await queue.send(update(4, max_tokens=1))
        await queue.until(lambda: all(queue.outcome(ref).finished for ref in range(1, 5)))
        ended = [finished.ref for message in queue.reading.messages for finished in message.finished]
        assert ended == [4, 3, 2, 1]

    async def test_max_tokens_and_deadline(self, queue):
        await queue.send(update(1, max_tokens=9), update(2, timeout_ms=1))
        assert (await queue.finished(2)).status.code == DEADLINE_EXCEEDED
        assert not queue.outcome(2).token_ids
        await queue.send(update(4, max_tokens=1))
        assert (await queue.finished(1)).usage.output_tokens == 9


async def test_a_preempted_request(open_stream):
    """Blocks for one of two: whoever lost its own is changed like any other."""
    stream = await open_stream(paced(0.003, num_blocks=20, max_model_len=300))
    await stream.send(begin(1, max_tokens=270), begin(2, max_tokens=270))
    await stream.until(lambda: stream.outcome(1).deltas and stream.outcome(2).deltas)
    while not stream.service.engine.stats().preemptions:  # noqa: ASYNC110 - the engine tells nobody
        await asyncio.sleep(0.001)
    await stream.send(update(1, max_tokens=280), update(2, max_tokens=260))
    for ref, num_tokens in ((1, 280), (2, 260)):
        assert (await stream.finished(ref)).reason == pb.FINISH_REASON_LENGTH
        assert len(stream.outcome(ref).token_ids) == num_tokens
    assert sum(stream.outcome(ref).finished[0].timings.preemptions for ref in (1, 2)) > 0


class TestRefused:
    """What cannot be done is told, and changes nothing: not even what could be."""

    @pytest.mark.parametrize(
        ("fields", "field"),
        [
            ({"timeout_ms": 0}, "timeout_ms"),
            ({"timeout_ms": 86_400_001}, "timeout_ms"),
            ({"priority": 1001}, "priority"),
            ({"priority": -1001}, "priority"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 2}, "max_tokens"),
        ],
    )
    async def test_bounds(self, open_stream, details_of, fields, field):
        stream = await open_stream()
        await stream.send(begin(1, min_tokens=3))
        await stream.until(lambda: stream.outcome(1).deltas)
        await stream.send(update(1, **({"timeout_ms": 1} | fields)))
        await stream.until(lambda: stream.refused)
        await stream.send(update(1, max_tokens=3))
        finished = await stream.finished(1)
        [refused] = stream.refused
        assert (refused.ref, refused.status.code) == (1, INVALID)
        details = details_of(refused.status)
        assert details["BadRequest"].field_violations[0].field == field
        assert details["RequestInfo"].request_id == finished.request_id
        assert finished.status.code == 0

    async def test_the_caps_of_its_tenant(self, open_stream):
        stream = await open_stream(scheduler=SchedulerConfig(default_tenant=TenantLimits(max_tokens=1000)))
        await stream.send(begin(1, max_tokens=900))
        await stream.until(lambda: stream.outcome(1).deltas)
        await stream.send(update(1, max_tokens=1001, timeout_ms=1), update(1, max_tokens=1000))
        await stream.until(lambda: stream.refused)
        await stream.send(update(1, max_tokens=1))
        assert (await stream.finished(1)).reason == pb.FINISH_REASON_LENGTH
        assert len(stream.refused) == 1


@pytest.fixture
async def preparing(open_stream, monkeypatch):
    """A stream whose requests stay in preparation until ``go`` is set."""
    stream = await open_stream()
    stream.go = asyncio.Event()
    request_builder = stream.service.server._running.generation._request_context.request_builder
    prepare = request_builder.prepare

    async def when_told(*arguments):
        await stream.go.wait()
        return await prepare(*arguments)

    monkeypatch.setattr(request_builder, "prepare", when_told)
    return stream


async def come_in(stream):
    """Waits until the service has taken all that was sent before."""
    await stream.send(begin(99, max_tokens=0))  # refused at once
    await stream.finished(99)


class TestInPreparation:
    """A request whose prompt is not tokenized yet."""

    async def test_it_is_changed_as_soon_as_it_is_queued(self, preparing):
        await preparing.send(begin(1, max_tokens=5, timeout_ms=60_000))
        await preparing.send(update(1, max_tokens=7), update(1, priority=3), update(1, max_tokens=9))
        await come_in(preparing)
        preparing.go.set()
        assert (await preparing.finished(1)).usage.output_tokens == 9

    async def test_a_deadline_holds_at_once(self, preparing):
        await preparing.send(begin(1), begin(2, timeout_ms=20), update(1, timeout_ms=20))
        for ref in (1, 2):
            assert (await preparing.finished(ref)).status.code == DEADLINE_EXCEEDED
        for ref, timeout_ms in ((3, 500), (4, 5000)):  # longer if a busy machine takes the update too late
            await preparing.send(begin(ref, timeout_ms=timeout_ms, max_tokens=5), update(ref, timeout_ms=600_000))
            await asyncio.sleep(timeout_ms / 1000)
            if not preparing.outcome(ref).finished:
                break
        preparing.go.set()
        assert (await preparing.finished(ref)).usage.output_tokens == 5

    async def test_an_impossible_update_is_refused_later_and_changes_nothing(self, preparing):
        await preparing.send(begin(1, max_tokens=5, min_tokens=3), update(1, max_tokens=2, timeout_ms=1))
        await come_in(preparing)
        assert not preparing.refused
        await asyncio.sleep(0.01)
        preparing.go.set()
        assert (await preparing.finished(1)).usage.output_tokens == 5
        [refused] = preparing.refused
        assert (refused.ref, refused.status.code) == (1, INVALID)

    async def test_the_last_deadline_counts(self, preparing):
        await preparing.send(
            begin(1, max_tokens=5), update(1, max_tokens=6, timeout_ms=1), update(1, timeout_ms=600_000)
        )
        await come_in(preparing)
        preparing.go.set()
        assert (await preparing.finished(1)).usage.output_tokens == 6

    async def test_so_many_and_no_more(self, preparing):
        await preparing.send(begin(1, max_tokens=5), *[update(1, max_tokens=6)] * (MAX_EARLY_UPDATES + 2))
        await preparing.until(lambda: len(preparing.refused) == 2)
        assert {refused.status.code for refused in preparing.refused} == {RESOURCE_EXHAUSTED}
        preparing.go.set()
        assert (await preparing.finished(1)).usage.output_tokens == 6

    async def test_one_that_is_cancelled_has_nothing_to_change(self, preparing):
        await preparing.send(
            begin(1), update(1, max_tokens=4092), pb.GenerateRequest(cancel=pb.GenerationCancel(refs=[1]))
        )
        assert (await preparing.finished(1)).status.code == grpc.StatusCode.CANCELLED.value[0]
        await preparing.send(update(1, max_tokens=5))
        await come_in(preparing)
        assert not preparing.refused

    async def test_an_unread_request_is_queued_as_held(self, preparing):
        await preparing.send(begin(1, max_tokens=5))
        await come_in(preparing)
        [live] = preparing.service.server._running.generation._live
        live.hold(True)
        preparing.go.set()
        await preparing.until(lambda: preparing.outcome(1).accepted)
        await asyncio.sleep(0.02)
        assert not preparing.service.engine.stats().running
        live.hold(False)
        assert (await preparing.finished(1)).usage.output_tokens == 5
