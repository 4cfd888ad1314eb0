"""A client of HTTP/2 made by hand, which does what no library does: it need not acknowledge SETTINGS, end a message or
read an answer."""

import asyncio
import re
import ssl
import struct
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 7, 8, 9
END_STREAM, END_HEADERS, ACK = 1, 4, 1
MAX_FRAME = 16_000


def frame(kind: int, payload: bytes = b"", stream: int = 0, flags: int = 0) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def integer(value: int, bits: int) -> bytes:
    """As HPACK has it."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([value])
    out, value = bytes([most]), value - most
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


class RawClient:
    """One connection. Streams are numbered by the caller's order of calls."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, window: int, acknowledges: bool):
        self._reader, self._writer, self._acknowledges = reader, writer, acknowledges
        self._next = 1
        self._initial = 65_535
        self._room: dict[int, int] = defaultdict(lambda: self._initial, {0: 65_535})
        self._changed = asyncio.Event()
        self.ended: dict[int, str] = {}
        """What each stream that has ended ended with: a gRPC status by number, or ``reset``."""
        self.details: dict[int, bytes] = {}
        """The trailers, as they came."""
        self.num_bytes = 0
        """Of answers."""
        self.is_accepted = self.is_closed = False
        # No table of headers: what comes can be read without one.
        self.send(
            PREFACE + frame(SETTINGS, struct.pack(">HIHI", 1, 0, 4, window)) + frame(WINDOW_UPDATE, b"\x7f\0\0\0")
        )
        self._reading = asyncio.create_task(self._read())

    def send(self, raw: bytes) -> None:
        self._writer.write(raw)

    def begin(self, path: str, metadata: Mapping[str, str] | None = None) -> int:
        """Begins a call; returns its stream."""
        stream, self._next = self._next, self._next + 2
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "localhost",
                  "content-type": "application/grpc", "te": "trailers", **(metadata or {})}  # fmt: skip
        block = b"".join(
            b"\0" + integer(len(name), 7) + name.encode() + integer(len(value), 7) + value.encode()
            for name, value in fields.items()
        )
        parts = [block[at : at + MAX_FRAME] for at in range(0, len(block), MAX_FRAME)]
        for index, part in enumerate(parts):
            flags = END_HEADERS if index == len(parts) - 1 else 0
            self.send(frame(CONTINUATION if index else HEADERS, part, stream, flags))
        return stream

    async def put(self, stream: int, raw: bytes, *, ends: bool = False) -> int:
        """Sends data as far as the service takes it, while the stream lasts; returns how much that was."""
        at = 0
        while at < len(raw) and stream not in self.ended and not self.is_closed:
            room = min(self.room(stream), MAX_FRAME, len(raw) - at)
            if room <= 0:
                self._changed.clear()
                await self._changed.wait()
                continue
            flags = END_STREAM if ends and at + room == len(raw) else 0
            self.send(frame(DATA, raw[at : at + room], stream, flags))
            at += room
            self._room[0] -= room
            self._room[stream] -= room
            with suppress(OSError):
                await self._writer.drain()
        return at

    def room(self, stream: int) -> int:
        """What the service takes of a stream's data for now."""
        return min(self._room[0], self._room[stream])

    async def end(self, stream: int) -> str:
        """What the stream ends with; ``closed`` where the connection does."""
        while stream not in self.ended:
            if self.is_closed:
                return "closed"
            self._changed.clear()
            await self._changed.wait()
        return self.ended[stream]

    async def accepted(self) -> None:
        """Waits for the service's first frame: until then the connection may still be in the kernel's queue."""
        while not self.is_accepted and not self.is_closed:
            self._changed.clear()
            await self._changed.wait()

    async def closed(self) -> None:
        while not self.is_closed:
            self._changed.clear()
            await self._changed.wait()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                payload = await self._reader.readexactly(int.from_bytes(head[:3]))
                self.is_accepted = True
                self._take(head[3], head[4], int.from_bytes(head[5:]), payload)
                self._changed.set()
        except (asyncio.IncompleteReadError, OSError):
            self.is_closed = True
            self._changed.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK and self._acknowledges:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == 4:
                    for known in [known for known in self._room if known]:
                        self._room[known] += value - self._initial
                    self._initial = value
            self.send(frame(SETTINGS, b"", 0, ACK))
        elif kind == 6 and not flags & ACK:
            self.send(frame(6, payload, 0, ACK))
        elif kind == WINDOW_UPDATE:
            self._room[stream] += int.from_bytes(payload)
        elif kind == DATA:
            self.num_bytes += len(payload)
        elif kind == RST_STREAM:
            self.ended.setdefault(stream, "reset")
        elif kind == HEADERS and flags & END_STREAM:
            status = re.search(rb"grpc-status.(\d+)", payload, re.DOTALL)
            self.ended[stream] = "?" if status is None else status[1].decode()
            self.details[stream] = payload

    async def close(self) -> None:
        self._reading.cancel()
        self._writer.close()


@asynccontextmanager
async def raw_client(
    target: str, *, tls: ssl.SSLContext | None = None, window: int = 65_535, acknowledges: bool = True
) -> AsyncIterator[RawClient]:
    """A connection to ``host:port`` or ``unix:PATH``. ``window``: what a stream of answers may bring."""
    if target.startswith("unix:"):
        reader, writer = await asyncio.open_unix_connection(target.removeprefix("unix:"))
    else:
        host, _, port = target.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls)
    client = RawClient(reader, writer, window, acknowledges)
    try:
        yield client
    finally:
        await client.close()
