"""A connection between the leader and an agent: frames both ways, heartbeats, and the loss of the other side."""

import asyncio
import asyncio.trsock
import contextlib
import socket
from collections.abc import Collection
from typing import Any

from penstock.models.executor.liveness import Heartbeat
from penstock.models.executor.wire import (
    HEADER,
    MAX_FRAME_BYTES,
    FrameKind,
    WireError,
    decode_body,
    encode_frame,
    parse_header,
)

PREAMBLE = b"penstock-join/1\n"
"""What an agent sends first. The number changes with the frames of the join."""
MAX_UNPROVEN_BYTES = 4096
"""The limit of a frame from a side that has not shown that it may join."""

ALIVE_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 0.25
MAX_SILENCE_S = 4.0
"""A side that sends nothing for this long is lost: its host has stopped, or the network is cut."""
LINGER_S = 1.0
"""How long a side that refuses waits for the other to read why."""

_PIECE_BYTES = 1 << 16
_THIN_LINEAR_TIMEOUTS = 16
"""TCP_THIN_LINEAR_TIMEOUTS of Linux: lost segments of a stream with few in flight are sent again without a growing
delay, so a link that was cut for two seconds is not found dead."""


class LinkLost(Exception):
    """The other side is gone. The text is the reason."""


class JoinLink:
    """One connection. All methods must be called on the event loop's thread."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.local_host = plain_address(writer.get_extra_info("sockname"))
        self.remote_host = plain_address(writer.get_extra_info("peername"))
        self._heartbeat = Heartbeat(CHECK_INTERVAL_S, asyncio.get_running_loop().time())
        self._beats: asyncio.Task[None] | None = None
        self._rank_sent = -1
        self._lost: str | None = None

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    def send(self, kind: FrameKind, body: object) -> None:
        """Queues a frame. Does nothing if the other side is gone: ``receive`` raises the reason."""
        self._write(encode_frame(kind, body))

    def send_frame(self, frame: bytes) -> None:
        """Queues an encoded frame."""
        self._write(frame)

    def send_for(self, rank: int, frame: bytes) -> None:
        """Queues an encoded frame about a rank."""
        if rank != self._rank_sent:
            self._rank_sent = rank
            self.send(FrameKind.RANK, rank)
        self._write(frame)

    def _write(self, data: bytes) -> None:
        if self._lost is None and not self._writer.is_closing():
            self._writer.write(data)

    async def receive_preamble(self) -> bytes:
        """Returns the first bytes that the other side sent. Raises LinkLost."""
        return await self._read(len(PREAMBLE))

    def send_preamble(self) -> None:
        self._write(PREAMBLE)

    async def receive(
        self, limit: int = MAX_FRAME_BYTES, undecoded: Collection[FrameKind] = ()
    ) -> tuple[FrameKind, Any]:
        """Returns the kind and the body of the next frame; of a kind in ``undecoded``, the whole frame. Raises LinkLost
        and WireError."""
        header = await self._read(HEADER.size)
        length, kind = parse_header(header, limit=limit)
        body = await self._read(length)
        return kind, header + body if kind in undecoded else decode_body(kind, body)

    async def expect(self, *kinds: FrameKind, limit: int = MAX_FRAME_BYTES) -> tuple[FrameKind, Any]:
        """Returns the next frame but heartbeats, which must be of one of these kinds. Raises LinkLost and WireError."""
        kind, body = await self.receive(limit)
        while kind is FrameKind.ALIVE:
            kind, body = await self.receive(limit)
        if kind not in kinds:
            raise WireError(f"got a {kind.name} frame instead of {' or '.join(each.name for each in kinds)}")
        return kind, body

    async def _read(self, length: int) -> bytes:
        pieces = []
        try:
            while length:
                pieces.append(await self._reader.readexactly(min(length, _PIECE_BYTES)))
                length -= len(pieces[-1])
                self._heartbeat.received(asyncio.get_running_loop().time())
        except asyncio.IncompleteReadError:
            raise LinkLost(self._lost or "it closed the connection") from None
        except OSError as error:  # TLS's errors too
            raise LinkLost(self._lost or f"the connection broke ({error.strerror or error})") from error
        return b"".join(pieces)

    def start_beating(self) -> None:
        """Sends heartbeats from now on, and expects them: ``receive`` raises LinkLost after too long a silence."""
        self._heartbeat.received(asyncio.get_running_loop().time())
        self._beats = asyncio.create_task(self._beat())

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._lost is None:
            if loop.time() >= due:
                self.send(FrameKind.ALIVE, None)
                due = loop.time() + ALIVE_INTERVAL_S
            await asyncio.sleep(CHECK_INTERVAL_S)
            if self._heartbeat.length(loop.time()) > MAX_SILENCE_S:
                self.drop(f"it sent nothing for {MAX_SILENCE_S:.0f} s: its host has stopped, or the network is cut")

    def drop(self, why: str) -> None:
        """Ends the connection at once; ``receive`` raises LinkLost with this reason."""
        if self._lost is None:
            self._lost = why
            self._writer.transport.abort()
        if self._beats is not None:
            self._beats.cancel()

    async def end_after(self, kind: FrameKind, body: object) -> None:
        """Sends a last frame, and ends the connection when the other side has closed it, or after a second. If it were
        closed at once, what the other side has sent meanwhile would make the kernel discard the frame."""
        self.send(kind, body)
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(LINGER_S):
                await self._writer.drain()
                while await self._reader.read(_PIECE_BYTES):
                    pass
        self.drop("it was refused")


def tune(connection: "socket.socket | asyncio.trsock.TransportSocket") -> None:
    """Makes a TCP connection send at once, and retransmit without growing delays."""
    for option in (socket.TCP_NODELAY, _THIN_LINEAR_TIMEOUTS):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, 1)


def plain_address(name: Any) -> str:
    """Returns the address in a socket's name; one of IPv4 also if the socket has IPv6."""
    return str(name[0]).removeprefix("::ffff:").split("%")[0] if name else "?"


def printable(text: str, limit: int = 200) -> str:
    """Returns a text of another host as one printable line of limited length."""
    line = " ".join(text.split())[:limit]
    return "".join(character if character.isprintable() else "\ufffd" for character in line)
