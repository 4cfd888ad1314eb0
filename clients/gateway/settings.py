"""The gateway's settings: frozen, complete, checked by ``server/command.py``."""

from dataclasses import dataclass, field
from pathlib import Path

from penstock.clients.channel import DEFAULT_TARGET
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.clients.host.reloaded_files import WatchedFiles
from penstock.clients.host.routing_headers import Objectives


@dataclass(frozen=True)
class GatewaySettings:
    """The settings of the gateway's app."""

    service: ConnectionOptions = field(default_factory=lambda: ConnectionOptions(DEFAULT_TARGET))
    """The connection to the gRPC service. With an ``api_key``, every request uses that key, whatever key its caller
    sends; without one, each caller's own key is passed on."""
    api_key_file: WatchedFiles[str] | None = None
    """The file of that ``api_key``, read again when it changes; None: the key is fixed."""
    tenant_header: str = ""
    """The HTTP header, in lower case, that names the tenant of a request; empty: none."""
    requires_tenant: bool = False
    """Whether requests without that header are refused."""
    allowed_hosts: AllowedHosts | None = None
    """The accepted values of ``Host`` if callers need no key; None: any."""
    admin_target: str = ""
    """The address of the service's administration, for the routes that load adapters; empty: there are none."""
    metrics_target: str = ""
    """The ``host:port`` of the service's metrics; empty: the gateway does not show them."""
    exposed_address: str = ""
    """The address at which other machines can reach the gateway, for the warning if they need no key; empty: no
    warning."""
    max_body_bytes: int = 16 << 20
    """The limit on the body of a request. A prompt of 4 MiB, the service's limit, may be larger in JSON."""
    max_bodies_bytes: int = 128 << 20
    """The limit on all bodies in memory; one tenant may use half of it."""
    body_timeout_s: float = 30.0
    """How long a request's body may take to arrive."""
    request_timeout_s: float | None = None
    """The deadline of a generation; None: until the caller disconnects."""
    call_timeout_s: float = 30.0
    """The deadline of a short call to the service, such as one to its tokenizer."""
    responses_file: Path | None = None
    """The file of stored responses; None: they are only in memory."""
    responses_ttl_s: float = 86_400.0
    """How long a response is stored; 0: nothing is."""
    max_responses_bytes: int = 128 << 20
    """The limit on all stored responses; one tenant may use half of it."""
    max_background: int = 64
    """The limit on responses of one tenant that are generated in the background."""
    max_callers: int = 64
    """The limit on tenants with a stream to the service."""
    idle_caller_s: float = 60.0
    """How long a tenant's stream is kept open without a request."""
    recheck_caller_s: float = 30.0
    """How long a key that the service accepted is trusted before it is checked again."""
    keepalive_s: float = 15.0
    """A stream that is silent for this long sends a blank line, so that proxies do not close it; 0: never."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the gateway from a browser (CORS); ``*`` is any."""
    objectives: Objectives = field(default_factory=dict)
    """The priority for each objective that a request's headers may name."""
    ignores_unknown_fields: bool = False
    """Whether fields that this service does not know are ignored, logged and counted, instead of refused."""
