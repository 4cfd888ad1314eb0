"""A request that supersedes an older one, on streams that note what they are sent."""

import asyncio
from typing import Any

import grpc
import pytest

import penstock.v1 as pb
from penstock.clients.errors import RequestFailed
from penstock.clients.events import Accepted, Finished, FinishReason, Timings, Usage
from penstock.clients.failover.carried_request import CarriedRequest

GONE = RequestFailed(grpc.StatusCode.UNAVAILABLE, "the stream broke")
REFUSED = RequestFailed(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is empty")


class Stream:
    """A stream to a replica."""

    def __init__(self) -> None:
        self.starts: list[pb.GenerationStart] = []
        self.cancelled: list[int] = []

    def carry(self, start: pb.GenerationStart, receiver: object) -> int:
        start.ref = 10 * len(self.starts) + 10
        self.starts.append(start)
        return start.ref

    def cancel(self, ref: int) -> None:
        self.cancelled.append(ref)


class Ends:
    """A receiver that notes whether its request was superseded."""

    def __init__(self) -> None:
        self.superseded: list[bool] = []

    def put(self, event: object) -> None:
        pass

    def fail(self, failure: RequestFailed) -> None:
        self.superseded.append(failure.finished is not None and failure.finished.superseded)


class Client:
    """Sends requests to the replicas that a test names."""

    def __init__(self) -> None:
        self.next: list[Stream] = []

    def send(self, stream: Stream, older: CarriedRequest | None = None) -> tuple[CarriedRequest, Ends]:
        self.next.append(stream)
        ends = Ends()
        open_stream: Any = lambda avoid=None: self.next.pop(0)  # noqa: E731
        return CarriedRequest(pb.GenerationStart(), ends, open_stream, num_targets=2, older=older), ends

    async def move(self, request: CarriedRequest, stream: Any) -> None:
        self.next.append(stream)
        request.fail(GONE)
        while request.stream is not stream:  # noqa: ASYNC110 - there is no event for it
            await asyncio.sleep(0)


def accept(request: CarriedRequest) -> None:
    request.put(Accepted("id", 3, 0, 0))


def end(request: CarriedRequest) -> None:
    """What a service sends when it has cancelled a request."""
    failure = RequestFailed(grpc.StatusCode.CANCELLED, "cancelled")
    failure.finished = Finished(FinishReason.CANCELLED, Usage(), Timings())
    request.fail(failure)


@pytest.fixture
def client():
    return Client()


async def test_the_service_ends_a_request_of_the_same_stream(client):
    stream = Stream()
    older, _ = client.send(stream)
    newer, _ = client.send(stream, older)
    accept(newer)
    assert (stream.starts[1].supersedes, stream.cancelled) == (older.ref, [])


async def test_the_client_ends_a_request_of_another_stream(client):
    first, second = Stream(), Stream()
    older, ends = client.send(first)
    newer, _ = client.send(second, older)
    assert (second.starts[0].supersedes, first.cancelled) == (0, [])
    accept(newer)
    assert first.cancelled == [older.ref]
    end(older)
    assert ends.superseded == [True]


async def test_a_request_that_waits_to_move_ends(client):
    first, second = Stream(), Stream()
    older, ends = client.send(first)
    older.fail(GONE)
    newer, _ = client.send(first, older)
    assert first.starts[1].supersedes == 0
    accept(newer)
    await asyncio.sleep(0)
    assert ends.superseded == [True]
    assert client.next == second.starts == []


@pytest.mark.parametrize("is_older_first", [True, False])
async def test_both_move_before_the_newer_one_is_accepted(client, is_older_first):
    """The replica that takes both over can end the older one if that one is there already."""
    first, second = Stream(), Stream()
    older, ends = client.send(first)
    newer, _ = client.send(first, older)
    for request in (older, newer) if is_older_first else (newer, older):
        await client.move(request, second)
    assert [start.supersedes for start in second.starts] == ([0, older.ref] if is_older_first else [0, 0])
    accept(older)
    accept(newer)
    assert second.cancelled == ([] if is_older_first else [older.ref])
    end(older)
    assert ends.superseded == [not is_older_first]  # otherwise the service says so


async def test_the_newest_of_three_ends_both_others(client):
    """The one between was never accepted, so the first one was still running."""
    first, second = Stream(), Stream()
    oldest, _ = client.send(first)
    older, _ = client.send(first, oldest)
    newest, _ = client.send(second, older)
    accept(newest)
    assert sorted(first.cancelled) == sorted([oldest.ref, older.ref])


async def test_the_older_one_continues_if_the_newer_one_is_refused(client):
    first, second = Stream(), Stream()
    older, ends = client.send(first)
    newer, _ = client.send(second, older)
    newer.fail(REFUSED)
    end(older)
    assert (first.cancelled, ends.superseded) == ([], [False])
