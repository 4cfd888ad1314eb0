"""Finds addresses that only this machine can reach."""

import ipaddress
import socket


def is_loopback(host: str) -> bool:
    """Whether other machines cannot reach a listener on ``host``. Looks up no names."""
    if host.lower() == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def resolves_to_loopback(host: str) -> bool:
    """Like ``is_loopback``, for a name that may be this machine's own, such as one in /etc/hosts."""
    if is_loopback(host):
        return True
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return False
    return all(is_loopback(str(where[0])) for *_, where in found)
