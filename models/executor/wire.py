"""Frames between the service and its workers, and between hosts: length, kind, and a typed msgpack body. Nothing is
ever unpickled: each kind decodes into one declared type."""

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator
from enum import IntEnum
from typing import Any

import msgspec

from penstock.models.executor.join_messages import (
    AgentHello,
    JoinChallenge,
    JoinProof,
    JoinRefusal,
    JoinWelcome,
    ModelReport,
    RankEnded,
)
from penstock.scheduler.plan import AdapterLoad, AdapterLoaded, PromptLogprobsPart, StepPlan, StepResult
from penstock.scheduler.worker_config import MeetingPorts, WorkerConfig, WorkerFacts

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
    PORTS = 8
    """Rank 0 to service, before FACTS, if the ranks meet by TCP: MeetingPorts."""
    LOAD_ADAPTER = 9
    """Service to worker: AdapterLoad."""
    ADAPTER = 10
    """Worker to service, one per LOAD_ADAPTER, in order: AdapterLoaded."""

    # Between the leader and the agent of another host, which also pass on CONFIG, FACTS, PLAN and RESULT.
    HELLO = 16
    """Agent to leader, first: AgentHello."""
    CHALLENGE = 17
    """Leader to agent: JoinChallenge."""
    PROOF = 18
    """Agent to leader: JoinProof."""
    WELCOME = 19
    """Leader to agent: JoinWelcome."""
    MODEL = 20
    """Agent to leader, once it has read the model's files: ModelReport."""
    REFUSED = 21
    """Leader to agent, last: JoinRefusal."""
    RANK = 22
    """Both ways: the rank that the next frames are about."""
    KILL = 23
    """Leader to agent: end a rank's process at once; the reason, one line of text."""
    STOP = 24
    """Leader to agent: end a rank's process: null."""
    STOPPED = 25
    """Agent to leader, the answer to STOP: null."""
    ENDED = 26
    """Agent to leader: a rank's process has ended, or did not start: RankEnded."""


DECODERS: dict[FrameKind, "msgspec.msgpack.Decoder[Any]"] = {
    FrameKind.CONFIG: msgspec.msgpack.Decoder(WorkerConfig),
    FrameKind.FACTS: msgspec.msgpack.Decoder(WorkerFacts),
    FrameKind.PLAN: msgspec.msgpack.Decoder(StepPlan),
    FrameKind.RESULT: msgspec.msgpack.Decoder(StepResult),
    FrameKind.PROMPT_LOGPROBS: msgspec.msgpack.Decoder(list[PromptLogprobsPart]),
    FrameKind.ALIVE: msgspec.msgpack.Decoder(None),
    FrameKind.FAILED: msgspec.msgpack.Decoder(str),
    FrameKind.PORTS: msgspec.msgpack.Decoder(MeetingPorts),
    FrameKind.LOAD_ADAPTER: msgspec.msgpack.Decoder(AdapterLoad),
    FrameKind.ADAPTER: msgspec.msgpack.Decoder(AdapterLoaded),
    FrameKind.HELLO: msgspec.msgpack.Decoder(AgentHello),
    FrameKind.CHALLENGE: msgspec.msgpack.Decoder(JoinChallenge),
    FrameKind.PROOF: msgspec.msgpack.Decoder(JoinProof),
    FrameKind.WELCOME: msgspec.msgpack.Decoder(JoinWelcome),
    FrameKind.MODEL: msgspec.msgpack.Decoder(ModelReport),
    FrameKind.REFUSED: msgspec.msgpack.Decoder(JoinRefusal),
    FrameKind.RANK: msgspec.msgpack.Decoder(int),
    FrameKind.KILL: msgspec.msgpack.Decoder(str),
    FrameKind.STOP: msgspec.msgpack.Decoder(None),
    FrameKind.STOPPED: msgspec.msgpack.Decoder(None),
    FrameKind.ENDED: msgspec.msgpack.Decoder(RankEnded),
}


class WireError(Exception):
    """The stream of frames is broken: this version does not know its length, kind or body."""


def encode_frame(kind: FrameKind, body: object) -> bytes:
    """Returns a whole frame."""
    encoded = msgspec.msgpack.encode(body)
    if len(encoded) > MAX_FRAME_BYTES:
        raise WireError(f"a {kind.name} frame of {len(encoded)} bytes is over the limit of {MAX_FRAME_BYTES}")
    return HEADER.pack(len(encoded), kind) + encoded


def parse_header(header: bytes | bytearray, offset: int = 0, limit: int = MAX_FRAME_BYTES) -> tuple[int, FrameKind]:
    """Returns the length of a frame's body, and the frame's kind. Raises WireError."""
    length, number = HEADER.unpack_from(header, offset)
    if length > limit or number not in FrameKind.__members__.values():
        raise WireError(f"unknown frame of kind {number} with {length} bytes")
    return length, FrameKind(number)


def decode_body(kind: FrameKind, body: bytes) -> Any:
    """Decodes a frame's body into the declared type of its kind. Raises WireError."""
    try:
        return DECODERS[kind].decode(body)
    except msgspec.MsgspecError as error:
        raise WireError(f"a {kind.name} frame cannot be decoded: {error}") from error


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
                length, kind = parse_header(self._pending, begin)
                end = begin + HEADER.size + length
                if len(self._pending) < end:
                    break
                body = decode_body(kind, bytes(self._pending[begin + HEADER.size : end]))
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
