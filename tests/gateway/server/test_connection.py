"""What a connection may send that is no request, and what becomes of the request before: over real sockets."""

import contextlib
import json

import pytest
from waiting import until
from wire.raw_http import connected

from penstock.clients.gateway.server.connection import _MAX_HEAD_BYTES

COMPLETIONS = "/v1/completions"
VERSION = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD_S = "penstock.clients.gateway.server.http_server._HEAD_S"
MUCH = 5 * _MAX_HEAD_BYTES + 1
"""Too much even where as much as is read at once came with the end of a head."""


def head_of(kind, *lines):
    told = (f"POST {COMPLETIONS} HTTP/1.1", "Host: x", f"Content-Type: {kind}", *lines, "", "")
    return "\r\n".join(told).encode()


CHUNKED = head_of("application/json", "Transfer-Encoding: chunked")
NO_JSON = head_of("text/plain", "Content-Length: 9")
"""It is answered with 415 before its body comes."""


def post(*, padding=b"", **fields):
    body = json.dumps({"prompt": "a", "ignore_eos": True} | fields).encode() + padding
    return head_of("application/json", f"Content-Length: {len(body)}") + body


def filled(begin, num_bytes=_MAX_HEAD_BYTES + 1):
    return begin + b"a" * (num_bytes - len(begin))


async def answer_from(reader):
    """The head of the next answer, and its body, whose length it tells."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return head, await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))


def num_gone(gateway):
    """How many requests had callers that left before."""
    labels = {"route": COMPLETIONS, "code": "499"}
    return gateway.app.state.gateway_metrics.registry.get_sample_value("penstock_gateway_requests_total", labels)


@pytest.mark.parametrize("begin", [b"GET /", b"GET / HTTP/1.1\r\nHost: x\r\nX-", b"GET / HTTP/1.1\r\nHost: "])
@pytest.mark.parametrize("before", [b"", VERSION])
async def test_a_head_without_end_is_refused(gateway, begin, before):
    async with connected(gateway) as (reader, writer):
        if before:
            writer.write(before)
            assert (await answer_from(reader))[0].startswith(b"http/1.1 200 ")
        writer.write(filled(begin))
        answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"\r\nconnection: close\r\n" in answer


@pytest.mark.parametrize(("before", "begin"), [(b"", b"1;"), (b"1\r\n{\r\n", b"1;"), (b"2\r\n{}\r\n0\r\n", b"X-")])
async def test_a_chunks_extension_or_trailers_without_end_cost_the_request(gateway, before, begin):
    async with connected(gateway) as (reader, writer):
        writer.write(CHUNKED + before + filled(begin, MUCH))
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    await until(lambda: num_gone(gateway) == 1)


async def test_a_chunks_extension_without_end_after_the_answer_is_refused(gateway):
    async with connected(gateway) as (reader, writer):
        writer.write(head_of("text/plain", "Transfer-Encoding: chunked"))
        assert (await answer_from(reader))[0].startswith(b"http/1.1 415 ")
        writer.write(filled(b"1;"))
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")


async def test_all_that_belongs_to_requests_may_be_larger(gateway):
    chunk = b"1;" + b"a" * 1000 + b"\r\n%c\r\n"
    body = json.dumps({"prompt": "a"}).encode() + b" " * 100
    async with connected(gateway) as (reader, writer):
        for sent in (
            post(max_tokens=1, padding=b" " * MUCH),
            filled(VERSION[:-2] + b"X: ", _MAX_HEAD_BYTES - 4) + b"\r\n\r\n",
            CHUNKED + b"".join([chunk % byte for byte in body]) + b"0\r\n\r\n",
        ):
            writer.write(sent)
            assert (await answer_from(reader))[0].startswith(b"http/1.1 200 ")


async def test_who_sends_a_body_after_its_answer_holds_no_place(start_gateway, monkeypatch):
    monkeypatch.setattr(HEAD_S, 0.05)
    async with connected(await start_gateway()) as (reader, writer):
        writer.write(NO_JSON)
        assert (await answer_from(reader))[0].startswith(b"http/1.1 415 ")
        writer.write(b"1")
        assert await reader.read() == b""


async def test_a_body_that_comes_late_is_no_harm_to_the_next_request(start_gateway, monkeypatch):
    monkeypatch.setattr(HEAD_S, 0.3)
    gateway = await start_gateway(seconds_per_step=0.01)
    async with connected(gateway) as (reader, writer):
        writer.write(NO_JSON)
        assert (await answer_from(reader))[0].startswith(b"http/1.1 415 ")
        (connection,) = gateway.app.state.gateway_metrics._connections
        assert connection._due is None
        writer.write(b"1")
        await until(lambda: connection._due is not None)
        writer.write(b"2" * 8 + b"\r\n" + post(max_tokens=60))  # some old clients send an empty line after a body
        head, body = await answer_from(reader)
        assert head.startswith(b"http/1.1 200 ")
        assert b"connection: close" not in head
        assert json.loads(body)["usage"]["completion_tokens"] == 60
        writer.write(VERSION)
        assert (await answer_from(reader))[0].startswith(b"http/1.1 200 ")


@pytest.mark.parametrize("follows", [VERSION, VERSION[:9], post(max_tokens=4), b"nonsense\r\n\r\n", VERSION * 9])
async def test_what_is_sent_before_the_answer_is_not_taken_and_the_connection_ends(gateway, follows):
    async with connected(gateway) as (reader, writer):
        writer.write(post(max_tokens=20) + follows)
        head, body = await answer_from(reader)
        assert head.startswith(b"http/1.1 200 ")
        assert b"\r\nconnection: close\r\n" in head
        assert json.loads(body)["usage"]["completion_tokens"] == 20
        assert await reader.read() == b""
    assert gateway.engine.stats().output_tokens == 20


async def test_an_empty_line_after_a_request_is_none(gateway):
    async with connected(gateway) as (reader, writer):
        for _ in range(2):
            writer.write(post(max_tokens=4) + b"\r\n")
            head, _ = await answer_from(reader)
            assert head.startswith(b"http/1.1 200 ")
            assert b"connection: close" not in head


async def test_a_stream_is_whole_when_a_request_is_sent_before_its_end(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.005)
    async with connected(gateway) as (reader, writer):
        writer.write(post(max_tokens=40, stream=True, stream_options={"include_usage": True}))
        answer = await reader.readuntil(b"data: ")
        writer.write(VERSION)
        answer += await reader.read()
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b'"completion_tokens":40' in answer
    assert answer.endswith(b"0\r\n\r\n")


async def test_who_leaves_after_a_second_request_cancels_the_first(start_gateway):
    gateway = await start_gateway(seconds_per_step=0.005)
    async with connected(gateway) as (_, writer):
        writer.write(post(max_tokens=4000))
        await gateway.until(lambda stats: stats.output_tokens > 0)
        writer.write(post(max_tokens=4000, padding=b" " * MUCH))
        await writer.drain()
    await gateway.until(lambda stats: stats.requests == 0)
    assert gateway.engine.stats().output_tokens < 4000


async def test_who_leaves_before_the_body_is_whole_is_counted_and_no_error(gateway, caplog):
    async with connected(gateway) as (_, writer):
        writer.write(post()[:-1])
    await until(lambda: num_gone(gateway) == 1)
    assert "in the gateway" not in caplog.text
