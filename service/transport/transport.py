"""Creates the gRPC server of a listener, and binds it to its address."""

import asyncio
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import grpc

from penstock.clients.host.log_rate import LogRate
from penstock.service.auth.tls import ServerTls
from penstock.service.config.addresses import Address, ListenError
from penstock.service.transport.call_limits import MAX_MESSAGE_BYTES
from penstock.service.transport.early_refusals import MAX_METADATA_BYTES, Cut, Trailing, refuse_early

_IDLE_CONNECTION_MS = 600_000
"""Connections without a call are closed after this time; clients reconnect automatically."""


def new_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor],
    max_streams: int,
    max_connections: int,
    cut: Cut,
    trailing: Trailing = tuple,
) -> grpc.aio.Server:
    """Returns a server that is not bound yet. ``max_streams``: limit on concurrent calls on a connection; further calls
    wait in the client. ``max_connections``: limit of each listener. ``cut`` closes a client's connection. ``trailing``
    returns trailing metadata for calls that no interceptor sees, such as those of unknown methods."""
    options = [
        # Without these, a client that pings an idle stream every 10 s, a common setting, is disconnected after 40 s.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 5000),
        # These detect a client whose machine has failed: its requests must not run for the hours that TCP would wait.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.max_concurrent_streams", max_streams),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # gRPC refuses calls at random between the two limits, so they are equal.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server_handshake_timeout_ms", 10_000),
        # A client that does not acknowledge the connection's limits is disconnected, since they do not apply before.
        ("grpc.http2.settings_timeout", 10_000),
        ("grpc.max_allowed_incoming_connections", max_connections),
        ("grpc.max_connection_idle_ms", _IDLE_CONNECTION_MS),
        # With its bandwidth estimate, gRPC would buffer 4 MiB of every message before the service reads it. A message
        # that is being read has a window of its own size, up to 1 MiB, in any case.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 64 << 10),
        # Otherwise two services could share a port, and each would get half of the calls.
        ("grpc.so_reuseport", 0),
    ]
    logger = logging.getLogger("grpc._cython.cygrpc")
    logger.addFilter(_without_arguments)
    logger.addFilter(_log_rate)
    server = grpc.aio.server(interceptors=interceptors, options=options)
    refuse_early(server, cut, trailing, asyncio.get_running_loop(), None, (), interceptors, tuple(options), None)
    return server


def _without_arguments(record: logging.LogRecord) -> bool:
    # gRPC logs metadata that is not UTF-8 unchanged, and it may contain a key.
    record.args = ()
    return True


_log_rate = LogRate()


def bind(server: grpc.aio.Server, address: Address, tls: ServerTls | None = None) -> str:
    """Binds a server before it starts; returns the address with the bound port. A Unix socket has no TLS. Raises
    ListenError."""
    try:
        if tls is None or address.path is not None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), tls.credentials())
    except RuntimeError:
        raise ListenError(f"{address.flag} {address}: cannot be listened on; is it in use?") from None
    return str(address) if address.path is not None else address.with_port(port)


@contextmanager
def only_for_this_user() -> Iterator[None]:
    """Gives a Unix socket that is created inside the block mode 0600 from the start."""
    previous = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(previous)
