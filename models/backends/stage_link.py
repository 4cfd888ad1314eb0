"""The connections between rank 0 of a model in stages and the other ranks: sockets, frames, and who may connect.

Each other rank connects to rank 0. On one host they meet at a socket in a directory that only the service's user can
enter. Between hosts they meet at a TCP port, and a rank must show a secret that both have from the service.
Nothing is unpickled: each kind of frame has one declared type, and arrays of numbers after it.
"""

import hmac
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.models.backends.pipeline_parallel import StageSpeed
from penstock.models.backends.tensor_parallel import PeerLost
from penstock.scheduler.worker_config import WorkerConfig

MAX_BODY_BYTES = 1 << 16
MAX_DATA_BYTES = 1 << 34
"""The limits of a frame. The largest batch of the widest models has less than a tenth of the second."""
MAX_HELLO_BYTES = 256
HELLO_S = 5.0
"""How long a connection may take to show that it is a rank, and the limit of what it may send until then."""
MAX_STRANGERS = 16
"""The limit of connections that have not shown it. A further one ends at once."""
RETRY_S = 0.05
CONNECT_S = 60.0
"""How long a rank tries to reach rank 0, which may still start."""

_HEADER = struct.Struct("<IIQ")
"""The kind, the length of the body, and the length of the arrays."""

Bytes = NDArray[np.uint8]


class StageHello(msgspec.Struct, array_like=True):
    """Identifies the rank that connects."""

    rank: int
    secret: bytes


class StageLayers(msgspec.Struct, array_like=True):
    """The numbers of layers of all stages; none if the rank must measure its speed first."""

    layers: tuple[int, ...]


class StageBlocks(msgspec.Struct, array_like=True):
    """A number of KV blocks: as many as a rank has room for, or as many as each of them gets."""

    num_blocks: int


class StageBatch(msgspec.Struct, array_like=True):
    """A batch on its way. The arrays are starts (rows), ends (rows), token starts (rows + 1), block tables (rows,
    ``table_width``) and the tokens whose hidden states the head needs (``num_wanted``), in int64, then the hidden
    states of all tokens, in the type in which the backend keeps them between layers."""

    num_tokens: int
    num_rows: int
    num_wanted: int
    table_width: int
    computed_us: int = 0
    """How long the rank that sends it has computed."""


class StageResult(msgspec.Struct, array_like=True):
    """The hidden states of the tokens that the head needs, in the type of ``StageBatch``."""

    computed_us: int
    """How long the rank computed."""


class StageFrame(IntEnum):
    """The content of a frame, and its direction."""

    HELLO = 1
    """StageHello, the first frame to rank 0."""
    LAYERS = 2
    """StageLayers, from rank 0."""
    SPEED = 3
    """StageSpeed, to rank 0."""
    ROOM = 4
    """StageBlocks, to rank 0, once the weights are loaded."""
    BLOCKS = 5
    """StageBlocks, from rank 0."""
    READY = 6
    """Null, to rank 0, once the pages are allocated."""
    BATCH = 7
    """StageBatch, to each rank of a stage; and from the first rank of each stage but the last, for the next one."""
    RESULT = 8
    """StageResult, from the first rank of the last stage."""


_DECODERS: dict[StageFrame, "msgspec.msgpack.Decoder[Any]"] = {
    StageFrame.HELLO: msgspec.msgpack.Decoder(StageHello),
    StageFrame.LAYERS: msgspec.msgpack.Decoder(StageLayers),
    StageFrame.SPEED: msgspec.msgpack.Decoder(StageSpeed),
    StageFrame.ROOM: msgspec.msgpack.Decoder(StageBlocks),
    StageFrame.BLOCKS: msgspec.msgpack.Decoder(StageBlocks),
    StageFrame.READY: msgspec.msgpack.Decoder(None),
    StageFrame.BATCH: msgspec.msgpack.Decoder(StageBatch),
    StageFrame.RESULT: msgspec.msgpack.Decoder(StageResult),
}


class StageLink:
    """A connection to another rank. One thread may send while another receives. Raises PeerLost."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        """``name`` names the other rank in errors."""
        self._connection = connection
        self._name = name

    def send(self, kind: StageFrame, body: object, arrays: Sequence[NDArray[Any]] = ()) -> None:
        """Sends a frame; waits until the network has accepted it."""
        encoded = msgspec.msgpack.encode(body)
        parts = [array.data.cast("B") for array in arrays if array.size]
        header = _HEADER.pack(kind, len(encoded), sum(part.nbytes for part in parts))
        waiting = [memoryview(header + encoded), *parts]
        try:
            while waiting:
                sent = self._connection.sendmsg(waiting)
                while waiting and sent >= waiting[0].nbytes:
                    sent -= waiting.pop(0).nbytes
                if sent:
                    waiting[0] = waiting[0][sent:]
        except OSError as error:
            raise PeerLost(f"{self._name}: {error}") from error

    def receive(self, *wanted: StageFrame) -> tuple[Any, Bytes]:
        """Waits for a frame of one of these kinds. Returns its body and its arrays, as bytes."""
        return self._receive(wanted, MAX_BODY_BYTES, MAX_DATA_BYTES)

    def receive_hello(self) -> StageHello:
        """Waits for the first frame of a connection that may be a stranger's, for ``HELLO_S`` in all."""
        timer = threading.Timer(HELLO_S, self.close)
        timer.daemon = True
        timer.start()
        try:
            hello, _ = self._receive((StageFrame.HELLO,), MAX_HELLO_BYTES, 0)
        finally:
            timer.cancel()
        assert isinstance(hello, StageHello), "declared so"
        return hello

    def _receive(self, wanted: Sequence[StageFrame], max_body_bytes: int, max_data_bytes: int) -> tuple[Any, Bytes]:
        number, body_bytes, data_bytes = _HEADER.unpack(self._read(_HEADER.size).data)
        if number not in wanted or body_bytes > max_body_bytes or data_bytes > max_data_bytes:
            raise PeerLost(f"{self._name}: it sent a frame of kind {number} with {body_bytes} and {data_bytes} bytes")
        try:
            body = _DECODERS[StageFrame(number)].decode(self._read(body_bytes).data)
        except msgspec.MsgspecError as error:
            raise PeerLost(f"{self._name}: its frame cannot be decoded: {error}") from error
        return body, self._read(data_bytes)

    def close(self) -> None:
        """Ends the connection; a thread that receives gets PeerLost."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it has ended already
        self._connection.close()

    def _read(self, num_bytes: int) -> Bytes:
        read: Bytes = np.empty(num_bytes, dtype=np.uint8)
        left = read.data
        try:
            while left.nbytes:
                count = self._connection.recv_into(left)
                if not count:
                    raise PeerLost(f"{self._name}: it has closed its connection")
                left = left[count:]
        except OSError as error:
            raise PeerLost(f"{self._name}: {error}") from error
        return read


def listen(config: WorkerConfig) -> socket.socket:
    """Returns the socket at which rank 0 accepts the others. Raises OSError."""
    if not config.meeting.directory:
        return socket.socket(fileno=config.meeting.stage_descriptor)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(_path(config))
    listener.listen(config.num_ranks)
    return listener


def accept_ranks(config: WorkerConfig, listener: socket.socket) -> list[StageLink]:
    """Waits until every other rank has connected; returns the links in the order of the ranks. Connections that are
    none of them end, and keep no other one waiting. Closes the listener."""
    found: dict[int, StageLink] = {}
    greeting: list[threading.Thread] = []
    changing = threading.Lock()
    listener.settimeout(RETRY_S)  # to see that the last rank has been found
    with listener:
        while len(found) < config.num_ranks - 1:
            greeting = [thread for thread in greeting if thread.is_alive()]
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            if len(greeting) == MAX_STRANGERS:
                connection.close()
                continue
            connection.settimeout(None)
            greeting.append(threading.Thread(target=_greet, args=(config, connection, found, changing), daemon=True))
            greeting[-1].start()
    return [link for _, link in sorted(found.items())]


def _greet(
    config: WorkerConfig, connection: socket.socket, found: dict[int, StageLink], changing: threading.Lock
) -> None:
    """Adds a connection to the links if it is a rank that is missing, and ends it otherwise."""
    link = StageLink(connection, "a connection")
    try:
        hello = link.receive_hello()
    except PeerLost:
        link.close()
        return
    with changing:
        is_known = hmac.compare_digest(hello.secret, config.meeting.secret)
        if is_known and hello.rank not in found and 0 < hello.rank < config.num_ranks:
            found[hello.rank] = StageLink(_tuned(connection), f"rank {hello.rank}")
            return
    link.close()


def connect(config: WorkerConfig) -> StageLink:
    """Connects another rank to rank 0. Raises PeerLost."""
    give_up_at = time.monotonic() + CONNECT_S
    while True:
        try:
            connection = _connected(config)
            break
        except OSError as error:
            # Rank 0 listens soon; a host that cannot be reached is worth another try as well.
            if time.monotonic() > give_up_at:
                raise PeerLost(f"rank 0 cannot be reached: {error}") from error
            time.sleep(RETRY_S)
    link = StageLink(_tuned(connection), "rank 0")
    link.send(StageFrame.HELLO, StageHello(config.rank, config.meeting.secret))
    return link


def _connected(config: WorkerConfig) -> socket.socket:
    if not config.meeting.directory:
        connection = socket.create_connection((config.meeting.host, config.meeting.stage_port), timeout=HELLO_S)
        connection.settimeout(None)
        return connection
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(_path(config))
    except OSError:
        connection.close()
        raise
    return connection


def _path(config: WorkerConfig) -> str:
    """Returns the path of the socket."""
    return os.path.join(config.meeting.directory, "stages")


def _tuned(connection: socket.socket) -> socket.socket:
    """Makes a TCP connection send at once."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection
