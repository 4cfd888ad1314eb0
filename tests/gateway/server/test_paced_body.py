"""When the parts of streamed bodies are written, and in which order with what the app sends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from waiting import until

from penstock.clients.gateway.responses.http_response import BODY_WRITER
from penstock.clients.gateway.server.paced_body import BodyPacer, PacedBody, with_paced_body


class Connection:
    """A cycle of uvicorn whose transport keeps what is written."""

    def __init__(self):
        self.written: list[bytes] = []
        self.response_complete = self.disconnected = False
        self.transport = SimpleNamespace(write=self.written.append, is_closing=lambda: self.disconnected)
        self.flow = SimpleNamespace(write_paused=False)
        self.chunked_encoding: bool | None = True

    def body(self, pacer, *, has_begun=True):
        cycle: Any = self
        body = PacedBody(cycle, pacer)
        if has_begun:
            body.write(b"first")
            self.written.clear()
        return body

    async def run(self, app):
        cycle: Any = self
        scope: Any = {}

        async def send(message):
            self.written.append(message["body"])

        receive: Any = None
        await with_paced_body(app, cycle, BodyPacer())(scope, receive, send)
        assert BODY_WRITER not in scope


@pytest.fixture
def connection():
    return Connection()


async def test_the_first_part_is_written_at_once(connection):
    body = connection.body(BodyPacer(), has_begun=False)
    body.write(b"a")
    assert connection.written == [b"1\r\na\r\n"]
    body.write(b"b")
    assert len(connection.written) == 1


async def test_the_parts_of_a_turn_are_one_write(connection):
    body = connection.body(BodyPacer())
    for data in (b"a", b"b" * 15):
        body.write(data)
    assert not connection.written
    await until(lambda: connection.written)
    assert connection.written == [b"10\r\na" + b"b" * 15 + b"\r\n"]


async def test_after_a_write_there_is_a_pause(connection):
    other = Connection()
    pacer = BodyPacer(pause_s=3600, max_pause_s=3600)
    first, second = connection.body(pacer), other.body(pacer)
    first.write(b"a")
    second.write(b"b")
    await until(lambda: other.written)
    assert connection.written == [b"1\r\na\r\n"]
    first.write(b"c")
    for _ in range(9):
        await asyncio.sleep(0)
    assert len(connection.written) == 1
    first.flush()
    assert connection.written == [b"1\r\na\r\n", b"1\r\nc\r\n"]


async def test_parts_that_wait_for_the_pause_are_written_after_it(connection):
    body = connection.body(BodyPacer(pause_s=0.01))
    for data in (b"a", b"b"):
        body.write(data)
        await until(lambda data=data: any(data in part for part in connection.written))
    assert connection.written == [b"1\r\na\r\n", b"1\r\nb\r\n"]


async def test_parts_precede_what_is_sent_later(connection):
    async def app(scope, receive, send):
        scope[BODY_WRITER].write(b"a")
        await send({"type": "http.response.body", "body": b"sent"})
        scope[BODY_WRITER].write(b"b")

    await connection.run(app)
    assert connection.written == [b"1\r\na\r\n", b"sent", b"1\r\nb\r\n"]


async def test_parts_are_written_before_a_connection_is_cut(connection):
    async def app(scope, receive, send):
        scope[BODY_WRITER].write(b"a")
        raise ValueError("cut")

    with pytest.raises(ValueError, match="cut"):
        await connection.run(app)
    assert connection.written == [b"1\r\na\r\n"]


async def test_nothing_is_written_to_a_lost_connection(connection):
    body = connection.body(BodyPacer())
    body.write(b"a")
    connection.disconnected = True
    body.flush()
    assert not connection.written


async def test_parts_are_for_open_chunked_bodies_of_clients_that_read(connection):
    body = connection.body(BodyPacer())
    assert body.is_ready
    for owner, name, value in (
        (connection, "chunked_encoding", None),  # it has not begun
        (connection, "chunked_encoding", False),
        (connection, "response_complete", True),
        (connection, "disconnected", True),
        (connection.flow, "write_paused", True),
    ):
        before = getattr(owner, name)
        setattr(owner, name, value)
        assert not body.is_ready
        setattr(owner, name, before)
    assert body.is_ready
