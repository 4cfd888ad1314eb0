"""Decides which values of the HTTP header ``Host`` a server without keys accepts.

A web page can make its own name resolve to 127.0.0.1 after it was loaded (DNS rebinding). The browser then treats the
server that listens there as the page's own, and only ``Host`` reveals the difference. So only known names are accepted.
"""

import ipaddress
import re
import socket

_HOST = re.compile(r"(\[[0-9a-f:.]+(?:%[\w.~-]+)?\]|[^\s:/?#@\[\]\\]+)(?::[0-9]{0,5})?", re.IGNORECASE)
_OLD_IPV4 = re.compile(r"(?:0x[0-9a-f]+|[0-9]+)(?:\.(?:0x[0-9a-f]+|[0-9]+)){1,3}")
"""Fewer than four numbers, or other bases, such as 127.1. To a browser all names that end in a number are addresses."""
_NAME = re.compile(r"(?:\*\.)?[\w-]+(?:\.[\w-]+)*\.?|\*")


class AllowedHosts:
    """The names of a server. Addresses are always allowed, since no page can have one as its name. So are names without
    a dot, such as a container's, since public DNS has none."""

    def __init__(self, served: str = "", names: tuple[str, ...] = ()) -> None:
        """``served``: the host that the server listens on. ``names``: from ``read_hosts``."""
        own = {_plain(served), _plain(socket.gethostname())}
        self._exact = own | {name for name in names if not name.startswith("*")}
        self._suffixes = tuple(name.removeprefix("*") for name in names if name.startswith("*."))
        self._allows_all = "*" in names

    def allows(self, host: str) -> bool:
        """Returns whether requests with this value are accepted. ``host`` may have a port."""
        if self._allows_all:
            return True
        found = _HOST.fullmatch(host)
        if found is None:
            return False
        name = _plain(found[1])
        return (
            name in self._exact
            or "." not in name
            or name.endswith((".localhost", *self._suffixes))
            or _is_address(name)
        )


def read_hosts(text: str) -> tuple[str, ...]:
    """Reads a list of names, separated by commas. ``*.example.com`` is all names below, ``*`` any. Raises
    ValueError."""
    names = tuple(dict.fromkeys(each.strip().lower() for each in text.split(",") if each.strip()))
    for name in names:
        if not _NAME.fullmatch(name):
            raise ValueError(
                "must be names without a port, separated by commas, such as llm.example.com or *.example.com; "
                f"it has {name!r}"
            )
    return tuple(name.removesuffix(".") for name in names)


def _plain(host: str) -> str:
    return host.lower().removeprefix("[").removesuffix("]").removesuffix(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return _OLD_IPV4.fullmatch(name) is not None
    return True
