"""A directory for the sockets and logs of a child process."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.service.config.addresses import MAX_SOCKET_PATH


@contextmanager
def private_directory() -> Iterator[Path]:
    """Yields a directory that no other user can enter, with a path short enough for a socket, and removes it."""
    longest = len(os.fsencode(tempfile.gettempdir())) + len("/penstock-12345678/socket")
    parent = None if longest <= MAX_SOCKET_PATH else "/tmp"  # noqa: S108 - mkdtemp makes it 0700 and unguessable
    with tempfile.TemporaryDirectory(prefix="penstock-", dir=parent, ignore_cleanup_errors=True) as directory:
        yield Path(directory)
