"""Checks the flags for listen addresses. A host is a name or an IP address, without a port."""

import ipaddress
from typing import TYPE_CHECKING

from penstock.service.config.addresses import Address
from penstock.service.config.flags import ConfigError

if TYPE_CHECKING:
    from penstock.service.config.serve_config import ServeConfig


def check_listeners(config: "ServeConfig") -> None:
    """Raises ConfigError for invalid hosts, and for flags that exclude or need each other."""
    _check_host("--host", config.host, "--port", "--listen")
    _check_host("--http-host", config.http_host, "--http-port")
    _check_host("--admin-http-host", config.admin_http_host, "--admin-http-port")
    if config.listen is not None and (config.host is not None or config.port is not None):
        raise ConfigError("--listen: already sets the host and the port; leave --host and --port out")
    for flag, host, port in (
        ("http", config.http_host, config.http_port),
        ("admin-http", config.admin_http_host, config.admin_http_port),
    ):
        if host is not None and port is None:
            raise ConfigError(f"--{flag}-host: needs --{flag}-port as well: give that too, or leave --{flag}-host out")


def _check_host(flag: str, host: str | None, port_flag: str, or_socket: str = "") -> None:
    """Raises ConfigError for an invalid host. ``or_socket`` is the flag that accepts a Unix socket, if any."""
    if host is None:
        return
    if host.startswith("unix:") and or_socket:
        raise ConfigError(f"{flag}: must be a host; for a Unix socket, give {or_socket} {host} instead")
    if not host or (":" in host and not _is_ipv6(_bare(host))):
        raise ConfigError(f"{flag}: must be a host name or an IP address, and {port_flag} the port; it is {host!r}")


def host_port(host: str | None, port: int) -> str:
    """Returns ``host:port``, with an IPv6 address in brackets. The default host is this machine."""
    return str(Address(_bare(host or "127.0.0.1"), port))


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
