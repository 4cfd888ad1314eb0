"""The status page's settings: frozen, complete, checked by ``command.py``."""

from dataclasses import dataclass

from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.host.allowed_hosts import AllowedHosts


@dataclass(frozen=True)
class StatusPageSettings:
    """The settings of the page's app."""

    service: ConnectionOptions
    """The service's admin listener. It has no key: each operator logs in with their own."""
    allowed_hosts: AllowedHosts | None = None
    """The accepted values of ``Host`` if the service needs no key; None: any."""
    is_exposed: bool = False
    """Whether other machines can reach the page. It then serves only if the service needs a key."""
    max_body_bytes: int = 16 << 10
    """The limit on the body of a request: a key has at most half as many."""
    body_timeout_s: float = 10.0
    call_timeout_s: float = 5.0
    recheck_s: float = 5.0
    """How long it is remembered whether the service needs a key."""
