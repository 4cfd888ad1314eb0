"""A list of targets: what is one, and which of its targets the next call goes to."""

import asyncio
from typing import Any

import grpc
import pytest
from fake_service import FakeService

from penstock.clients.failover.target_list import (
    TargetList,
    any_is_serving,
    channel_for_stream,
    open_targets,
    split_targets,
)
from penstock.clients.health import is_serving


@pytest.mark.parametrize(
    ("target", "targets"),
    [
        ("a:1", ["a:1"]),
        ("a:1,b:2", ["a:1", "b:2"]),
        (" a:1, unix:/b ,", ["a:1", "unix:/b"]),
        ("ipv4:10.0.0.1:1,10.0.0.2:2", ["ipv4:10.0.0.1:1,10.0.0.2:2"]),
        ("ipv6:[::1]:1,[::1]:2", ["ipv6:[::1]:1,[::1]:2"]),
        ("", [""]),
    ],
)
def test_a_list_has_commas(target, targets):
    assert split_targets(target) == targets


def target_list(target: str) -> TargetList:
    targets = open_targets(target, None)
    assert isinstance(targets, TargetList)
    return targets


async def test_several_streams_leave_a_target_only_once():
    """Each finds out for itself that its target is gone."""
    async with target_list("127.0.0.1:1,127.0.0.1:2,127.0.0.1:3") as targets:
        first = channel_for_stream(targets)
        seconds = [channel_for_stream(targets, first) for _ in range(4)]
        assert len(set(map(id, seconds))) == 1
        assert seconds[0] is not first
        third = channel_for_stream(targets, seconds[0])
        assert channel_for_stream(targets, third) is first


async def test_a_call_goes_to_the_first_target_that_answers():
    async with FakeService().serving() as service, target_list(f"127.0.0.1:1,{service.target}") as targets:
        assert await is_serving(targets, timeout=60)
        assert channel_for_stream(targets) is targets._channels[1]


async def test_a_target_that_lost_its_connection_is_not_tried_first():
    async with FakeService().serving() as other:
        async with FakeService().serving() as service:
            targets = target_list(f"{service.target},{other.target}")
            assert await is_serving(targets, timeout=60)
            assert channel_for_stream(targets) is targets._channels[0]
        async with targets, asyncio.timeout(60):
            while targets._channels[0].get_state() is grpc.ChannelConnectivity.READY:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            assert channel_for_stream(targets) is targets._channels[1]


async def test_a_target_that_is_listed_twice_has_two_connections():
    """Behind a balancer, the second one may lead to another replica."""
    peers = set[str]()

    async def note_peer(request: bytes, context: Any) -> bytes:
        peers.add(context.peer())
        return request

    server = grpc.aio.server()
    method: Any = grpc.unary_unary_rpc_method_handler(note_peer)
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("a.Service", {"Call": method})])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with target_list(f"127.0.0.1:{port},127.0.0.1:{port}") as targets:
        first = channel_for_stream(targets)
        for channel in (first, channel_for_stream(targets, first)):
            call: Any = channel.unary_unary("/a.Service/Call")
            await call(b"")
    await server.stop(None)
    assert len(peers) == 2


async def test_a_list_serves_while_one_of_its_targets_drains():
    async with FakeService().serving() as draining, FakeService().serving() as other:
        draining.health = b"\x08\x02"  # NOT_SERVING
        async with target_list(f"{draining.target},127.0.0.1:1,{other.target}") as targets:
            assert await any_is_serving(targets, timeout=60)
            assert channel_for_stream(targets) is targets._channels[2]
            other.health = draining.health
            assert not await any_is_serving(targets, timeout=60)
