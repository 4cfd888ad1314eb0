"""Which connections give way: idle ones when there are too many, and unread ones when too much waits on them. Knows no
HTTP."""

import resource
from typing import Protocol

_RESERVED_FILES = 64
"""Of the process's open files: for the service, logs and listeners."""


class Connection(Protocol):
    """A connection of a client's."""

    @property
    def num_unread(self) -> int:
        """Bytes that were written to it and that the other side has not taken."""
        ...

    def cut(self) -> None:
        """Ends it now, with what is on it."""
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
        """Those without a request; the one that has been so for the longest time is first."""
        self._unread: dict[Connection, None] = {}
        """Those that are written to faster than they are read; the first one for the longest time."""
        self._num = 0

    def enter(self, connection: Connection) -> None:
        """A connection was made. Where it is one too many, the one that has been idle for the longest time ends."""
        self._num += 1
        if self._num > self.max_connections:
            longest_idle = next((each for each in self._idle if not each.num_unread), None)
            if longest_idle is not None:
                longest_idle.cut()
        self._idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """A connection has ended."""
        self._num -= 1
        self._idle.pop(connection, None)
        self._unread.pop(connection, None)

    def begin(self, connection: Connection) -> None:
        """The head of a request has come: the connection does not give way."""
        self._idle.pop(connection, None)

    def end(self, connection: Connection) -> None:
        """An answer was written."""
        self._idle[connection] = None

    def fall_behind(self, connection: Connection) -> None:
        """Much waits to be read. Where it is too much in all, the connections that have been behind for the longest
        time end."""
        self._unread[connection] = None
        num_bytes = sum(each.num_unread for each in self._unread)
        for each in list(self._unread):
            if num_bytes <= self._max_unread_bytes:
                return
            num_bytes -= each.num_unread
            each.cut()

    def catch_up(self, connection: Connection) -> None:
        """Most was read."""
        self._unread.pop(connection, None)
