"""The connections of the service's TCP ports: which of them give way, so that there is room for new ones, and which are
cut off.

gRPC bounds their number and refuses what comes then; it tells nobody of them, and can close none. So they are found
among the open files of this process, and shut down there: to gRPC it is as if the client had left. Where these cannot
be listed, as on other systems than Linux, only gRPC's own bounds hold.
"""

import asyncio
import contextlib
import os
import resource
import socket
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import unquote

from penstock.service.listen import Address

CONNECTIONS_FLAG = "--max-connections"
MAX_CONNECTIONS = 4096
"""Of callers, where open files allow it."""
MAX_ADMIN_CONNECTIONS = 64
RESERVED_FILES = 48
"""For what the service opens beside connections of callers and operators: above all for a worker in place of one that
died, whose pipes and sockets must not depend on strangers."""
LOOK_S = 0.25
_FULL, _ENOUGH = 0.75, 0.625
"""Shares of the connections: with more than the first, some are closed until the second is left."""
_FILES = "/proc/self/fd"

CALL_BYTES, MESSAGE_BYTES = 1 << 10, 128
"""What a call and a message take on a connection, beside the message itself and a 16th of it for frames and TLS: more
than they do, or a connection would seem to have sent what it has not."""
_RECEIVED = struct.Struct("=QQ")
"""Of ``struct tcp_info``: ``tcpi_bytes_acked`` and ``tcpi_bytes_received``."""
_RECEIVED_AT = 120

Peer = tuple[str, int]
"""Host and port of a client."""


class Connection(NamedTuple):
    """One of a client's, which may come back under the same name."""

    peer: Peer
    inode: int


def max_connections(wanted: int) -> int:
    """As many of ``wanted`` as open files allow beside those that are open and those that are reserved."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, limit - _num_files() - MAX_ADMIN_CONNECTIONS - RESERVED_FILES))


def _num_files() -> int:
    try:
        return len(os.listdir(_FILES))
    except OSError:
        return RESERVED_FILES  # a guess


@lru_cache(maxsize=1024)
def peer_of(name: str) -> Peer | None:
    """What gRPC calls a client, as a host and a port; None for a Unix socket, whose clients have no names."""
    kind, _, address = unquote(name).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(slots=True)
class _Use:
    """What a client does with its connection."""

    num_calls: int = 0
    num_known: int = 0
    """Of them, those of callers who showed who they are."""
    was_known: bool = False
    last: float = 0.0
    """When a call began or ended."""
    num_bytes: int = 0
    """Of whole messages, and of calls."""
    inode: int = 0
    """Of its connection, when it was last looked at."""


class Connections:
    """Belongs to the event loop; open files are looked at in a thread."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        """Of each port."""
        self._uses: dict[Peer, _Use] = {}
        self._looking: asyncio.Task[None] | None = None
        self._cuts: set[asyncio.Future[int]] = set()

    def add_listener(self, address: Address, limit: int) -> None:
        """Looks after the connections of a listener, of which gRPC takes ``limit``; not after those of a Unix socket,
        where clients have no names."""
        if address.path is None:
            self._limits[address.port] = limit

    def start(self) -> None:
        """Looks from here on."""
        if self._limits and os.path.isdir(_FILES):
            self._looking = asyncio.create_task(self._look(), name="connections")

    def stop(self) -> None:
        """Looks no more."""
        if self._looking is not None:
            self._looking.cancel()

    def begin_call(self, name: str, *, is_known: bool) -> None:
        """A call begins; ``name`` is what gRPC calls its client."""
        peer = peer_of(name)
        if peer is not None:
            use = self._uses.setdefault(peer, _Use())
            use.num_calls += 1
            use.num_bytes += CALL_BYTES
            use.num_known += is_known
            use.was_known |= is_known
            use.last = asyncio.get_running_loop().time()

    def end_call(self, name: str, *, is_known: bool) -> None:
        """It ends."""
        peer = peer_of(name)
        use = None if peer is None else self._uses.get(peer)
        if use is not None:
            use.num_calls -= 1
            use.num_known -= is_known
            use.last = asyncio.get_running_loop().time()

    def count(self, name: str, num_bytes: int) -> None:
        """A client's message is whole."""
        peer = peer_of(name)
        use = None if peer is None else self._uses.get(peer)
        if use is not None:
            use.num_bytes += num_bytes + num_bytes // 16 + MESSAGE_BYTES

    async def unfinished_bytes(self) -> dict[Connection, int]:
        """How many bytes of each connection were in no whole message, or fewer. Empty where the system does not
        tell."""
        found: dict[Connection, int] = {}
        for connection, num_bytes in (await asyncio.to_thread(_received, frozenset(self._limits))).items():
            use = self._uses.get(connection.peer)
            if use is None:
                continue
            if use.inode not in (0, connection.inode):
                use.num_bytes = 0  # they were another connection's
            use.inode = connection.inode
            found[connection] = max(0, num_bytes - use.num_bytes)
        return found

    def cut(self, name: str) -> None:
        """Ends a client's connection, and all calls on it, soon."""
        peer = peer_of(name)
        if peer is not None:
            self._cut({peer})

    def _cut(self, peers: Collection[Peer]) -> None:
        loop = asyncio.get_running_loop()
        cut = loop.run_in_executor(None, _shut_down, frozenset(self._limits), frozenset(peers))
        self._cuts.add(cut)
        cut.add_done_callback(self._cuts.discard)

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            fewest = min(self._limits.values()) * _FULL
            if len(self._uses) <= fewest and _num_files() <= fewest:
                continue
            connected = await asyncio.to_thread(_connected, frozenset(self._limits))
            leaving = {peer for port, limit in self._limits.items() for peer in self.giving_way(connected[port], limit)}
            if leaving:
                self._cut(leaving)
            all_peers = set().union(*connected.values())
            for peer in [peer for peer, use in self._uses.items() if not use.num_calls and peer not in all_peers]:
                del self._uses[peer]

    def giving_way(self, connected: Collection[Peer], limit: int) -> Collection[Peer]:
        """Who of these clients of a port is to leave: nobody as long as there is room, and nobody whose calls are being
        answered and who showed who it is. First go those who never did, and of those the ones without calls; then those
        who have been idle the longest."""
        if len(connected) <= limit * _FULL:
            return ()
        unused = _Use()

        def rank(peer: Peer) -> tuple[bool, bool, float]:
            use = self._uses.get(peer, unused)
            return use.was_known, use.num_calls > 0, use.last

        idle = sorted((peer for peer in connected if not self._uses.get(peer, unused).num_known), key=rank)
        return idle[: len(connected) - int(limit * _ENOUGH)]


def _connected(ports: Collection[int]) -> dict[int, list[Peer]]:
    """The clients of each port, oldest first as far as the numbers of files tell."""
    found: dict[int, list[Peer]] = {port: [] for port in ports}
    for port, peer, _ in _sockets(ports):
        found[port].append(peer)
    return found


def _received(ports: Collection[int]) -> dict[Connection, int]:
    """How many bytes came on each connection, but for those that answer what was sent: at most half as many."""
    found: dict[Connection, int] = {}
    for _, peer, connection in _sockets(ports):
        with contextlib.suppress(OSError, struct.error):  # an older system
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            num_sent, num_received = _RECEIVED.unpack_from(info, _RECEIVED_AT)
            found[Connection(peer, os.fstat(connection.fileno()).st_ino)] = num_received - num_sent // 2
    return found


def _shut_down(ports: Collection[int], peers: Collection[Peer]) -> int:
    """Returns how many connections were ended."""
    num_ended = 0
    for _, peer, connection in _sockets(ports):
        if peer in peers:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
                num_ended += 1
    return num_ended


def _sockets(ports: Collection[int]) -> Iterator[tuple[int, Peer, socket.socket]]:
    """Connections of these ports, by copies of gRPC's descriptors: a number may be another file's a moment later, a
    copy stays what it is."""
    try:
        names = sorted(map(int, os.listdir(_FILES)))
    except OSError:
        return
    for number in names:
        with contextlib.suppress(OSError), _copy(number) as connection:
            address = connection.getsockname()
            if isinstance(address, tuple) and address[1] in ports:
                host, port, *_ = connection.getpeername()
                yield address[1], (host.removeprefix("::ffff:"), port), connection


def _copy(number: int) -> socket.socket:
    """Raises OSError for what is no socket."""
    if not os.readlink(f"{_FILES}/{number}").startswith("socket:"):
        raise OSError
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
