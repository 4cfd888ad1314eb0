"""Calls of methods that there are not; test_broken_connections.py makes those that grpc.aio would not survive."""

from penstock.service.transport import early_refusals, transport
from penstock.v1 import generation_pb2 as pb


async def test_a_grpc_that_makes_servers_in_another_way_is_told_of(start_service, monkeypatch, caplog):
    """And the service serves: what could not be made takes nothing with it."""
    refuse = early_refusals.refuse_early
    monkeypatch.setattr(transport, "refuse_early", lambda server, *arguments: refuse(server, *arguments, "new"))
    service = await start_service()
    assert "no UTF-8" in caplog.text
    answer = await service.generation.Complete(pb.CompleteRequest(start=pb.Start(text="hi")))
    assert answer.finished.status.code == 0
