"""``penstock gateway``: OpenAI's HTTP API in front of a running service."""

import argparse
import logging
import math
import re
import ssl
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.options import TARGET_VARIABLE, add_connection_flags, connection, default_target
from penstock.clients.errors import PenstockError
from penstock.clients.gateway.origins import read_origins
from penstock.clients.gateway.parsers.reasoning import REASONING_FORMATS
from penstock.clients.gateway.parsers.tool_formats import TOOL_FORMATS
from penstock.clients.gateway.server.app import create_app
from penstock.clients.gateway.server.http_server import HttpSettings, serve
from penstock.clients.gateway.server.key_file import read_key
from penstock.clients.gateway.settings import AUTO, NONE, GatewaySettings
from penstock.clients.gateway.upstream.body_budget import TENANT_SHARE
from penstock.clients.host.allowed_hosts import AllowedHosts, read_hosts
from penstock.clients.host.log_rate import LogRate
from penstock.clients.host.log_thread import LogThread
from penstock.clients.host.loopback import resolves_to_loopback
from penstock.clients.host.open_files import raise_open_files_limit

_EXAMPLES = """\
examples:
  penstock gateway                                 the service on this machine, on http://127.0.0.1:8000/v1
  penstock gateway --target 10.0.0.7:50051 --host 0.0.0.0 --port 80
  penstock gateway --tls-ca ca.pem --target llm.internal:443
  penstock gateway --api-key-file key --tenant-header x-tenant    behind a proxy that authenticates callers
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
       -d '{"messages": [{"role": "user", "content": "Hi!"}]}'

The gateway may start before the service: until the service is ready, it responds with 503. /docs describes the API.
"""
_HEADER = re.compile(r"[a-z0-9-]{1,64}")


def main(argv: list[str]) -> int:
    """Serves until a signal; returns the exit status. Raises PenstockError."""
    arguments = make_parser().parse_args(argv)
    raise_open_files_limit()
    settings, http = gateway_settings(arguments), http_settings(arguments)
    _set_up_logging()
    return serve(create_app(settings), http, f"in front of {settings.service.target}")


def _set_up_logging() -> None:
    """Writes the log in a separate thread, and limits how often a message is repeated."""
    handler = LogThread()
    handler.addFilter(LogRate())
    logging.basicConfig(
        format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING, handlers=[handler]
    )


def gateway_settings(arguments: argparse.Namespace) -> GatewaySettings:
    """Reads the app's settings from the flags. Raises PenstockError."""
    target = arguments.target or default_target()
    service = connection(arguments, target)
    if arguments.require_tenant_header and not arguments.tenant_header:
        raise PenstockError("--require-tenant-header: needs --tenant-header as well: name the header")
    # A key in the environment is a person's: every client of the gateway would use it.
    key = None if arguments.api_key_file is None else read_key(arguments.api_key_file)
    service = replace(service, api_key=None if key is None else key.value)
    return GatewaySettings(
        service=service,
        api_key_file=key,
        tenant_header=arguments.tenant_header or "",
        metrics_target=arguments.metrics_target or "",
        exposed_address=_exposed_address(arguments),
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        max_body_bytes=arguments.max_body_mib << 20,
        request_timeout_s=arguments.request_timeout,
        max_callers=arguments.max_callers,
        keepalive_s=arguments.sse_keep_alive,
        allowed_origins=arguments.allowed_origins,
        allowed_hosts=_allowed_hosts(arguments),
        requires_tenant=arguments.require_tenant_header,
        max_bodies_bytes=_max_bodies_mib(arguments) << 20,
        ignores_unknown_fields=arguments.unknown_fields == "ignore",
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


def _allowed_hosts(arguments: argparse.Namespace) -> AllowedHosts | None:
    """Returns None for a Unix socket, which no page of a browser can reach."""
    return None if arguments.unix_socket is not None else AllowedHosts(arguments.host, arguments.allowed_hosts)


def _exposed_address(arguments: argparse.Namespace) -> str:
    """Returns the address at which other machines can reach the listener; empty if they cannot, or if the socket was
    opened by another program."""
    if arguments.fd is not None or arguments.unix_socket is not None or resolves_to_loopback(arguments.host):
        return ""
    return f"{f'[{arguments.host}]' if ':' in arguments.host else arguments.host}:{arguments.port}"


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


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser(
        "gateway",
        "OpenAI's HTTP API in front of a running service: completions, chats, models, a chat page.",
        _EXAMPLES,
    )
    add_connection_flags(
        parser,
        f"where the service is, or unix:PATH; otherwise ${TARGET_VARIABLE} (default: {default_target()})",
        of_key="file with a key of the gateway's own, for all requests, read again when it changes: "
        "all clients of the gateway then call under "
        "it, so put it behind a proxy that authenticates them (default: each caller's own key is passed on)",
    )
    flags = parser.add_argument_group("HTTP")
    _add_listener_flags(flags)
    _add_serving_flags(flags)
    _add_request_flags(parser.add_argument_group("requests"))
    return parser


def _add_listener_flags(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--host", default="127.0.0.1", help="where to listen; 0.0.0.0 is everywhere (default: %(default)s)"
    )
    flags.add_argument("--port", type=_number(0, 65535), default=8000, help="0 takes a free one (default: %(default)s)")
    flags.add_argument("--unix-socket", type=Path, metavar="PATH", help="listen on a Unix socket instead")
    flags.add_argument("--fd", type=_number(0, 2**20), metavar="N", help="listen on a socket that was opened already")
    flags.add_argument(
        "--heartbeat-fd", type=_number(0, 2**20), metavar="N",
        help="write a byte to it every second while serving, for a supervisor",
    )  # fmt: skip
    flags.add_argument("--http-tls-cert", type=Path, metavar="FILE", help="serve HTTPS with this chain, as PEM")
    flags.add_argument("--http-tls-key", type=Path, metavar="FILE", help="its private key")


def _add_serving_flags(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--max-connections",
        type=_number(1, 10**6),
        default=4096,
        metavar="N",
        help="connections at a time, or fewer if the limit of open files is too low; idle ones give way to new ones; "
        "while none is idle, requests get 503, except for probes (default: %(default)s)",
    )
    flags.add_argument(
        "--write-timeout", type=_number(1, 86_400), default=60, metavar="SECONDS",
        help="close a connection whose client has read nothing of a response for this long, and cancel the request "
        "(default: %(default)s)",
    )  # fmt: skip
    flags.add_argument(
        "--max-body-mib", type=_number(1, 1024), default=16, metavar="N", help="the largest body (default: %(default)s)"
    )
    flags.add_argument(
        "--max-bodies-mib", type=_number(2, 1 << 20), metavar="N",
        help="memory for all bodies together; a tenant may take half of it, and the slowest bodies give way (default: "
        "128, or twice --max-body-mib if that is more)",
    )  # fmt: skip
    flags.add_argument(
        "--shutdown-grace", type=_number(0, 86_400), default=10, metavar="SECONDS",
        help="time for running responses to finish after a signal to stop (default: %(default)s)",
    )  # fmt: skip
    flags.add_argument(
        "--sse-keep-alive", type=_number(0, 3600), default=15, metavar="SECONDS",
        help="send a blank line on a stream that is silent for this long, for proxies; 0 sends none "
        "(default: %(default)s)",
    )  # fmt: skip
    flags.add_argument(
        "--allowed-origins", type=_listed(read_origins), default=(), metavar="ORIGINS",
        help="web pages of these origins may call, separated by commas, such as https://app.example.com; * is any "
        "origin (default: none)",
    )  # fmt: skip
    flags.add_argument(
        "--allowed-hosts", type=_listed(read_hosts), default=(), metavar="NAMES",
        help="further host names of the gateway, separated by commas, such as llm.example.com or *.example.com; * is "
        "any name. If callers need no key, requests with another Host are refused (default: addresses, names without a "
        "dot and this machine's name)",
    )  # fmt: skip
    flags.add_argument(
        "--metrics-target",
        type=_host_and_port,
        metavar="HOST:PORT",
        help="the service's --metrics-listen: its metrics are shown at /metrics, without the names of tenants, to "
        "all clients of the gateway (default: none)",
    )


def _add_request_flags(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--unknown-fields", choices=("refuse", "ignore"), default="refuse",
        help="what to do with unknown fields of a request; ignored ones are logged and counted "
        "(default: %(default)s)",
    )  # fmt: skip
    flags.add_argument(
        "--tenant-header",
        type=_header,
        metavar="NAME",
        help="the HTTP header that names a request's tenant, for keys that may act for others (default: none)",
    )
    flags.add_argument(
        "--require-tenant-header", action="store_true",
        help="refuse requests without that header, which otherwise run as the gateway's own tenant (default: off)",
    )  # fmt: skip
    flags.add_argument(
        "--max-callers", type=_number(1, 10_000), default=64, metavar="N",
        help="limit of tenants with a stream to the service (default: %(default)s)",
    )  # fmt: skip
    flags.add_argument(
        "--request-timeout",
        type=_number(1, 86_400),
        metavar="SECONDS",
        help="deadline of every generation (default: none; it ends when its caller disconnects)",
    )
    for flag, known, of_what in (
        ("--tool-call-parser", TOOL_FORMATS, "tool calls"),
        ("--reasoning-parser", REASONING_FORMATS, "reasoning"),
    ):
        flags.add_argument(
            flag,
            choices=(AUTO, NONE, *known),
            default=AUTO,
            help=f"how the model writes {of_what}; auto detects it from the chat template (default: %(default)s)",
        )


def _number(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"must be {low:,} to {high:,}; it is {text!r}")
        return int(text)

    return read


def _listed(read: Callable[[str], tuple[str, ...]]) -> Callable[[str], tuple[str, ...]]:
    def read_list(text: str) -> tuple[str, ...]:
        try:
            return read(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_list


def _host_and_port(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and port.isdecimal()):
        raise argparse.ArgumentTypeError(f"must be HOST:PORT; it is {text!r}")
    return text


def _header(text: str) -> str:
    name = text.lower()
    if not _HEADER.fullmatch(name):
        raise argparse.ArgumentTypeError(f"must be 1 to 64 letters, digits and '-'; it is {text!r}")
    return name
