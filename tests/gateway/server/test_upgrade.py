"""Requests that offer an upgrade, of other versions of HTTP, and without a Host: over real sockets."""

import asyncio
import json

import pytest
from wire.raw_http import connected

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": "a", "max_tokens": 2, "ignore_eos": True}).encode()
UPGRADES = {
    "h2c": ("Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AAMAAABkAAQAAP__"),
    "TLS": ("Connection: Upgrade", "Upgrade: TLS/1.0"),
    "websocket": ("Connection: keep-alive, Upgrade", "Upgrade: websocket"),
    "in other letters": ("connection: upgrade", "upgrade: H2C"),
}
LENGTH, CHUNKS = f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"
CHUNKED = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
SMUGGLED = b"GET /version HTTP/1.1\r\nHost: smuggled\r\n\r\n"


def head_of(*lines, method="POST", path=COMPLETIONS, version="1.1", host="Host: x"):
    told = (f"{method} {path} HTTP/{version}", host, "Content-Type: application/json", *lines)
    return "\r\n".join((*filter(None, told), "", "")).encode()


async def answer_from(reader):
    """The next answer that has a length: its head, in small letters, and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    return head, await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))


async def all_of(gateway, *parts):
    """All that comes back on a connection of their own, until its end."""
    async with connected(gateway) as (reader, writer):
        for part in parts:
            writer.write(part)
            await writer.drain()
        return await reader.read()


PARTS = {
    "whole": (LENGTH, (BODY,), True),
    "in one write": (LENGTH, (BODY,), False),
    "in pieces": (LENGTH, (BODY[:7], BODY[7:20], BODY[20:]), True),
    "in chunks": (CHUNKS, (CHUNKED,), True),
    "in chunks in one write": (CHUNKS, (CHUNKED,), False),
    "in pieces of chunks": (CHUNKS, tuple(bytes([byte]) for byte in CHUNKED), True),
}


@pytest.mark.parametrize("body", PARTS)
@pytest.mark.parametrize("upgrade", UPGRADES)
async def test_a_request_that_offers_an_upgrade_is_served_with_its_body(gateway, upgrade, body):
    framing, parts, is_apart = PARTS[body]
    head = head_of(*UPGRADES[upgrade], framing)
    async with connected(gateway) as (reader, writer):
        for _ in range(2):  # the connection serves the next one too
            first, *others = parts
            for part in (head, first, *others) if is_apart else (head + first, *others):
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.001)  # a packet of its own
            answered, text = await answer_from(reader)
            assert answered.startswith(b"http/1.1 200 ")
            assert b"upgrade" not in answered
            assert json.loads(text)["usage"]["completion_tokens"] == 2
        writer.write(SMUGGLED)
        assert (await answer_from(reader))[0].startswith(b"http/1.1 200 ")


@pytest.mark.parametrize("apart", [True, False])
async def test_a_body_is_never_a_request(gateway, apart):
    head = head_of(*UPGRADES["h2c"], f"Content-Length: {len(SMUGGLED)}", "Connection: close")
    answer = await all_of(gateway, *([head, SMUGGLED] if apart else [head + SMUGGLED]))
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"invalid_json" in answer


@pytest.mark.parametrize("framing", ["", "Content-Length: 0"])
async def test_an_upgrade_without_a_body(gateway, framing):
    head = head_of(*UPGRADES["h2c"], framing, method="GET", path="/version")
    async with connected(gateway) as (reader, writer):
        writer.write(head)
        assert (await answer_from(reader))[0].startswith(b"http/1.1 200 ")
        writer.write(head)
        assert (await answer_from(reader))[0].startswith(b"http/1.1 200 ")


async def test_what_is_sent_with_an_upgrade_before_its_answer_is_not_taken(gateway):
    answer = await all_of(gateway, head_of(*UPGRADES["h2c"], LENGTH) + BODY + SMUGGLED)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"\r\nconnection: close\r\n" in answer


async def test_a_body_that_two_headers_delimit_is_refused(gateway):
    answer = await all_of(gateway, head_of(*UPGRADES["h2c"], LENGTH, CHUNKS) + CHUNKED)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1


async def test_who_waits_for_100_continue_with_an_upgrade_gets_it(gateway):
    async with connected(gateway) as (reader, writer):
        writer.write(head_of(*UPGRADES["h2c"], LENGTH, "Expect: 100-continue"))
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(BODY)
        assert (await answer_from(reader))[0].startswith(b"http/1.1 200 ")


@pytest.mark.parametrize("upgrade", [(), UPGRADES["h2c"]])
async def test_an_answer_of_http_1_0_has_no_chunks_and_ends_with_the_connection(gateway, upgrade):
    body = json.dumps({"prompt": "a", "max_tokens": 3, "ignore_eos": True, "stream": True}).encode()
    head = head_of(*upgrade, f"Content-Length: {len(body)}", version="1.0", host="")
    answer = await all_of(gateway, head + body)
    top, _, text = answer.partition(b"\r\n\r\n")
    assert top.startswith(b"HTTP/1.1 200 ")
    assert b"transfer-encoding" not in top.lower()
    assert b"\r\nconnection: close" in top
    assert text.startswith(b"data: {")
    assert text.endswith(b"data: [DONE]\n\n")


async def test_an_answer_of_http_1_0_with_a_length_has_it(gateway):
    answer = await all_of(gateway, head_of(LENGTH, version="1.0", host="") + BODY)
    top, _, text = answer.partition(b"\r\n\r\n")
    assert f"content-length: {len(text)}".encode() in top
    assert json.loads(text)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("host", "version", "status"),
    [
        ("Host: x", "1.1", 200),
        ("Host:", "1.1", 200),
        ("", "1.1", 400),
        ("Host: x\r\nHost: x", "1.1", 400),
        ("Host: x\r\nhost: y", "1.0", 400),
        ("", "1.0", 200),
    ],
)
async def test_a_request_names_its_host_once(gateway, host, version, status):
    answer = await all_of(
        gateway, head_of("Connection: close", method="GET", path="/version", version=version, host=host)
    )
    assert answer.startswith(f"HTTP/1.1 {status} ".encode())
    assert (b"invalid_host" in answer) == (status == 400)


async def test_options_for_the_whole_server_lists_its_methods(gateway):
    answer = await all_of(gateway, head_of("Connection: close", method="OPTIONS", path="*"))
    assert answer.startswith(b"HTTP/1.1 204 ")
    assert b"\r\nallow: GET, HEAD, OPTIONS, POST\r\n" in answer
