"""What the gateway is told when it starts: frozen, complete, checked by ``command``."""

from dataclasses import dataclass, field
from pathlib import Path

from penstock.clients.channel import DEFAULT_TARGET
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.host.allowed_hosts import AllowedHosts

AUTO, NONE = "auto", "none"
"""Of a parser: chosen by what the chat template shows, and none at all."""


@dataclass(frozen=True)
class GatewaySettings:
    """All that the app depends on."""

    service: ConnectionOptions = field(default_factory=lambda: ConnectionOptions(DEFAULT_TARGET))
    """Where the gRPC service is. With an ``api_key`` here every request is sent under that key, whatever its caller
    shows; without one each caller's own key is passed on."""
    api_key_file: Path | None = None
    """Where that ``api_key`` was read, and is read again when it changes; None: it stays."""
    tenant_header: str = ""
    """The HTTP header, in small letters, that names the tenant of a request; empty: none does."""
    requires_tenant: bool = False
    """Whether requests without that header are refused."""
    allowed_hosts: AllowedHosts | None = None
    """The values of ``Host`` that are served if callers need no key; None: any."""
    metrics_target: str = ""
    """``host:port`` of the service's metrics; empty: the gateway shows none."""
    exposed_address: str = ""
    """Where other machines can reach the gateway, to warn of it if they need no key; empty: nowhere, or no warning."""
    tool_call_parser: str = AUTO
    """A format of tool calls, or AUTO or NONE."""
    reasoning_parser: str = AUTO
    """A format of reasoning, or AUTO or NONE."""
    max_body_bytes: int = 16 << 20
    """Of an HTTP request. A prompt of 4 MiB, the most that the service takes, may be larger in JSON."""
    max_bodies_bytes: int = 128 << 20
    """The size of all bodies that are in memory at once; those of one tenant may take half of it."""
    body_timeout_s: float = 30.0
    """How long a request's body may take to arrive."""
    request_timeout_s: float | None = None
    """The deadline of a generation; None leaves it to the caller's patience."""
    call_timeout_s: float = 30.0
    """The deadline of a short call to the service: its model, its tokenizer."""
    max_callers: int = 64
    """Tenants that may have a stream to the service at once."""
    idle_caller_s: float = 60.0
    """How long a tenant's stream is kept open without a request."""
    recheck_caller_s: float = 30.0
    """How long a key that the service took is believed to be good before it is asked again."""
    keepalive_s: float = 15.0
    """A stream that is silent for this long sends a blank line, so that no proxy takes it for dead; 0: never."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages may call the gateway from a browser (CORS); ``*`` is any."""
    ignores_unknown_fields: bool = False
    """Whether fields that this service does not know are ignored, logged and counted, instead of refused."""
