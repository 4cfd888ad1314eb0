"""Decides which connections to close: idle ones when there are too many, and slow readers when too much output is
buffered for them. Independent of HTTP."""

import resource
from collections import Counter
from itertools import chain
from typing import Protocol

_RESERVED_FILES = 64
"""Open files reserved for the service, logs and listeners."""


class HttpConnection(Protocol):
    """A client's connection."""

    @property
    def tenant(self) -> str:
        """The tenant of the current response; empty if there is none."""

    @property
    def num_unread(self) -> int:
        """The number of written bytes that neither the client nor the kernel has taken."""

    def cut(self) -> None:
        """Closes the connection immediately and ends its request."""


class ConnectionPlaces:
    """Counts a listener's connections. For the event loop's thread."""

    def __init__(self, max_connections: int, max_unread_bytes: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY:
            max_connections = max(1, min(max_connections, limit - _RESERVED_FILES))
        self.max_connections = max_connections
        self._max_unread_bytes = max_unread_bytes
        self._silent: dict[HttpConnection, None] = {}
        """Connections that have not sent a request yet, the oldest first."""
        self._idle: dict[HttpConnection, None] = {}
        """Connections between two requests; the one that has been idle longest is first."""
        self._unread: dict[HttpConnection, int] = {}
        """Connections that are read more slowly than they are written, with the number of bytes that waited when they
        were last checked. Since then it can only have fallen."""
        self._num_unread = 0
        self._num = 0

    def enter(self, connection: HttpConnection) -> None:
        """Adds a new connection. If there are too many, closes the one that has been silent longest, or else idle."""
        self._num += 1
        if self._num > self.max_connections:
            least_needed = next((each for each in chain(self._silent, self._idle) if not each.num_unread), None)
            if least_needed is not None:
                self.mark_busy(least_needed)  # it ends slightly later; until then another call would close the same one
                least_needed.cut()
        self._silent[connection] = None

    def leave(self, connection: HttpConnection) -> None:
        self._num -= 1
        self.mark_busy(connection)
        self.catch_up(connection)

    def mark_busy(self, connection: HttpConnection) -> None:
        """Marks a connection as busy, since the head of a request has arrived: it is not closed for others."""
        self._silent.pop(connection, None)
        self._idle.pop(connection, None)

    def end(self, connection: HttpConnection) -> None:
        """Marks a connection as idle, since its answer was written."""
        self._idle[connection] = None

    def fall_behind(self, connection: HttpConnection) -> None:
        """Notes that much output is buffered for a connection. If all connections together exceed the limit, the tenant
        with the most loses its largest connection."""
        self._note(connection)
        if self._num_unread > self._max_unread_bytes:
            for each in list(self._unread):
                self._note(each)
        while self._num_unread > self._max_unread_bytes:
            largest = self._largest_unread()
            self.catch_up(largest)  # no longer counted
            largest.cut()

    def catch_up(self, connection: HttpConnection) -> None:
        """Notes that most of the output has been read."""
        self._num_unread -= self._unread.pop(connection, 0)

    def _note(self, connection: HttpConnection) -> None:
        self.catch_up(connection)
        self._unread[connection] = connection.num_unread
        self._num_unread += connection.num_unread

    def _largest_unread(self) -> HttpConnection:
        of_tenants: Counter[str] = Counter()
        for connection, num_bytes in self._unread.items():
            of_tenants[connection.tenant] += num_bytes
        tenant = max(of_tenants, key=of_tenants.__getitem__)
        return max((each for each in self._unread if each.tenant == tenant), key=self._unread.__getitem__)
