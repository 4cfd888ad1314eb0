"""Limits the memory of unfinished later messages of streams. A time limit would end idle streams, since any time may
pass between two messages of a stream.

gRPC does not show a message until it is complete. But the kernel counts the bytes that a connection has received, and
the service counts those in complete messages: the rest is in unfinished ones. Streams of the connections with the most
unfinished bytes end, but only if the process has grown and there are many such bytes. The kernel does not count the
bytes of Unix sockets, so no streams end there.
"""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from penstock.clients.host.event_loop import process_bytes
from penstock.service.transport.connections import ClientConnection, Connections, Peer, peer_of
from penstock.service.transport.places import HeldPlace, Places, Rules

CHECK_S = 0.5
CALM_CHECK_S = 10.0
MAX_UNFINISHED_BYTES = 256 << 20
CALM_BYTES = 64 << 20
"""Growth of the process below which unfinished messages do not matter."""
STREAM_BYTES = 8 << 20
"""Approximate limit of an unfinished message of one stream."""
QUIET_S = 1.0
"""A stream that got a message within this time stays."""
_MANY = 1 << 30


class UnfinishedMessages:
    """Keeps track of streams that wait for a later message. Belongs to the event loop; a thread lists connections."""

    def __init__(self, connections: Connections) -> None:
        self.reads = Places(
            Rules(
                total=_MANY,
                each=_MANY,
                waiting_each=0,
                max_waiting=0,
                hold_s=0.0,
                message="unfinished messages hold too much memory, and this stream's connection has the most of them; "
                "open the stream again, and send complete messages",
            )
        )
        """The owner of a place is a connection."""
        self._connections = connections
        self._least_bytes = 0
        self._settled: dict[ClientConnection, int] = {}
        """Bytes of each connection that are not in a complete message and no longer held."""
        self._looking: asyncio.Task[None] | None = None

    def read(self, name: str) -> HeldPlace:
        """Returns the place to hold while waiting for a later message. ``name`` is gRPC's name of the client."""
        peer = peer_of(name)
        return self.reads.place("" if peer is None else _owner(peer))

    def start(self) -> None:
        """Starts to watch, if the system reports the size of the process."""
        with suppress(OSError):
            self._least_bytes = process_bytes()
            self._looking = asyncio.create_task(self._check_again(), name="unfinished messages")

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()

    async def _check_again(self) -> None:
        loop = asyncio.get_running_loop()
        calm_check = loop.time()
        while True:
            await asyncio.sleep(CHECK_S)
            num_bytes = process_bytes()
            self._least_bytes = min(self._least_bytes, num_bytes)
            num_grown = num_bytes - self._least_bytes
            is_calm = num_grown < CALM_BYTES
            is_due = loop.time() >= calm_check + CALM_CHECK_S if is_calm else num_grown > MAX_UNFINISHED_BYTES
            if not is_due or not self.reads.num_taken:
                continue
            unfinished = await self._connections.unfinished_bytes()
            if is_calm:
                calm_check = loop.time()
                self._settled = unfinished
            else:
                self.check(unfinished)

    def check(self, unfinished: Mapping[ClientConnection, int]) -> None:
        """Ends streams if too many bytes are unfinished. ``unfinished``: the number of such bytes by connection."""
        self._settled = {each: settled for each, settled in self._settled.items() if each in unfinished}
        left = {each: max(0, number - self._settled.get(each, 0)) for each, number in unfinished.items()}
        total = sum(left.values())
        for connection in sorted(left, key=left.__getitem__, reverse=True):
            if total <= MAX_UNFINISHED_BYTES:
                break
            for place in self._quiet(connection):
                num_bytes = min(STREAM_BYTES, left[connection])
                if not num_bytes or total <= MAX_UNFINISHED_BYTES:
                    break
                place.end()
                left[connection] -= num_bytes
                total -= num_bytes
                self._settled[connection] = self._settled.get(connection, 0) + num_bytes

    def _quiet(self, connection: ClientConnection) -> list[HeldPlace]:
        """Returns a connection's quiet streams; the one whose last message is oldest comes first."""
        now = asyncio.get_running_loop().time()
        mine = self.reads.taken(_owner(connection.peer))
        return [place for place in mine if place.since is not None and place.since + QUIET_S <= now]


def _owner(peer: Peer) -> str:
    host, port = peer
    return f"{host} {port}"
