"""Calls of methods that there are not; test_broken_connections.py makes those that grpc.aio would not survive."""

import asyncio
import time
from typing import Any

import grpc
from waiting import until

import penstock.v1 as pb
from penstock.service.transport import early_refusals, transport
from penstock.service.transport.connections import Connections


async def test_a_grpc_with_another_server_constructor_is_logged(start_service, monkeypatch, caplog):
    """And the service serves: what could not be made takes nothing with it."""
    refuse = early_refusals.refuse_early
    monkeypatch.setattr(transport, "refuse_early", lambda server, *arguments: refuse(server, *arguments, "new"))
    service = await start_service()
    assert "not UTF-8" in caplog.text
    answer = await service.generation.Complete(pb.CompleteRequest(start=pb.GenerationStart(text="hi")))
    assert answer.finished.status.code == 0


async def test_a_burst_of_calls_is_accepted_within_a_few_turns_of_the_loop(start_service, monkeypatch):
    """gRPC by itself takes seven turns for each call, so a burst would wait behind all that is done in the turns."""
    service = await start_service()
    loop, turn, began = asyncio.get_running_loop(), 0, []
    begin_call = Connections.begin_call

    def begin(connections, *arguments):
        began.append(turn)
        begin_call(connections, *arguments)

    def count():
        nonlocal turn
        turn += 1
        loop.call_soon(count)

    monkeypatch.setattr(Connections, "begin_call", begin)
    with grpc.insecure_channel(service.target) as channel:
        call: Any = channel.unary_unary("/penstock.v1.ModelService/GetModel")
        await loop.run_in_executor(None, call, b"")  # the connection is made
        calls = [call.future(b"") for _ in range(early_refusals.CALLS_AT_ONCE)]
        del began[:]
        time.sleep(0.5)  # noqa: ASYNC251 - the loop is busy while all of them arrive
        loop.call_soon(count)
        await until(lambda: all(each.done() for each in calls))
    assert len(began) == len(calls)
    assert began[-1] - began[0] < 3 * len(calls)
