"""Frames between the service and a worker: length, kind, and a typed msgpack body. Nothing is ever unpickled: each kind
decodes into one declared type."""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgspec

from penstock.scheduler.plan import PromptLogprobsPart, StepPlan, StepResult
from penstock.scheduler.worker_config import WorkerConfig, WorkerFacts

MAX_FRAME_BYTES = 1 << 28
"""The limit of a body. The largest plans add 256 rows with the longest lists of allowed tokens and bad words that a
request may have (160 MiB), or one row of 2^24 tokens with as long a prediction (170 MiB). A longer frame means a broken
stream."""

HEADER = struct.Struct("<IB")
"""The length of the body, and the kind."""


class FrameKind(IntEnum):
    """The content of a frame, and its direction."""

    CONFIG = 1
    """Service to worker, first: WorkerConfig."""
    FACTS = 2
    """Worker to service, once it can run: WorkerFacts."""
    PLAN = 3
    """Service to worker: StepPlan."""
    RESULT = 4
    """Worker to service, one per plan, in order: StepResult."""
    PROMPT_LOGPROBS = 5
    """Worker to service: parts that belong to the next RESULT, so that no frame is large."""
    ALIVE = 6
    """Worker to service, every 500 ms: null."""
    FAILED = 7
    """Worker to service, last: the error, one line of text."""


DECODERS: dict[FrameKind, "msgspec.msgpack.Decoder[Any]"] = {
    FrameKind.CONFIG: msgspec.msgpack.Decoder(WorkerConfig),
    FrameKind.FACTS: msgspec.msgpack.Decoder(WorkerFacts),
    FrameKind.PLAN: msgspec.msgpack.Decoder(StepPlan),
    FrameKind.RESULT: msgspec.msgpack.Decoder(StepResult),
    FrameKind.PROMPT_LOGPROBS: msgspec.msgpack.Decoder(list[PromptLogprobsPart]),
    FrameKind.ALIVE: msgspec.msgpack.Decoder(None),
    FrameKind.FAILED: msgspec.msgpack.Decoder(str),
}


class WireError(Exception):
    """The stream of frames is broken: this version does not know its length, kind or body."""


def encode_frame(kind: FrameKind, body: object) -> bytes:
    """Returns a whole frame."""
    encoded = msgspec.msgpack.encode(body)
    if len(encoded) > MAX_FRAME_BYTES:
        raise WireError(f"a {kind.name} frame of {len(encoded)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(encoded), kind) + encoded


class FrameBuffer:
    """Splits a stream of bytes into frames; keeps a partial one until the rest comes."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[tuple[FrameKind, Any]]:
        """Yields the kind and decoded body of every frame that is now complete. Raises WireError."""
        self._pending += data
        begin = 0
        try:
            while len(self._pending) - begin >= HEADER.size:
                length, number = HEADER.unpack_from(self._pending, begin)
                if length > MAX_FRAME_BYTES or number not in FrameKind.__members__.values():
                    raise WireError(f"unknown frame of kind {number} with {length} bytes")
                end = begin + HEADER.size + length
                if len(self._pending) < end:
                    break
                kind = FrameKind(number)
                try:
                    body = DECODERS[kind].decode(bytes(self._pending[begin + HEADER.size : end]))
                except msgspec.MsgspecError as error:
                    raise WireError(f"a {kind.name} frame cannot be decoded: {error}") from error
                begin = end
                yield kind, body
        finally:
            del self._pending[:begin]


class Channel:
    """The worker's end. It blocks, and several threads may send."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    def send(self, kind: FrameKind, body: object) -> None:
        """Sends a whole frame. Raises OSError when the service is gone."""
        frame = encode_frame(kind, body)
        with self._sending:
            self._connection.sendall(frame)

    def wait_closed(self, timeout_s: float) -> None:
        """Waits until the service closes its end, even if data is left to read."""
        poll = select.poll()
        poll.register(self._connection, select.POLLRDHUP)
        poll.poll(1000 * timeout_s)

    def frames(self) -> Iterator[tuple[FrameKind, Any]]:
        """Yields frames until the service closes its end. Only one thread may call it. Raises WireError."""
        buffer = FrameBuffer()
        with contextlib.suppress(ConnectionError):
            while data := self._connection.recv(1 << 18):
                yield from buffer.feed(data)
