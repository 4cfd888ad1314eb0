"""Closes connections to the service's TCP ports: idle ones, so that there is room for new ones, and those that must
end.

gRPC limits their number and refuses further ones, but cannot list or close connections. So this module finds them among
the process's open files and shuts them down there: to gRPC, the client seems to have disconnected. If open files cannot
be listed, as on systems other than Linux, only gRPC's own limits apply.
"""

import asyncio
import contextlib
import math
import os
import resource
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from heapq import nlargest
from typing import NamedTuple, TypeVar
from urllib.parse import unquote

from penstock.service.config.addresses import Address

MAX_ADMIN_CONNECTIONS = 64
RESERVED_FILES = 48
"""Open files that are reserved for purposes other than connections, above all for the pipes and sockets of a new worker
after a crash."""
CHECK_S = 0.25
LIST_S = 5.0
"""Interval between two listings of connections while few files are new. Listing 4,096 connections takes 34 ms."""
_MOST_FILES = 1 << 16
_FULL, _ENOUGH = 0.75, 0.625
"""Shares of the limit: above the first, connections are closed down to the second."""
_FILES = "/proc/self/fd"

CALL_BYTES, MESSAGE_BYTES = 1 << 10, 128
"""Bytes on the connection for a call and for a message, besides the message itself and 1/16 of it for frames and TLS.
Rounded up: otherwise a connection would seem to have unfinished messages."""
_RECEIVED = struct.Struct("=QQ")
"""``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of ``struct tcp_info``."""
_RECEIVED_AT = 120

Peer = tuple[str, int]
"""A client's host and port."""


class ClientConnection(NamedTuple):
    """A client's connection. A later one may have the same peer."""

    peer: Peer
    inode: int


def max_connections(wanted: int) -> int:
    """Returns ``wanted``, or fewer if the limit on open files leaves fewer beside open and reserved files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, limit - _num_files() - MAX_ADMIN_CONNECTIONS - RESERVED_FILES))


def _num_files() -> int:
    try:
        return len(os.listdir(_FILES))
    except FileNotFoundError:
        return RESERVED_FILES  # a guess
    except OSError:  # the last file is open
        return _max_files()


def _max_files() -> int:
    """Returns the number of descriptors to try one by one."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(limit, _MOST_FILES) if limit >= 0 else _MOST_FILES


@lru_cache(maxsize=1024)
def peer_of(name: str) -> Peer | None:
    """Parses gRPC's name of a client; None for a Unix socket, whose clients have no addresses."""
    kind, _, address = unquote(name).partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    return host.removeprefix("[").removesuffix("]"), int(port)


_Found = TypeVar("_Found")


@dataclass(slots=True)
class _Use:
    """How a client uses its connection."""

    num_calls: int = 0
    num_known: int = 0
    """The calls of authenticated callers among ``num_calls``."""
    tenant: str | None = None
    """The tenant of the last authenticated call; None if there was none."""
    last: float = 0.0
    """When a call last began or ended."""
    num_bytes: int = 0
    """Bytes of complete messages and of calls."""
    inode: int = 0
    """The inode of its connection when that was last listed."""


class _SpareFile:
    """A file that is kept open so that a listing can use its descriptor when no other one is left.

    A listing runs in a thread, and may go on after the event loop has closed the file. So a thread takes the
    descriptor before closing it: a second ``close`` of the same number could close another file.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._descriptor: int | None = None
        self._is_wanted = False

    def open(self) -> None:
        self._is_wanted = True
        self._open_descriptor()

    def close(self) -> None:
        self._is_wanted = False
        self._close_descriptor()

    @contextlib.contextmanager
    def freed(self) -> Iterator[None]:
        """Frees the descriptor for the code inside, and opens the file again afterwards unless it was closed."""
        self._close_descriptor()
        try:
            yield
        finally:
            self._open_descriptor()

    def _close_descriptor(self) -> None:
        with self._lock:
            descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _open_descriptor(self) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._is_wanted and self._descriptor is None:
                self._descriptor = os.open(os.devnull, os.O_RDONLY)


class Connections:
    """Keeps track of the use of connections. Belongs to the event loop; open files are listed in a thread."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}
        """The connection limit of each port."""
        self._uses: dict[Peer, _Use] = {}
        self._looking: asyncio.Task[None] | None = None
        self._is_blind = not os.path.isdir(_FILES)
        self._num_files = 0
        """Number of open files at the last listing."""
        self._num_connected: dict[int, int] = {}
        """Connections at each port at the last listing."""
        self._seen: dict[ClientConnection, float] = {}
        """When each connection was first listed."""
        self._leaving: set[Peer] = set()
        self._cutting: asyncio.Task[None] | None = None
        self._listing = asyncio.Lock()
        self._spare = _SpareFile()

    def add_listener(self, address: Address, limit: int) -> None:
        """Watches the connections of a listener; gRPC accepts up to ``limit``. Does nothing for a Unix socket, whose
        clients have no addresses."""
        if address.path is None:
            self._limits[address.port] = limit

    def start(self) -> None:
        if self._limits and not self._is_blind:
            self._spare.open()
            self._looking = asyncio.create_task(self._check(), name="connections")

    def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        self._spare.close()

    def begin_call(self, name: str, tenant: str | None) -> None:
        """Counts a call that begins. ``name`` is gRPC's name of the client, ``tenant`` its authenticated tenant."""
        peer = peer_of(name)
        if peer is not None:
            use = self._uses.setdefault(peer, _Use())
            use.num_calls += 1
            use.num_bytes += CALL_BYTES
            if tenant is not None:
                use.num_known += 1
                use.tenant = tenant
            use.last = asyncio.get_running_loop().time()

    def end_call(self, name: str, tenant: str | None) -> None:
        peer = peer_of(name)
        use = None if peer is None else self._uses.get(peer)
        if peer is not None and use is not None:
            use.num_calls -= 1
            use.num_known -= tenant is not None
            use.last = asyncio.get_running_loop().time()
            if self._is_blind and not use.num_calls:
                del self._uses[peer]

    def count(self, name: str, num_bytes: int) -> None:
        """Counts a complete message of a client."""
        peer = peer_of(name)
        use = None if peer is None else self._uses.get(peer)
        if use is not None:
            use.num_bytes += num_bytes + num_bytes // 16 + MESSAGE_BYTES

    async def unfinished_bytes(self) -> dict[ClientConnection, int]:
        """Returns an upper limit of the bytes of each connection that do not belong to a complete message. Empty if the
        system does not report them."""
        found: dict[ClientConnection, int] = {}
        for connection, num_bytes in (await self._list(_received)).items():
            use = self._uses.get(connection.peer)
            if use is None:
                continue
            if use.inode not in (0, connection.inode):
                use.num_bytes = 0  # counted on an earlier connection
            use.inode = connection.inode
            found[connection] = max(0, num_bytes - use.num_bytes)
        return found

    def cut(self, name: str) -> None:
        """Closes a client's connection soon, with all calls on it."""
        peer = peer_of(name)
        if peer is not None:
            self._cut({peer})

    def _cut(self, peers: Collection[Peer]) -> None:
        self._leaving.update(peers)
        if self._cutting is None or self._cutting.done():
            self._cutting = asyncio.create_task(self._cut_all(), name="connections that are cut")

    async def _cut_all(self) -> None:
        while self._leaving:
            peers, self._leaving = frozenset(self._leaving), set()
            await self._list(_shut_down, peers)

    async def _list(self, look: Callable[..., _Found], *arguments: object) -> _Found:
        """Runs ``look`` on the connections, in a thread."""

        def find() -> _Found:
            with self._spare.freed():
                return look(frozenset(self._limits), *arguments)

        async with self._listing:
            return await asyncio.to_thread(find)

    async def _check(self) -> None:
        loop = asyncio.get_running_loop()
        looked = loop.time()
        while True:
            await asyncio.sleep(CHECK_S)
            num_files = _num_files()
            # Few files and clients are not worth an occasional listing.
            has_many = max(num_files, len(self._uses)) > min(self._limits.values()) * _FULL
            is_late = looked + LIST_S <= loop.time()
            if not self.may_be_full(num_files) and not (is_late and has_many):
                continue
            listed = await self._list(_connected)
            looked = loop.time()
            connected = self.by_age(listed, looked)
            self._num_files = num_files
            self._num_connected = {port: len(peers) for port, peers in connected.items()}
            leaving = {peer for port, limit in self._limits.items() for peer in self.giving_way(connected[port], limit)}
            if leaving:
                self._cut(leaving)
            all_peers = set().union(*connected.values())
            for peer in [peer for peer, use in self._uses.items() if not use.num_calls and peer not in all_peers]:
                del self._uses[peer]

    def may_be_full(self, num_files: int) -> bool:
        """Returns whether a port may have too many connections if all new files belong to it."""
        num_new = max(0, num_files - self._num_files)
        return any(self._num_connected.get(port, 0) + num_new > limit * _FULL for port, limit in self._limits.items())

    def by_age(self, listed: Mapping[int, Collection[ClientConnection]], now: float) -> dict[int, list[Peer]]:
        """Returns the clients of each port in the order in which they were first listed. Descriptor numbers do not show
        a connection's age, since numbers of closed connections are reused."""
        self._seen = {found: self._seen.get(found, now) for port in listed for found in listed[port]}
        return {port: [found.peer for found in sorted(listed[port], key=self._seen.__getitem__)] for port in listed}

    def giving_way(self, connected: Collection[Peer], limit: int) -> Collection[Peer]:
        """Returns the clients of a port to disconnect; none while there is room. Clients that never authenticated come
        first, those without calls before the others; then those that have been idle the longest. If connections with
        authenticated calls leave too little room, the tenant with the most of them loses its newest."""
        if len(connected) <= limit * _FULL:
            return ()
        unused = _Use()
        uses = {peer: self._uses.get(peer, unused) for peer in connected}

        def rank(peer: Peer) -> tuple[bool, bool, float]:
            use = uses[peer]
            return use.tenant is not None, use.num_calls > 0, use.last

        idle = sorted((peer for peer, use in uses.items() if not use.num_known), key=rank)
        leaving = idle[: len(connected) - int(limit * _ENOUGH)]
        num_more = len(connected) - len(leaving) - math.ceil(limit * _FULL)
        if num_more > 0:
            numbers: Counter[str | None] = Counter()
            busy: list[tuple[int, Peer]] = []
            for peer in sorted((peer for peer, use in uses.items() if use.num_known), key=lambda peer: uses[peer].last):
                tenant = uses[peer].tenant
                numbers[tenant] += 1
                busy.append((numbers[tenant], peer))
            leaving += [peer for _, peer in nlargest(num_more, busy)]
        return leaving


def _connected(ports: Collection[int]) -> dict[int, list[ClientConnection]]:
    """Returns the connections of each port."""
    found: dict[int, list[ClientConnection]] = {port: [] for port in ports}
    for port, client, _ in _sockets(ports):
        found[port].append(client)
    return found


def _received(ports: Collection[int]) -> dict[ClientConnection, int]:
    """Returns the bytes received on each connection, minus the most that can be HTTP/2 acknowledgements of sent data:
    half of the bytes sent."""
    found: dict[ClientConnection, int] = {}
    for _, client, connection in _sockets(ports):
        with contextlib.suppress(OSError, struct.error):  # an older system
            info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            num_sent, num_received = _RECEIVED.unpack_from(info, _RECEIVED_AT)
            found[client] = num_received - num_sent // 2
    return found


def _shut_down(ports: Collection[int], peers: Collection[Peer]) -> None:
    for _, client, connection in _sockets(ports):
        if client.peer in peers:
            with contextlib.suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)


def _sockets(ports: Collection[int]) -> Iterator[tuple[int, ClientConnection, socket.socket]]:
    """Yields the connections of these ports as copies of gRPC's descriptors: a number may belong to another file a
    moment later, but a copy stays the same file."""
    try:
        names: Collection[int] = sorted(map(int, os.listdir(_FILES)))
    except OSError:  # the last file is open
        names = range(_max_files())
    for number in names:
        with contextlib.suppress(OSError), _copy(number) as connection:
            address = connection.getsockname()
            if isinstance(address, tuple) and address[1] in ports:
                host, port, *_ = connection.getpeername()
                inode = os.fstat(connection.fileno()).st_ino
                yield address[1], ClientConnection((host.removeprefix("::ffff:"), port), inode), connection


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
