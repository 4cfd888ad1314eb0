"""As much of HTTP/2 as an attacker needs: it sends what it likes, and reads only what it may send and how calls end."""

import re
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

DATA, HEADERS, RESET, SETTINGS, PING, GO_AWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_HEADER_TABLE_SIZE, _INITIAL_WINDOW = 1, 4
_FRAME = 16_000
_HEAD = 9
_WRITE = 1 << 20
"""How much of the bodies one ``pump`` sends."""
_SEND_S = 10.0
_ERRORS = {0: "NO_ERROR", 1: "PROTOCOL_ERROR", 2: "INTERNAL_ERROR", 7: "REFUSED_STREAM", 8: "CANCEL"}
_ERRORS |= {11: "ENHANCE_YOUR_CALM"}
_STATUS = re.compile(rb"grpc-status.(\d+)", re.DOTALL)
_CODES = {str(code.value[0]): code.name for code in grpc.StatusCode}

Fields = Sequence[tuple[bytes, bytes]]


@dataclass
class _Upload:
    """What is left to send on a stream."""

    rest: memoryview
    ends: bool


class Connection:
    """A connection to a gRPC port by a client that follows no rules except those of flow control."""

    def __init__(self, target: str, *, acknowledges: bool = True, reads: bool = True) -> None:
        """Connects; raises OSError.

        Without ``acknowledges`` it never acknowledges the peer's SETTINGS. Without ``reads`` its own window is 0, so
        that the peer cannot send an answer.
        """
        host, _, port = target.rpartition(":")
        self._target = target
        self._socket = socket.create_connection((host, int(port)), timeout=_SEND_S)
        self._acknowledges = acknowledges
        self._received = b""
        self._windows: dict[int, int] = defaultdict(int)
        """What may be sent: 0 is the connection's. Those of streams come on top of the initial window."""
        self._windows[0] = 65_535
        self._initial = 65_535
        self._next = 1
        self._uploads: dict[int, _Upload] = {}
        self.streams: set[int] = set()
        """Those that the peer has not ended."""
        self.answered: set[int] = set()
        """Those of them whose answer has begun."""
        self.ended: Counter[str] = Counter()
        """How streams ended."""
        self.is_open = True
        self.takes_calls = True
        self.num_bytes = 0
        # Without a table, the names in the answers' heads are readable as they come.
        settings = struct.pack(">HI", _HEADER_TABLE_SIZE, 0)
        settings += b"" if reads else struct.pack(">HI", _INITIAL_WINDOW, 0)
        self._write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, settings))
        self.pump(0.2)

    def call(self, method: str, body: bytes, *, ends: bool, more: Fields = (), key: str = "") -> None:
        """Opens a stream with its head. ``pump`` sends the body; without ``ends`` the stream stays open after it."""
        number, self._next = self._next, self._next + 2
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
        self.streams.add(number)
        self._uploads[number] = _Upload(memoryview(body), ends)
        for index, part in enumerate(parts):
            flags = END_HEADERS if index == len(parts) - 1 else 0
            self._write(frame(CONTINUATION if index else HEADERS, flags, number, part))

    def pump(self, timeout_s: float) -> None:
        """Sends what the peer's windows permit, then reads what has come; waits for that at most ``timeout_s``."""
        self._send_bodies()
        if not self.is_open:
            return
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(1 << 18)
        except (TimeoutError, BlockingIOError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._received += data
        while len(self._received) >= _HEAD:
            end = _HEAD + int.from_bytes(self._received[:3], "big")
            if len(self._received) < end:
                break
            kind, flags = self._received[3:5]
            stream = int.from_bytes(self._received[5:9], "big") & 0x7FFFFFFF
            self._take(kind, flags, stream, self._received[_HEAD:end])
            self._received = self._received[end:]

    def close(self) -> None:
        """Closes the connection."""
        self.is_open = self.takes_calls = False
        self._socket.close()

    def _send_bodies(self) -> None:
        frames, num_bytes = [], 0
        for stream, upload in list(self._uploads.items()):
            while num_bytes < _WRITE:
                size = min(self._windows[0], self._initial + self._windows[stream], _FRAME, len(upload.rest))
                if size <= 0 and upload.rest:
                    break
                part, upload.rest = bytes(upload.rest[:size]), upload.rest[size:]
                flags = END_STREAM if upload.ends and not upload.rest else 0
                if part or flags:
                    frames.append(frame(DATA, flags, stream, part))
                self._windows[0] -= size
                self._windows[stream] -= size
                num_bytes += size
                if not upload.rest:
                    del self._uploads[stream]
                    break
        if frames:
            self._write(b"".join(frames))

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
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
        elif kind == GO_AWAY:
            self.takes_calls = False
        elif kind == RESET:
            number = int.from_bytes(payload, "big")
            self._end(stream, f"reset {_ERRORS.get(number, number)}")
        elif kind == HEADERS and flags & END_STREAM:
            status = _STATUS.search(payload)
            self._end(stream, "status" if status is None else _CODES.get(status[1].decode(), "status"))
        elif kind == HEADERS and stream in self.streams:
            self.answered.add(stream)

    def _end(self, stream: int, how: str) -> None:
        if stream in self.streams:
            self.streams.remove(stream)
            self.answered.discard(stream)
            self._uploads.pop(stream, None)
            self.ended[how] += 1

    def _write(self, data: bytes) -> None:
        if not self.is_open:
            return
        self._socket.settimeout(_SEND_S)
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
