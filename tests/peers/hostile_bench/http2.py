"""As much of HTTP/2 as an attacker needs: it sends what it likes, and reads frames only to know what it may send."""

import socket
import struct
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_INITIAL_WINDOW = 4
_FRAME = 16_000
_HEAD = 9

Fields = Sequence[tuple[bytes, bytes]]


class Connection:
    """One connection to a gRPC port, by a caller who follows no rules but those of flow control."""

    def __init__(self, target: str, *, acknowledges: bool = True, reads: bool = True) -> None:
        """``acknowledges``: the peer's settings. Without ``reads`` its own window is 0: no answer can be sent."""
        host, _, port = target.rpartition(":")
        self._target = target
        self._socket = socket.create_connection((host, int(port)), timeout=10)
        self._acknowledges = acknowledges
        self._rest = b""
        self._windows: dict[int, int] = defaultdict(int)
        """What may be sent: 0 is the connection's. The others come on top of the initial window."""
        self._windows[0] = 65_535
        self._initial = 65_535
        self._next = 1
        self.is_open = True
        self.num_bytes = 0
        self.frames: Counter[int] = Counter()
        """How many of each kind came."""
        settings = b"" if reads else struct.pack(">HI", _INITIAL_WINDOW, 0)
        self._write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings))
        self.pump(0.2)

    def call(self, method: str, more: Fields = (), *, key: str = "", ends: bool = False) -> int:
        """Opens a stream with its head; returns its number."""
        number, self._next = self._next, self._next + 2
        self._windows[number] = 0
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", method.encode()),
            (b":authority", self._target.encode()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *more,
        ]
        if key:
            fields.append((b"authorization", f"Bearer {key}".encode()))
        head = b"".join(literal(name, value) for name, value in fields)
        parts = [head[at : at + _FRAME] for at in range(0, len(head), _FRAME)]
        frames = []
        for index, part in enumerate(parts):
            flags = END_HEADERS if index == len(parts) - 1 else 0
            if not index and ends:
                flags |= END_STREAM
            frames.append(frame(CONTINUATION if index else HEADERS, flags, number, part))
        self._write(b"".join(frames))
        return number

    def send(self, stream: int, data: bytes, *, ends: bool, timeout_s: float) -> None:
        """Sends as much of a body as the peer takes in time."""
        until = time.monotonic() + timeout_s
        at = 0
        while at < len(data) and self.is_open and time.monotonic() < until:
            room = min(self._windows[0], self._initial + self._windows[stream], _FRAME, len(data) - at)
            if room <= 0:
                self.pump(0.1)
                continue
            last = at + room == len(data)
            self._write(frame(DATA, END_STREAM if last and ends else 0, stream, data[at : at + room]))
            self._windows[0] -= room
            self._windows[stream] -= room
            at += room

    def pump(self, timeout_s: float) -> None:
        """Reads what has come, and waits for it at most so long."""
        if not self.is_open:
            return
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(1 << 18)
        except TimeoutError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._rest += data
        while len(self._rest) >= _HEAD:
            end = _HEAD + int.from_bytes(self._rest[:3], "big")
            if len(self._rest) < end:
                break
            kind, flags = self._rest[3:5]
            self._take(kind, flags, int.from_bytes(self._rest[5:9], "big"), self._rest[_HEAD:end])
            self._rest = self._rest[end:]

    def close(self) -> None:
        """Ends the connection."""
        self.is_open = False
        self._socket.close()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        self.frames[kind] += 1
        if kind == SETTINGS and not flags & ACK:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == _INITIAL_WINDOW:
                    self._initial = value
            if self._acknowledges:
                self._write(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self._write(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            self._windows[stream] += int.from_bytes(payload, "big")

    def _write(self, data: bytes) -> None:
        if not self.is_open:
            return
        self._socket.settimeout(10)
        try:
            self._socket.sendall(data)
            self.num_bytes += len(data)
        except OSError:
            self.close()


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2 (RFC 9113, 4.1)."""
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def message(body: bytes) -> bytes:
    """A message as gRPC frames it."""
    return b"\0" + struct.pack(">I", len(body)) + body


def literal(name: bytes, value: bytes) -> bytes:
    """A header field that is not indexed (RFC 7541, 6.2.2)."""
    return b"\0" + _number(len(name)) + name + _number(len(value)) + value


def _number(value: int) -> bytes:
    """An integer with a prefix of 7 bits (RFC 7541, 5.1)."""
    if value < 127:
        return bytes([value])
    out, value = b"\x7f", value - 127
    while value >= 128:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])
