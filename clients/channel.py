"""How a channel to a service is made: transport security, keepalive, and the caller's key."""

import re
from dataclasses import dataclass
from pathlib import Path

import grpc

from penstock.clients.errors import PenstockError

DEFAULT_TARGET = "127.0.0.1:50051"
"""Where ``penstock serve`` listens unless told otherwise."""

_LOOPBACK = re.compile(r"(unix|unix-abstract):|(ipv4:)?127\.|(ipv6:)?\[?::1\]?[:\]]|localhost(:|$)")

_OPTIONS: tuple[tuple[str, int], ...] = (
    # A path that died silently is noticed within half a minute. Pings are far enough apart for any server that streams.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A service that comes back is found again soon; gRPC's own backoff grows to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A whole answer with log-probabilities, or many vectors, may be more than gRPC's 4 MiB.
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
)


@dataclass(frozen=True)
class Tls:
    """Transport security. ``Tls()`` trusts what the system trusts; paths are of PEM files."""

    ca: Path | str | None = None
    """Certificates to trust instead of the system's."""
    certificate: Path | str | None = None
    """The client's own chain, for a service that asks for one; ``key`` is its private key."""
    key: Path | str | None = None
    server_name: str | None = None
    """The name to expect in the service's certificate, where it differs from the target's."""


def open_channel(target: str, tls: Tls | None) -> grpc.aio.Channel:
    """A channel; it connects when it is first used. Raises PenstockError if a file cannot be read or is missing."""
    options: list[tuple[str, int | str]] = list(_OPTIONS)
    if _LOOPBACK.match(target):
        options.append(("grpc.enable_http_proxy", 0))  # a proxy in the environment is no way to this machine
    if tls is None:
        return grpc.aio.insecure_channel(target, options=options)
    if (tls.certificate is None) != (tls.key is None):  # gRPC would abort the process
        raise PenstockError("Tls: the client's certificate and its private key need each other: set both or neither")
    if tls.server_name is not None:
        options.append(("grpc.ssl_target_name_override", tls.server_name))
    credentials = grpc.ssl_channel_credentials(_read(tls.ca), _read(tls.key), _read(tls.certificate))
    return grpc.aio.secure_channel(target, credentials, options=options)


def call_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What every call carries. Raises PenstockError for a key that no header can hold."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise PenstockError("the API key has characters that are not printable ASCII; is it the key's file as it is?")
    return () if api_key is None else (("authorization", f"Bearer {api_key}"),)


def _read(path: Path | str | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PenstockError(f"cannot read {path}: {error.strerror}") from None
