"""The limit of open files and connections of a process."""

import resource
from contextlib import suppress


def raise_open_files_limit() -> None:
    """Raises the limit to the hard limit, for this process and its future children. The usual limit of 1,024 exists for
    programs that call select(): a server with that many connections could accept no more."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a system may allow less than it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
