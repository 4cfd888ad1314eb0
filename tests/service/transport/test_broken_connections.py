"""Figure 12, its connections: however one breaks, the service goes on, and nothing of it is left.

They are made by hand, byte by byte, and broken where it hurts: before HTTP/2 has begun, inside a frame, inside a
message, with a reset while output is on its way, or not at all: the client is silent, and then gone.
"""

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable, Mapping
from typing import Any

import psutil
import pytest

import penstock.v1 as pb
from penstock.scheduler.testing.fake_executor import FakeExecutor
from penstock.service.auth.identity import BearerAuthenticator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4
NUM_AT_ONCE = 20
WITHIN_S = 120.0


def frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def frames_of(raw: bytes) -> list[tuple[int, bytes]]:
    """Kind and payload of each whole frame."""
    found = []
    while len(raw) >= 9 and len(raw) >= (end := 9 + int.from_bytes(raw[:3])):
        found.append((raw[3], raw[9:end]))
        raw = raw[end:]
    return found


def headers(stream: int, method: str, flags: int = END_HEADERS, more: Mapping[str, str] | None = None) -> bytes:
    fields: dict[str, str] = {
        ":method": "POST",
        ":scheme": "http",
        ":path": f"/penstock.v1.GenerationService/{method}",
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
        **(more or {}),
    }
    block = b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in fields.items()
    )
    return frame(HEADERS, block, stream, flags)


def message(rng: random.Random, ref: int = 1) -> bytes:
    """A request that goes on for longer than the connection."""
    sampling = pb.SamplingParams(max_tokens=rng.choice((5, 4000)), ignore_eos=True)
    start = pb.GenerationStart(
        ref=ref, text="hello", sampling=sampling, output=pb.OutputOptions(logprobs=rng.choice((0, 20)))
    )
    raw = pb.GenerateRequest(start=start).SerializeToString()  # GenerateOneRequest has the same field
    return b"\0" + struct.pack(">I", len(raw)) + raw


def call(rng: random.Random, stream: int = 1) -> bytes:
    """A whole call, or a stream that is left open."""
    method = rng.choice(("Generate", "GenerateOne", "Complete"))
    is_open = method == "Generate" and rng.random() < 0.5
    return headers(stream, method) + frame(DATA, message(rng), stream, 0 if is_open else END_STREAM)


def opening(rng: random.Random) -> bytes:
    return PREFACE + frame(
        SETTINGS, b"" if rng.random() < 0.5 else struct.pack(">HI", 4, rng.choice((0, 1, 2**31 - 1)))
    )


# What is sent, one way of breaking each.


def garbage(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((1, 30, 5000)))


def http_1(rng: random.Random) -> bytes:
    return b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


def half_a_preface(rng: random.Random) -> bytes:
    return PREFACE[: rng.randrange(len(PREFACE))]


def no_settings(rng: random.Random) -> bytes:
    return PREFACE + call(rng)


def cut_anywhere(rng: random.Random) -> bytes:
    raw = opening(rng) + call(rng) + call(rng, 3)
    return raw[: rng.randrange(len(PREFACE), len(raw))]


def flipped_bits(rng: random.Random) -> bytes:
    raw = bytearray(call(rng) + call(rng, 3))
    for _ in range(rng.choice((1, 4))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return opening(rng) + bytes(raw)


def a_lying_length(rng: random.Random) -> bytes:
    raw = b"\0" + struct.pack(">I", rng.choice((2**32 - 1, 9 << 20, 100))) + b"abc"
    return opening(rng) + headers(1, "GenerateOne") + frame(DATA, raw, 1, END_STREAM * rng.randrange(2))


def a_compressed_message(rng: random.Random) -> bytes:
    raw = b"\1" + message(rng)[1:]
    return opening(rng) + headers(1, "GenerateOne") + frame(DATA, raw, 1, END_STREAM)


def rapid_resets(rng: random.Random) -> bytes:
    resets = b"".join(
        call(rng, stream) + frame(RST_STREAM, struct.pack(">I", 8), stream) for stream in range(1, 2 * 50, 2)
    )
    return opening(rng) + resets


def a_path_of_no_text(rng: random.Random) -> bytes:
    return opening(rng) + headers(1, "?").replace(b"?", b"\xff") + call(rng, 3)


def a_frame_of_nobody(rng: random.Random) -> bytes:
    kind, stream = rng.randrange(256), rng.choice((0, 1, 2, 7, 2**31 - 1))
    return opening(rng) + call(rng) + frame(kind, rng.randbytes(rng.choice((0, 4, 8, 300))), stream, rng.randrange(256))


def endless_headers(rng: random.Random) -> bytes:
    more = b"".join(frame(CONTINUATION, b"\0\1a\x7f" + b"b" * 127, 1) for _ in range(300))
    return opening(rng) + headers(1, "GenerateOne", flags=0) + more


def a_strange_call(rng: random.Random) -> bytes:
    strange = {
        ":path": rng.choice(("/", "", "/penstock.v1.GenerationService/", "/a/b/c", "*")),
        ":method": rng.choice(("GET", "POST", "X")),
        "content-type": rng.choice(("text/html", "application/grpc+json", "")),
        "grpc-timeout": rng.choice(("1n", "-1S", "99999999H", "x", "0m")),
        "authorization": rng.choice(("", "Bearer", "\x7f" * 20)),
    }
    name = rng.choice(sorted(strange))
    return (
        opening(rng) + headers(1, "GenerateOne", more={name: strange[name]}) + frame(DATA, message(rng), 1, END_STREAM)
    )


def window_tricks(rng: random.Random) -> bytes:
    grow = frame(WINDOW_UPDATE, struct.pack(">I", rng.choice((0, 1, 2**31 - 1))), rng.choice((0, 1)))
    return opening(rng) + call(rng) + grow * rng.choice((1, 40))


def pings(rng: random.Random) -> bytes:
    return opening(rng) + frame(PING, bytes(8)) * rng.choice((1, 500)) + call(rng)


def goaway_and_on(rng: random.Random) -> bytes:
    return opening(rng) + call(rng) + frame(GOAWAY, bytes(8)) + call(rng, 3)


WAYS: tuple[Callable[[random.Random], bytes], ...] = (
    garbage, http_1, half_a_preface, no_settings, cut_anywhere, flipped_bits, a_lying_length, a_compressed_message,
    rapid_resets, a_path_of_no_text, a_frame_of_nobody, endless_headers, a_strange_call, window_tricks, pings,
    goaway_and_on,
)  # fmt: skip


async def break_one(rng: random.Random, port: int, way: Callable[[random.Random], bytes]) -> None:
    """A connection from its beginning to its end."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", port))
        raw = way(rng)
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                for first in range(0, len(raw), 4096):
                    await loop.sock_sendall(connection, raw[first : first + 4096])
                await asyncio.sleep(rng.choice((0, 0, 0.01, 0.05)))
                end = rng.choice(("close", "reset", "half-close", "read"))
                if end == "reset":
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                elif end == "half-close":
                    connection.shutdown(socket.SHUT_WR)
                    await asyncio.sleep(0.02)
                elif end == "read":
                    async with asyncio.timeout(0.03):
                        while await loop.sock_recv(connection, 65_536):
                            pass


def left(service: Any) -> dict[str, float]:
    """What a service has while nothing happens."""
    return {
        "live requests": service.server._running.generation.num_live,
        "the engine's requests": service.engine.stats().requests,
        "blocks": service.blocks_in_use,
        "pending bytes": service.server._running.generation._buffer_budget.num_bytes,
        "tasks": len(asyncio.all_tasks()),
        "descriptors": psutil.Process().num_fds(),
    }


async def break_connections(start_service: Any, caplog: Any, number: int, seed: int) -> None:
    service = await start_service(FakeExecutor(vocab_size=258, seconds_per_step=0.001))
    port = int(service.target.rpartition(":")[2])
    rng = random.Random(seed)

    async def answers() -> None:
        request = pb.CompleteRequest(start=pb.GenerationStart(text="hi"))
        answer = await service.generation.Complete(request, timeout=WITHIN_S)
        assert answer.finished.status.code == 0

    await answers()
    before = left(service)
    remaining = iter(range(number))

    async def work() -> None:
        for index in remaining:
            await break_one(rng, port, WAYS[index % len(WAYS)])

    await asyncio.gather(*[work() for _ in range(NUM_AT_ONCE)])
    await answers()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WITHIN_S):
            while any(now > before[name] for name, now in left(service).items()):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    assert {name: now for name, now in left(service).items() if now > before[name]} == {}
    # gRPC logs that nobody was there to take an answer.
    ours = [record for record in caplog.records if record.name != "grpc._cython.cygrpc"]
    assert not [record.getMessage() for record in ours if record.levelname == "ERROR"]


async def answer_to(service: Any, sent: bytes) -> bytes:
    """What a connection made by hand receives, up to the first headers."""
    loop = asyncio.get_running_loop()
    with socket.socket() as connection:
        connection.setblocking(False)
        await loop.sock_connect(connection, ("127.0.0.1", int(service.target.rpartition(":")[2])))
        connection.sendall(PREFACE + frame(SETTINGS) + sent)
        received = b""
        async with asyncio.timeout(WITHIN_S):
            while HEADERS not in [kind for kind, _ in frames_of(received)]:
                more = await loop.sock_recv(connection, 4096)
                assert more, "the connection was closed"
                received += more
    return received


async def test_a_path_that_is_no_text_is_no_end_of_the_service(start_service, caplog):
    """By itself grpc.aio would never listen again."""
    service = await start_service()
    received = await answer_to(service, headers(1, "?", END_HEADERS | END_STREAM).replace(b"?", b"\xff"))
    assert GOAWAY not in [kind for kind, _ in frames_of(received)]
    answer = await service.generation.Complete(
        pb.CompleteRequest(start=pb.GenerationStart(text="hi")), timeout=WITHIN_S
    )
    assert answer.finished.status.code == 0
    assert not caplog.records


async def test_a_key_that_is_no_text_is_in_no_log(start_service, caplog):
    """By itself gRPC would log it."""
    service = await start_service(authenticator=BearerAuthenticator([]))
    call = headers(1, "Complete", END_HEADERS | END_STREAM, {"authorization": "Bearer canary-key?"})
    received = await answer_to(service, call.replace(b"?", b"\xa0"))
    assert GOAWAY not in [kind for kind, _ in frames_of(received)]
    assert "canary" not in caplog.text


async def test_reliability_figure_12_30_broken_connections(start_service, caplog):
    await break_connections(start_service, caplog, 30, seed=0)


@pytest.mark.soak
async def test_reliability_figure_12_1000_broken_connections(start_service, caplog):
    await break_connections(start_service, caplog, 1000, seed=1)
