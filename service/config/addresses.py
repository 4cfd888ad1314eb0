"""The addresses that the service listens on, ``host:port`` or ``unix:PATH``, checked before anything slow starts."""

import contextlib
import errno
import logging
import os
import socket
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from penstock.clients.host.loopback import is_loopback, resolves_to_loopback
from penstock.clients.host.socket_lock import PathTaken, socket_lock

MAX_SOCKET_PATH = 107
"""Limit of Linux on the length of a socket's path, in bytes."""
MAX_PORT = 65535
ADMIN_FLAG = "--admin-listen"
HTTP_FLAG = "--http-port"
HTTP_HOST_FLAG = "--http-host"
ADMIN_HTTP_FLAG = "--admin-http-port"
ADMIN_HTTP_HOST_FLAG = "--admin-http-host"
METRICS_FLAG = "--metrics-listen"
METRICS_PATH, LIVE_PATH, READY_PATH = "/metrics", "/livez", "/readyz"
"""The paths of the metrics listener."""
_PROBLEMS: Mapping[int | None, str] = {
    errno.EADDRINUSE: "the port is in use; stop what uses it or choose another",
    errno.EACCES: "this user may not listen there; choose a port of 1024 or more",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose 127.0.0.1 or 0.0.0.0",
}
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - only compared with
OFF = "off"
"""The address that turns a listener off."""

_log = logging.getLogger(__name__)


class ListenError(Exception):
    """The service cannot listen on an address. The text names the address and the remedy."""


@dataclass(frozen=True, slots=True)
class Address:
    """A parsed listen address."""

    host: str = ""
    port: int = 0
    """0: any free port."""
    path: Path | None = None
    """The path of a Unix socket; then host and port are ignored."""
    flag: str = field(default="--listen", compare=False)
    """The flag that sets the address, for errors."""
    host_flag: str = field(default="", compare=False)
    """The flag that sets the host, if ``flag`` sets only the port."""

    @classmethod
    def parse(cls, text: str, flag: str = "--listen", host_flag: str = "") -> "Address":
        """Parses ``host:port`` or ``unix:PATH``. Raises ListenError."""
        if text.startswith("unix:"):
            path = Path(text.removeprefix("unix:"))
            if not path.name or len(os.fsencode(path.absolute())) > MAX_SOCKET_PATH:
                raise ListenError(f"{flag} {text}: the socket's path must be 1 to {MAX_SOCKET_PATH} bytes long")
            return cls(path=path.absolute(), flag=flag)
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
            or_path = "" if flag == METRICS_FLAG else ", or unix:PATH"
            or_off = f", or {OFF}" if flag in (ADMIN_FLAG, METRICS_FLAG) else ""
            raise ListenError(f"{flag} {text}: must be HOST:PORT with a port of 0 to {MAX_PORT}{or_path}{or_off}")
        return cls(host, int(port), flag=flag, host_flag=host_flag)

    def __str__(self) -> str:
        """Returns the form that ``parse`` and gRPC accept."""
        return f"unix:{self.path}" if self.path is not None else self.with_port(self.port)

    def with_port(self, port: int) -> str:
        """Returns the address as text, with another port."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @property
    def reached_at(self) -> str:
        """The address that a client on this machine connects to."""
        if self.path is not None:
            return str(self)
        return Address(_ANYWHERE.get(self.host, self.host)).with_port(self.port)

    @property
    def is_local(self) -> bool:
        """Whether only this machine's users can reach it."""
        return self.path is not None or is_loopback(self.host)

    def check_free(self) -> None:
        """Checks that the service can listen here, since gRPC reports no reason if it cannot, and takes over a socket's
        path that is in use. Removes the socket of a service that has ended. Raises ListenError."""
        if self.path is None:
            self._check_port()
        else:
            self._check_path(self.path)

    @contextlib.contextmanager
    def reserved(self) -> Iterator[None]:
        """Reserves a Unix socket's path, from before ``check_free`` until the service has ended: otherwise two services
        that start at the same time would both find it free. Raises ListenError."""
        with contextlib.ExitStack() as lock:
            try:
                if self.path is not None:
                    lock.enter_context(socket_lock(self.path))
            except PathTaken:
                raise self._unusable("is in use") from None
            except OSError as error:
                raise self._unusable(f"cannot be locked ({error.strerror or error})") from None
            yield

    def resolve(self) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
        """Returns the family and the address for a socket that listens here. Raises socket.gaierror."""
        family, _, _, _, where = socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return family, where

    def remove(self) -> None:
        """Removes a Unix socket's path."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _check_port(self) -> None:
        try:
            family, where = self.resolve()
        except socket.gaierror as error:
            problem = f"no address for this host: {error.strerror}; choose 127.0.0.1 or 0.0.0.0"
            raise ListenError(f"{self.host_flag or self.flag} {self}: {problem}") from None
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(where)
            except OSError as error:
                flag = self.host_flag if self.host_flag and error.errno == errno.EADDRNOTAVAIL else self.flag
                problem = _PROBLEMS.get(error.errno) or error.strerror or str(error)
                raise ListenError(f"{flag} {self}: {problem}") from None

    def _check_path(self, path: Path) -> None:
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise ListenError(f"{self.flag} {self}: {path.parent} is not a directory; create it first") from None
            return
        if not stat.S_ISSOCK(mode):
            raise ListenError(f"{self.flag} {self}: the path exists and is not a socket; choose another")
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:  # its service has ended
                path.unlink(missing_ok=True)
                return
            except FileNotFoundError:
                return
            except OSError as error:  # too many connections, another user's, or another type of socket
                why = f"cannot be tried ({error.strerror or error})"
            else:
                why = "is in use"
        raise self._unusable(why)

    def _unusable(self, why: str) -> ListenError:
        return ListenError(f"{self.flag} {self}: the socket {why}; stop that service or choose another path")


def _beside(service: Address, distance: int) -> str:
    port = service.port + distance if service.port <= MAX_PORT - distance else service.port - distance
    return f"127.0.0.1:{port if service.port else 0}"


def admin_address(text: str | None, service: Address, *, has_keys: bool) -> Address | None:
    """Returns the address of the admin listener of a service that listens at ``service``; None if it is off.

    ``text`` is ``--admin-listen``; the default is the next port on loopback, or a socket beside the service's own.
    Raises ListenError, also if other machines could administer the service without a key.
    """
    if text == OFF:
        return None
    if text is None and service.path is not None:
        text = f"unix:{service.path}.admin"
    elif text is None:
        text = _beside(service, 1)
    address = Address.parse(text, ADMIN_FLAG)
    if not (has_keys or address.is_local):
        raise ListenError(
            f"{ADMIN_FLAG} {text}: anyone who reaches it could administer the service; give --api-keys-file with an "
            "admin's key, or listen on 127.0.0.1 or a Unix socket"
        )
    return address


def metrics_address(text: str | None, service: Address) -> Address | None:
    """Returns the address of the metrics listener of a service that listens at ``service``; None if it is off.

    ``text`` is ``--metrics-listen``; the default is loopback, two ports after the service's own, or off if the service
    listens on a Unix socket. Raises ListenError.
    """
    if text == OFF or (text is None and service.path is not None):
        return None
    if text is None:
        text = _beside(service, 2)
    address = Address.parse(text, METRICS_FLAG)
    if address.path is not None:
        raise ListenError(f"{METRICS_FLAG} {text}: must be HOST:PORT, or {OFF}; Prometheus reads metrics over HTTP")
    return address


def admin_http_address(text: str | None, *, has_keys: bool) -> Address | None:
    """Returns the address of the status page, by ``--admin-http-host`` and ``--admin-http-port``; None if it is off.
    Raises ListenError, also if other machines could administer the service without a key."""
    if text is None:
        return None
    address = Address.parse(text, ADMIN_HTTP_FLAG, ADMIN_HTTP_HOST_FLAG)
    if not (has_keys or address.is_local):
        raise ListenError(
            f"{ADMIN_HTTP_HOST_FLAG} {address}: anyone who reaches it could administer the service; give "
            "--api-keys-file with an admin's key, or listen on 127.0.0.1"
        )
    return address


def check_apart(addresses: Iterable[Address]) -> None:
    """Checks that no two listeners have the same port or path. Raises ListenError, which names the flags of both, since
    a user may not know that a listener has a default address."""
    for one, other in combinations(addresses, 2):
        if one.path is None and other.path is None:
            shares_host = one.host == other.host or one.host in _ANYWHERE or other.host in _ANYWHERE
            is_same = one.port == other.port != 0 and shares_host
        else:
            is_same = one.path == other.path
        if is_same:
            raise ListenError(f"{one.flag} {one} conflicts with {other.flag} {other}; give one of them another address")


def warn_of_exposure(
    service: Address,
    http: Address | None,
    metrics: Address | None,
    *,
    has_keys: bool,
    is_mutual: bool,
    reports_cache: bool = False,
) -> None:
    """Logs a warning for each listener that other machines can use without credentials.

    ``has_keys``: callers need a key or a token. ``is_mutual``: callers need a certificate, except over HTTP.
    ``reports_cache``: the service has a contract of another engine that reports what is cached. The admin listener
    needs no warning: without keys, an address that other machines can reach is refused.
    """
    if not (has_keys or is_mutual):
        what = "read all prompts by --contracts, and " if reports_cache else ""
        remedy = "give --api-keys-file, --jwt-jwks-file or --tls-client-ca"
        _warn(service, f"{what}use the model without a key", f"{remedy}, let only the gateway in" if what else remedy)
        _warn(metrics, "read the metrics, with the names of tenants", "keep others out with a firewall")
    if not has_keys:
        _warn(http, "use the model over HTTP without a key", "give --api-keys-file or --jwt-jwks-file")


def _warn(address: Address | None, what: str, remedy: str) -> None:
    if address is None or address.is_local or resolves_to_loopback(address.host):
        return
    flag = address.host_flag or address.flag
    _log.warning(
        "%s %s: anyone who can reach this address can %s; %s, or listen on 127.0.0.1", flag, address, what, remedy
    )
