"""Hosts as flags have them: a name or an IP address, without a port."""

import ipaddress

from penstock.service.flags import ConfigError


def check_host(flag: str, host: str, port_flag: str, or_socket: str = "") -> None:
    """Raises ConfigError for what is not a host. ``or_socket`` is the flag that takes a Unix socket, if one does."""
    if host.startswith("unix:") and or_socket:
        raise ConfigError(f"{flag}: must be a host; for a Unix socket, give {or_socket} {host} instead")
    if not host or (":" in host and not _is_ipv6(_bare(host))):
        raise ConfigError(f"{flag}: must be a host name or an IP address, and {port_flag} the port; it is {host!r}")


def host_port(host: str, port: int) -> str:
    """The two in one, an IPv6 address in brackets."""
    host = _bare(host)
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def _bare(host: str) -> str:
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True
