"""Closes connections to the service's TCP ports: idle ones, so that there is room for new ones, and those that must
end.

gRPC limits their number and refuses further ones, but it neither lists connections nor closes one. So they are found
among the open files of this process and shut down there: to gRPC it looks as if the client had left. Where open files
cannot be listed, as on systems other than Linux, only gRPC's own limits hold.
"""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from penstock.service.listen import Address

CONNECTIONS_FLAG = "--max-connections"
MAX_CONNECTIONS = 4096
"""Default limit for the callers' listener, if the limit of open files allows as many."""
MAX_ADMIN_CONNECTIONS = 64
RESERVED_FILES = 48
"""Kept for files other than connections: above all for a new worker in place of one that died, whose pipes and sockets
must not depend on strangers."""
LOOK_S = 0.25
_FULL, _ENOUGH = 0.75, 0.625
"""Shares of the limit: above the first, connections are closed until the second is left."""
_FILES = "/proc/self/fd"

Peer = tuple[str, int]
"""A client's host and port."""


def max_connections(wanted: int) -> int:
    """Returns ``wanted``, or as many as the limit of open files leaves beside open and reserved files."""
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
    """Parses gRPC's name of a client; None for a Unix socket, whose clients have no addresses."""
    kind, _, address = unquote(name).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


@dataclass(slots=True)
class _Use:
    """How a client uses its connection."""

    num_calls: int = 0
    num_known: int = 0
    """How many of them are calls of authenticated callers."""
    was_known: bool = False
    last: float = 0.0
    """When a call last began or ended."""


class Connections:
    """Keeps track of the use of connections. Belongs to the event loop; open files are listed in a thread."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        """The limit of each port."""
        self._uses: dict[Peer, _Use] = {}
        self._looking: asyncio.Task[None] | None = None
        self._cuts: set[asyncio.Future[int]] = set()

    def add_listener(self, address: Address, limit: int) -> None:
        """Watches the connections of a listener, of which gRPC accepts ``limit``. Does nothing for a Unix socket, whose
        clients have no addresses."""
        if address.path is None:
            self._limits[address.port] = limit

    def start(self) -> None:
        """Starts watching."""
        if self._limits and os.path.isdir(_FILES):
            self._looking = asyncio.create_task(self._look(), name="connections")

    def stop(self) -> None:
        """Stops watching."""
        if self._looking is not None:
            self._looking.cancel()

    def begin_call(self, name: str, *, is_known: bool) -> None:
        """Counts a call that begins; ``name`` is gRPC's name of its client."""
        peer = peer_of(name)
        if peer is not None:
            use = self._uses.setdefault(peer, _Use())
            use.num_calls += 1
            use.num_known += is_known
            use.was_known |= is_known
            use.last = asyncio.get_running_loop().time()

    def end_call(self, name: str, *, is_known: bool) -> None:
        """Counts the end of such a call."""
        peer = peer_of(name)
        use = None if peer is None else self._uses.get(peer)
        if use is not None:
            use.num_calls -= 1
            use.num_known -= is_known
            use.last = asyncio.get_running_loop().time()

    def cut(self, name: str) -> None:
        """Closes a client's connection soon, with all calls on it."""
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
        """Returns which of these clients of a port are to be closed: none while there is room, and none with a running
        call of an authenticated caller. First come clients that were never authenticated, those without calls before
        the others; then those that have been idle for the longest time."""
        if len(connected) <= limit * _FULL:
            return ()
        unused = _Use()

        def rank(peer: Peer) -> tuple[bool, bool, float]:
            use = self._uses.get(peer, unused)
            return use.was_known, use.num_calls > 0, use.last

        idle = sorted((peer for peer in connected if not self._uses.get(peer, unused).num_known), key=rank)
        return idle[: len(connected) - int(limit * _ENOUGH)]


def _connected(ports: Collection[int]) -> dict[int, list[Peer]]:
    """Returns the clients of each port, in the order of their file numbers, which is roughly that of their age."""
    found: dict[int, list[Peer]] = {port: [] for port in ports}
    for port, peer, _ in _sockets(ports):
        found[port].append(peer)
    return found


def _shut_down(ports: Collection[int], peers: Collection[Peer]) -> int:
    """Shuts connections down; returns how many."""
    num_ended = 0
    for _, peer, connection in _sockets(ports):
        if peer in peers:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)
                num_ended += 1
    return num_ended


def _sockets(ports: Collection[int]) -> Iterator[tuple[int, Peer, socket.socket]]:
    """Yields the connections of these ports as copies of gRPC's descriptors: a moment later a number may belong to
    another file, while a copy stays what it is."""
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
    """Duplicates a descriptor. Raises OSError if it is not a socket."""
    if not os.readlink(f"{_FILES}/{number}").startswith("socket:"):
        raise OSError
    copy = os.dup(number)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
