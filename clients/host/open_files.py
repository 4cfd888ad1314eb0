"""How many files and connections a process may have open."""

import resource
from contextlib import suppress


def raise_open_files_limit() -> None:
    """To all that the system allows, for this process and for the children that it starts from then on. The usual limit
    of 1,024 is there for programs that call select(): a server with as many connections could take no further one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # a system may allow less than it says
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
