"""``penstock gateway``: OpenAI's HTTP API in front of a running service."""

import argparse
import logging
import math
import os
import ssl
from dataclasses import replace

from penstock.clients.cli.options import connection, default_target
from penstock.clients.errors import PenstockError
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.server.flags import make_parser
from penstock.clients.gateway.server.http_server import HttpSettings, address, serve
from penstock.clients.gateway.server.key_file import read_key
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.upstream.body_budget import TENANT_SHARE
from penstock.clients.host.allowed_hosts import AllowedHosts
from penstock.clients.host.log_rate import LogRate
from penstock.clients.host.log_thread import LogThread
from penstock.clients.host.loopback import resolves_to_loopback
from penstock.clients.host.open_files import raise_open_files_limit
from penstock.clients.host.span_exporter import export_spans


def main(argv: list[str]) -> int:
    """Serves until a signal; returns the exit status. Raises PenstockError."""
    arguments = make_parser().parse_args(argv)
    raise_open_files_limit()
    settings, http = gateway_settings(arguments), http_settings(arguments)
    set_up_logging()
    close_exporter = export_spans(os.environ, "penstock-gateway")
    try:
        return serve(
            create_app(settings), http, lambda url: f"penstock gateway: {url}/v1 in front of {settings.service.target}."
        )
    finally:
        close_exporter()


def set_up_logging() -> None:
    """Writes the log in a separate thread, and limits how often a message is repeated."""
    handler = LogThread()
    handler.addFilter(LogRate())
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING, handlers=[handler]
    )


def gateway_settings(arguments: argparse.Namespace) -> GatewaySettings:
    """Reads the app's settings from the flags. Raises PenstockError."""
    if arguments.require_tenant_header and not arguments.tenant_header:
        raise PenstockError("--require-tenant-header: needs --tenant-header as well: name the header")
    if arguments.responses_file is not None and not arguments.responses_ttl:
        raise PenstockError("--responses-file: not with --responses-ttl 0, which stores nothing; omit one of them")
    # A key in the environment is a person's: every client of the gateway would use it.
    key = None if arguments.api_key_file is None else read_key(arguments.api_key_file)
    service = connection(arguments, arguments.target or default_target())
    return GatewaySettings(
        service=replace(service, api_key=None if key is None else key.value),
        api_key_file=key,
        tenant_header=arguments.tenant_header or "",
        admin_target=arguments.admin_target or "",
        metrics_target=arguments.metrics_target or "",
        exposed_address=exposed_address(arguments),
        max_body_bytes=arguments.max_body_mib << 20,
        request_timeout_s=arguments.request_timeout,
        max_callers=arguments.max_callers,
        keepalive_s=arguments.sse_keep_alive,
        allowed_origins=arguments.allowed_origins,
        allowed_hosts=allowed_hosts(arguments),
        requires_tenant=arguments.require_tenant_header,
        max_bodies_bytes=_max_bodies_mib(arguments) << 20,
        ignores_unknown_fields=arguments.unknown_fields == "ignore",
        objectives=arguments.objectives,
        responses_file=arguments.responses_file,
        responses_ttl_s=arguments.responses_ttl,
        max_responses_bytes=arguments.responses_mib << 20,
    )


def _max_bodies_mib(arguments: argparse.Namespace) -> int:
    """Returns the memory for bodies; a tenant's half must have room for one body. Raises PenstockError."""
    given: int | None = arguments.max_bodies_mib
    least = math.ceil(arguments.max_body_mib / TENANT_SHARE)
    if given is not None and given < least:
        raise PenstockError(
            f"--max-bodies-mib {given}: a tenant takes at most half of it, where a body of --max-body-mib "
            f"{arguments.max_body_mib} must fit; give at least {least}"
        )
    return given or max(least, GatewaySettings.max_bodies_bytes >> 20)


def allowed_hosts(arguments: argparse.Namespace) -> AllowedHosts | None:
    """Returns None for a Unix socket, which no page of a browser can reach."""
    return None if arguments.unix_socket is not None else AllowedHosts(arguments.host, arguments.allowed_hosts)


def exposed_address(arguments: argparse.Namespace) -> str:
    """Returns the address at which other machines can reach the listener; empty if they cannot, or if the socket was
    opened by another program."""
    if arguments.fd is not None or arguments.unix_socket is not None or resolves_to_loopback(arguments.host):
        return ""
    return address(arguments.host, arguments.port)


def http_settings(arguments: argparse.Namespace) -> HttpSettings:
    """Reads the listener's settings from the flags. Raises PenstockError."""
    certificate, key = arguments.http_tls_cert, arguments.http_tls_key
    if (certificate is None) != (key is None):
        missing, given = ("cert", "key") if certificate is None else ("key", "cert")
        raise PenstockError(f"--http-tls-{given}: needs --http-tls-{missing} as well: set both or neither")
    if certificate is not None:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certificate, key, password="")
        except OSError as error:  # an SSLError is one
            why = "" if isinstance(error, ssl.SSLError) else f" ({error.strerror})"
            raise PenstockError(
                f"--http-tls-cert {certificate}, --http-tls-key {key}: cannot be used{why}; they must be a certificate "
                "chain and its own private key, both in PEM, the key without a passphrase"
            ) from None
    return HttpSettings(
        host=arguments.host,
        port=arguments.port,
        unix_path=arguments.unix_socket,
        descriptor=arguments.fd,
        heartbeat=arguments.heartbeat_fd,
        certificate=certificate,
        private_key=key,
        max_connections=arguments.max_connections,
        write_timeout_s=arguments.write_timeout,
        shutdown_s=arguments.shutdown_grace,
    )
