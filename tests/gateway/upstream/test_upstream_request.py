"""What comes for an HTTP request, handed on where it arrives."""

import asyncio
import inspect
from typing import Any

import grpc
import pytest

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed, StreamBroken
from penstock.clients.events import Delta, Finished, FinishReason, Timings, Usage
from penstock.clients.failover.carried_request import CarriedRequest
from penstock.clients.gateway.upstream.eagerly import run_eagerly
from penstock.clients.gateway.upstream.upstream_request import Abandoned, UpstreamRequest

FINISHED = Finished(FinishReason.LENGTH, Usage(), Timings())


class FakeCaller:
    """A caller whose requests go nowhere."""

    def carry(self, start, receiver):
        return lambda: None

    def done(self):
        pass


class BrokenStream:
    """A stream whose replica dies when the test calls ``die``."""

    def __init__(self):
        self.receivers: list[Any] = []

    def carry(self, start, receiver):
        self.receivers.append(receiver)
        return len(self.receivers)

    def cancel(self, ref):
        pass

    def die(self):
        for receiver in self.receivers:
            receiver.fail(StreamBroken(grpc.StatusCode.UNAVAILABLE, "the service ended the stream"))


class Carrier:
    """A caller whose requests move; counts those that have ended."""

    def __init__(self, stream):
        self.stream = stream
        self.num_done = 0

    def carry(self, start, receiver):
        return CarriedRequest(start, receiver, lambda avoid=None: self.stream, num_targets=2).cancel

    def done(self):
        self.num_done += 1


class Handler:
    """Notes the texts of each call; waits in each until it may go on."""

    def __init__(self):
        self.calls: list[str] = []
        self.may_go_on = asyncio.Event()
        self.may_go_on.set()

    async def __call__(self, arrivals):
        self.calls.append("".join(event.text for _, event in arrivals if isinstance(event, Delta)))
        await self.may_go_on.wait()


@pytest.fixture
async def passing():
    caller: Any = FakeCaller()
    upstream_request = UpstreamRequest(caller, [pb.GenerationStart()])
    upstream_request.send_requests()
    handler = Handler()
    over = asyncio.create_task(upstream_request.pass_on(handler))
    await asyncio.sleep(0)
    yield upstream_request, handler, over
    over.cancel()
    upstream_request.close()


async def test_an_event_is_handled_where_it_arrives(passing):
    upstream_request, handler, over = passing
    upstream_request.arrive(0, Delta("a", [1]))
    upstream_request.arrive(0, Delta("b", [1]))
    assert handler.calls == ["a", "b"]
    upstream_request.arrive(0, FINISHED)
    await over


async def test_what_comes_while_the_handler_waits_is_its_next_call(passing):
    upstream_request, handler, over = passing
    handler.may_go_on.clear()
    for text in "abc":
        upstream_request.arrive(0, Delta(text, [1]))
    await asyncio.sleep(0)
    assert handler.calls == ["a"]
    handler.may_go_on.set()
    upstream_request.arrive(0, FINISHED)
    await over
    assert handler.calls == ["a", "bc"]


async def test_a_nudge_is_a_call_with_nothing(passing):
    upstream_request, handler, _ = passing
    upstream_request.nudge()
    assert handler.calls == [""]


async def test_a_handlers_exception_reaches_only_the_waiting_caller():
    caller: Any = FakeCaller()
    upstream_request = UpstreamRequest(caller, [pb.GenerationStart()])
    upstream_request.send_requests()

    async def fail(arrivals):
        raise ValueError(arrivals[0][1].text)

    upstream_request.arrive(0, Delta("a", [1]))
    with pytest.raises(ValueError, match="a"):
        await upstream_request.pass_on(fail)
    upstream_request.arrive(0, Delta("b", [1]))
    upstream_request.close()


async def test_a_failure_comes_after_the_last_event(passing):
    upstream_request, handler, over = passing
    handler.may_go_on.clear()
    upstream_request.arrive(0, Delta("a", [1]))
    upstream_request.arrive(0, Delta("b", [1]))
    upstream_request.fail(0, RequestFailed(grpc.StatusCode.UNAVAILABLE, "gone"))
    handler.may_go_on.set()
    with pytest.raises(RequestFailed, match="gone"):
        await over
    assert handler.calls == ["a", "b"]


async def test_a_caller_who_goes_ends_the_wait(passing):
    upstream_request, _, over = passing
    upstream_request.abandon()
    with pytest.raises(Abandoned):
        await over


async def test_who_waits_no_more_ends_the_handler(passing):
    upstream_request, handler, over = passing
    handler.may_go_on.clear()
    upstream_request.arrive(0, Delta("a", [1]))
    upstream_request.arrive(0, Delta("b", [1]))
    over.cancel()
    await asyncio.wait({over})
    handler.may_go_on.set()
    await asyncio.sleep(0.01)
    assert handler.calls == ["a"]


async def test_a_coroutine_that_need_not_wait_needs_no_task():
    done = []

    async def work(turns):
        for _ in range(turns):
            await asyncio.sleep(0)
        done.append(turns)

    assert run_eagerly(work(0)) is None
    assert done == [0]
    task = run_eagerly(work(2))
    assert task is not None
    assert inspect.iscoroutine(task.get_coro()), "tasks accept no generators since Python 3.12"
    await task
    assert done == [0, 2]


async def test_a_caller_that_goes_while_its_requests_are_about_to_move():
    stream = BrokenStream()
    caller: Any = Carrier(stream)
    upstream_request = UpstreamRequest(caller, [pb.GenerationStart(), pb.GenerationStart()])
    upstream_request.send_requests()
    waiting = asyncio.create_task(upstream_request.collect())
    await asyncio.sleep(0)
    stream.die()
    upstream_request.abandon()
    with pytest.raises(Abandoned):
        await waiting
    await asyncio.sleep(0)
    assert caller.num_done == 2
    assert len(stream.receivers) == 2  # neither has moved


class QuickHandler:
    """Handles every text except those that need the other handler."""

    def __init__(self, *needs_other):
        self.texts: list[str] = []
        self._needs_other = needs_other

    def __call__(self, index, event):
        if not isinstance(event, Delta) or event.text in self._needs_other:
            return False
        if event.text == "error":
            raise ValueError(event.text)
        self.texts.append(event.text)
        return True


@pytest.fixture
async def passing_now():
    caller: Any = FakeCaller()
    upstream_request = UpstreamRequest(caller, [pb.GenerationStart()])
    upstream_request.send_requests()
    handler, quick = Handler(), QuickHandler("b")
    over = asyncio.create_task(upstream_request.pass_on(handler, quick))
    await asyncio.sleep(0)
    yield upstream_request, handler, quick, over
    over.cancel()
    upstream_request.close()


async def test_the_quick_handler_is_first(passing_now):
    upstream_request, handler, quick, over = passing_now
    for text in "abc":
        upstream_request.arrive(0, Delta(text, [1]))
    assert (quick.texts, handler.calls) == (["a", "c"], ["b"])
    upstream_request.arrive(0, FINISHED)
    await over


async def test_the_quick_handler_overtakes_nothing(passing_now):
    upstream_request, handler, quick, over = passing_now
    handler.may_go_on.clear()
    for text in "bac":
        upstream_request.arrive(0, Delta(text, [1]))
    assert (quick.texts, handler.calls) == ([], ["b"])
    handler.may_go_on.set()
    upstream_request.arrive(0, FINISHED)
    await over
    assert (quick.texts, handler.calls) == ([], ["b", "ac"])


async def test_a_quick_handlers_exception_ends_the_passing(passing_now):
    upstream_request, handler, quick, over = passing_now
    for text in ("error", "a"):
        upstream_request.arrive(0, Delta(text, [1]))
    with pytest.raises(ValueError, match="error"):
        await over
    assert (quick.texts, handler.calls) == ([], ["a"])
