"""Reserves the path of a Unix socket for one process, from before it checks whether the path is free until it ends."""

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

_log = logging.getLogger(__name__)

_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""The errors with which NFS and 9p refuse to lock."""


class PathTaken(Exception):
    """Another process has the lock of this path."""


@contextlib.contextmanager
def socket_lock(path: Path) -> Iterator[None]:
    """Holds the lock of a socket's path: the file ``PATH.lock``, which the kernel unlocks when its holder ends, however
    it ends. Where the file system has no locks, nothing is held. Raises PathTaken, and OSError if the file cannot be
    created."""
    name = path.with_name(f"{path.name}.lock")
    try:
        descriptor = _locked(name)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _log.warning("the file system of %s has no locks: another process that starts now may take the socket", path)
        with contextlib.suppress(OSError):
            name.unlink()
        yield
        return
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            name.unlink()
        os.close(descriptor)


def _locked(name: Path) -> int:
    while True:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with contextlib.ExitStack() as stack:
            stack.callback(os.close, descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PathTaken(str(name)) from None
            if _is_at(name, descriptor):  # its last holder may have removed it after it was opened here
                stack.pop_all()
                return descriptor


def _is_at(name: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(name.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
