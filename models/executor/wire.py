"""Frames between the service and a worker: length, kind, and a typed msgpack body. The same code at both ends.

Knows nothing of processes and tensors. Nothing is ever unpickled: each kind decodes into one declared type.
"""

import select
import socket
import struct
import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgspec

from penstock.scheduler.plan import PromptLogprobsPart, StepPlan, StepResult, WorkerConfig, WorkerFacts

MAX_FRAME_BYTES = 1 << 28
"""Of a body. The largest plans add 256 rows with the longest lists that a request may have, of allowed tokens and bad
words (160 MiB), or one row of 2^24 tokens (85 MiB); more is no plan but a broken stream."""

HEADER = struct.Struct("<IB")
"""Length of the body, kind."""


class FrameKind(IntEnum):
    """What a frame holds, and which way it goes."""

    CONFIG = 1
    """To the worker, first: WorkerConfig."""
    FACTS = 2
    """From it, once it can run: WorkerFacts."""
    PLAN = 3
    """To it: StepPlan."""
    RESULT = 4
    """From it, one for each plan, in order: StepResult."""
    PROMPT_LOGPROBS = 5
    """From it: parts that belong to the next RESULT, so that no frame is large."""
    ALIVE = 6
    """From it, every 500 ms: null."""
    FAILED = 7
    """From it, last: what went wrong, a line of text."""


BODIES: dict[FrameKind, Any] = {
    FrameKind.CONFIG: WorkerConfig,
    FrameKind.FACTS: WorkerFacts,
    FrameKind.PLAN: StepPlan,
    FrameKind.RESULT: StepResult,
    FrameKind.PROMPT_LOGPROBS: list[PromptLogprobsPart],
    FrameKind.ALIVE: None,
    FrameKind.FAILED: str,
}

DECODERS: dict[FrameKind, "msgspec.msgpack.Decoder[Any]"] = {
    kind: msgspec.msgpack.Decoder(body) for kind, body in BODIES.items()
}


class WireError(Exception):
    """The stream of frames is broken: its length, kind or body is none that this version knows."""


def encode_frame(kind: FrameKind, body: object) -> bytes:
    """A whole frame."""
    encoded = msgspec.msgpack.encode(body)
    if len(encoded) > MAX_FRAME_BYTES:
        raise WireError(f"a {kind.name} frame of {len(encoded)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(encoded), kind) + encoded


class FrameBuffer:
    """Cuts a stream of bytes into frames; keeps a partial one until the rest comes."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, Any]]:
        """Yields the kind and decoded body of every frame that is now whole. Raises WireError."""
        self._pending += data
        begin = 0
        try:
            while len(self._pending) - begin >= HEADER.size:
                length, number = HEADER.unpack_from(self._pending, begin)
                if length > MAX_FRAME_BYTES or number not in FrameKind.__members__.values():
                    raise WireError(f"a frame of kind {number} and {length} bytes is none of this protocol")
                end = begin + HEADER.size + length
                if len(self._pending) < end:
                    break
                kind = FrameKind(number)
                try:
                    body = DECODERS[kind].decode(bytes(self._pending[begin + HEADER.size : end]))
                except msgspec.MsgspecError as error:
                    raise WireError(f"a {kind.name} frame does not decode: {error}") from error
                begin = end
                yield kind, body
        finally:
            del self._pending[:begin]


class Channel:
    """The worker's end: blocking, safe to send on from several threads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, kind: FrameKind, body: object) -> None:
        """Sends a whole frame. Raises OSError when the service is gone."""
        frame = encode_frame(kind, body)
        with self._sending:
            self._connection.sendall(frame)

    def wait_closed(self, timeout_s: float) -> None:
        """Waits until the service closes its end, however much it has sent."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        poll.poll(1000 * timeout_s)

    def frames(self) -> Iterator[tuple[FrameKind, Any]]:
        """Frames until the service closes its end; for one thread alone. Raises WireError."""
        buffer = FrameBuffer()
        while data := self._receive():
            yield from buffer.feed(data)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(1 << 18)
        except ConnectionError:
            return b""
