"""Decides which connections are closed: idle ones when there are too many, and slow readers when too much output waits
for them. Knows no HTTP."""

import resource
from typing import Protocol

_RESERVED_FILES = 64
"""Open files that connections leave free: for the service, logs and listeners."""


class Connection(Protocol):
    """A client's connection."""

    @property
    def num_unread(self) -> int:
        """Bytes that were written to it and that the client has not taken."""
        ...

    def cut(self) -> None:
        """Closes it now, and ends its request."""
        ...


class ConnectionPlaces:
    """Counts a listener's connections. For the event loop's thread."""

    def __init__(self, max_connections: int, max_unread_bytes: int) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if limit != resource.RLIM_INFINITY:
            max_connections = max(1, min(max_connections, limit - _RESERVED_FILES))
        self.max_connections = max_connections
        self._max_unread_bytes = max_unread_bytes
        self._idle: dict[Connection, None] = {}
        """Connections without a request; the one that has been idle for the longest time comes first."""
        self._unread: dict[Connection, None] = {}
        """Connections whose clients are behind; the one that has been behind for the longest time comes first."""
        self._num = 0

    def enter(self, connection: Connection) -> None:
        """Adds a new connection. If it is one too many, closes the one that has been idle for the longest time."""
        self._num += 1
        if self._num > self.max_connections:
            longest_idle = next((each for each in self._idle if not each.num_unread), None)
            if longest_idle is not None:
                longest_idle.cut()
        self._idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """Removes a connection that has ended."""
        self._num -= 1
        self._idle.pop(connection, None)
        self._unread.pop(connection, None)

    def begin(self, connection: Connection) -> None:
        """Marks a connection as busy, since the head of a request has arrived: it does not give way."""
        self._idle.pop(connection, None)

    def end(self, connection: Connection) -> None:
        """Marks a connection as idle, since its answer was written."""
        self._idle[connection] = None

    def fall_behind(self, connection: Connection) -> None:
        """Marks a connection as behind, since much output waits for its client. If that is too much in all, closes the
        connections that have been behind for the longest time."""
        self._unread[connection] = None
        num_bytes = sum(each.num_unread for each in self._unread)
        for each in list(self._unread):
            if num_bytes <= self._max_unread_bytes:
                return
            num_bytes -= each.num_unread
            each.cut()

    def catch_up(self, connection: Connection) -> None:
        """Marks a connection as no longer behind, since most was read."""
        self._unread.pop(connection, None)
