"""A connection that is no agent's ends after bounded time and bytes, and keeps no agent out."""

import asyncio

import pytest
from hosts.agents import TOKEN, joining, leading, new_agent
from waiting import until

from penstock.models.executor.join import leader as leader_module, link as link_module
from penstock.models.executor.join.agent import HostAgent
from penstock.models.executor.join.link import MAX_UNPROVEN_BYTES, PREAMBLE
from penstock.models.executor.join.listener import MAX_STRANGERS
from penstock.models.executor.join.token import AGENT, LEADER, is_proven, prove
from penstock.models.executor.join_messages import AgentHello, JoinProof
from penstock.models.executor.wire import HEADER, FrameKind, encode_frame
from penstock.scheduler.worker_config import WorkerConfig

HELLO = AgentHello("1.2.3", "0" * 32, bytes(32))


async def said_to(leader, data: bytes) -> bytes:
    """All that a leader answers to some bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", leader.port)
    try:
        writer.write(data)
        answer = await reader.read()
    except OSError:
        answer = b""
    writer.close()
    return answer


MALFORMED = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
    "another version": b"penstock-join/9\n",
    "an unknown kind": PREAMBLE + HEADER.pack(0, 99),
    "an oversized frame": PREAMBLE + HEADER.pack(MAX_UNPROVEN_BYTES + 1, FrameKind.HELLO),
    "another frame first": PREAMBLE + encode_frame(FrameKind.CONFIG, WorkerConfig(model="m")),
    "no msgpack": PREAMBLE + HEADER.pack(4, FrameKind.HELLO) + b"\xc1\xc1\xc1\xc1",
    "a short nonce": PREAMBLE + encode_frame(FrameKind.HELLO, {"version": "1", "identity": "0" * 32, "nonce": b"1"}),
    "an end in a frame": PREAMBLE + HEADER.pack(4, FrameKind.HELLO) + b"\x81",
    "a proof that is none": PREAMBLE
    + encode_frame(FrameKind.HELLO, HELLO)
    + encode_frame(FrameKind.PROOF, JoinProof(bytes(32), has_token=True)),
    "an empty proof": PREAMBLE
    + encode_frame(FrameKind.HELLO, HELLO)
    + encode_frame(FrameKind.PROOF, JoinProof(has_token=True)),
}


@pytest.mark.parametrize("case", MALFORMED)
async def test_malformed_bytes_end_only_their_connection(case, caplog, monkeypatch):
    monkeypatch.setattr(leader_module, "HANDSHAKE_S", 0.3)
    monkeypatch.setattr(link_module, "LINGER_S", 0.1)
    async with leading() as leader, joining(new_agent(leader.port)):
        await leader.gather()
        await said_to(leader, MALFORMED[case])
        await until(lambda: "refused a host that tried to join: 127.0.0.1: " in caplog.text)
        assert leader.nodes[0].is_ready
    assert "Traceback" not in caplog.text
    if "proof" in case:
        assert "wrong token" in caplog.text


async def test_connections_that_say_nothing_keep_no_agent_out(caplog, monkeypatch):
    async with leading() as leader:
        idle = [await asyncio.open_connection("127.0.0.1", leader.port) for _ in range(MAX_STRANGERS + 8)]
        async with joining(new_agent(leader.port)):
            await leader.gather()
        assert [await reader.read() for reader, _ in idle[:8]] == [b""] * 8
        assert len(leader._listener._strangers) <= MAX_STRANGERS
        for _, writer in idle:
            writer.close()
        await until(lambda: not leader._listener._connections)


async def test_a_connection_that_says_nothing_ends(caplog, monkeypatch):
    monkeypatch.setattr(leader_module, "HANDSHAKE_S", 0.2)
    async with leading() as leader:
        for beginning in (b"", PREAMBLE[:3], PREAMBLE + HEADER.pack(64, FrameKind.HELLO)[:3]):
            assert await said_to(leader, beginning) == b""
        assert "127.0.0.1: it did not show within 0 s that it may join" in caplog.text


async def test_a_refusal_is_logged_once_a_minute(caplog, monkeypatch):
    monkeypatch.setattr(link_module, "LINGER_S", 0.1)
    async with leading() as leader:
        for _ in range(3):
            await said_to(leader, MALFORMED["HTTP"])
        assert caplog.text.count("it is not an agent of penstock") == 1
        for number in range(40):
            leader._note_refusal(f"10.0.0.{number}", "wrong token")
        assert len(leader._refusals) == leader_module.MAX_REFUSALS


def test_a_proof_is_of_one_connection_one_direction_and_one_first_frame():
    token, nonce, frame = b"t" * 32, b"n" * 32, encode_frame(FrameKind.HELLO, HELLO)
    proof = prove(token, AGENT, frame, nonce)
    assert is_proven(token, AGENT, frame, nonce, proof)
    for other in (
        (b"u" * 32, AGENT, frame, nonce),
        (token, LEADER, frame, nonce),
        (token, AGENT, frame[:-1], nonce),
        (token, AGENT, frame, b"m" * 32),
    ):
        assert not is_proven(*other, proof)
    assert not is_proven(token, AGENT, frame, nonce, b"")


async def test_the_token_never_crosses_the_network(monkeypatch):
    sent = bytearray()
    write = link_module.JoinLink._write

    def recorded(link, data):
        sent.extend(data)
        write(link, data)

    monkeypatch.setattr(link_module.JoinLink, "_write", recorded)
    async with leading() as leader, joining(new_agent(leader.port)):
        await leader.gather()
    assert len(sent) > 200
    assert TOKEN not in bytes(sent)
    assert TOKEN.hex().encode() not in bytes(sent)


async def test_a_malformed_frame_of_an_agent_ends_only_its_connection(caplog, monkeypatch):
    links = []
    serve = HostAgent._serve

    def captured(agent, link, welcome):
        links.append(link)
        return serve(agent, link, welcome)

    monkeypatch.setattr(HostAgent, "_serve", captured)
    async with leading() as leader, joining(new_agent(leader.port)):
        await leader.gather()
        links[0].send_frame(HEADER.pack(0, 99))
        await until(lambda: "its agent is lost: unknown frame of kind 99 with 0 bytes" in caplog.text)
        await leader.gather()
        assert len(links) == 2
    assert "Traceback" not in caplog.text
