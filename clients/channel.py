"""Opens a channel to a service: transport security, keepalive, and the caller's key."""

import re
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.clients.errors import PenstockError

DEFAULT_TARGET = "127.0.0.1:50051"
"""The default address of ``penstock serve``."""

_LOOPBACK = re.compile(r"(unix|unix-abstract):|(ipv4:)?127\.|(ipv6:)?\[?::1\]?[:\]]|localhost(:|$)")

_OPTIONS: tuple[tuple[str, int], ...] = (
    # A connection that died silently is detected within half a minute. Servers with streams accept pings this far
    # apart.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Reconnects soon after a service returns; gRPC's default backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A whole answer with log-probabilities, or many vectors, may exceed gRPC's default of 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)
_ON_THIS_MACHINE = (
    ("grpc.enable_http_proxy", 0),  # a proxy from the environment cannot reach this machine
    # What a busy client has not read stays in the service, which joins it into larger messages. Otherwise gRPC would
    # buffer hundreds of small ones, and every token would come late. A message that is being read has a window of its
    # own size.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", 4096),
)


@dataclass(frozen=True)
class Tls:
    """Transport security. ``Tls()`` trusts the system's certificates; paths are those of PEM files."""

    ca: Path | str | None = None
    """The certificates to trust instead of the system's."""
    certificate: Path | str | None = None
    """The client's certificate chain, for a service that requires one; ``key`` is its private key."""
    key: Path | str | None = None
    server_name: str | None = None
    """The name to expect in the service's certificate, if it differs from the target's."""


def open_channel(target: str, tls: Tls | None, *, has_own_connection: bool = False) -> grpc.aio.Channel:
    """Returns a channel, which connects on first use. Channels to the same target share a connection, unless
    ``has_own_connection``. Raises PenstockError if a file cannot be read or is missing."""
    options: list[tuple[str, int | str]] = list(_OPTIONS)
    if has_own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    if _LOOPBACK.match(target):
        options += _ON_THIS_MACHINE
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if (tls.certificate is None) != (tls.key is None):  # gRPC would abort the process
        raise PenstockError("Tls: the client's certificate and its private key go together: set both or neither")
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.certificate))
    return grpc.aio.secure_channel(target, credentials, options=options)


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """Returns the metadata of every call. Raises PenstockError if the key cannot be sent in a header."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise PenstockError("the API key has characters that are not printable ASCII; does it contain only the key?")
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PenstockError(f"cannot read {path}: {error.strerror}") from None
