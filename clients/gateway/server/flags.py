"""The flags of ``penstock gateway``. This module imports no web framework, so that shells complete the flags fast."""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from penstock.clients.cli.command_parser import CommandParser, reporting
from penstock.clients.cli.options import TARGET_VARIABLE, add_connection_flags, default_target
from penstock.clients.gateway.origins import read_origins
from penstock.clients.host.allowed_hosts import read_hosts
from penstock.clients.host.routing_headers import read_objectives

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


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser(
        "gateway",
        "OpenAI's HTTP API in front of a running service: completions, chats, models, a chat page.",
        _EXAMPLES,
    )
    add_connection_flags(
        parser,
        f"where the service is, or unix:PATH; several, separated by commas, of which others continue the requests of "
        f"one that dies; otherwise ${TARGET_VARIABLE} (default: {default_target()})",
        of_key="file with a key of the gateway's own, for all requests, read again when it changes: "
        "all clients of the gateway then call under "
        "it, so put it behind a proxy that authenticates them (default: each caller's own key is passed on)",
    )
    flags = parser.add_argument_group("HTTP")
    add_listener_flags(flags, default_port=8000)
    _add_serving_flags(flags)
    _add_request_flags(parser.add_argument_group("requests"))
    _add_response_flags(parser.add_argument_group("stored responses"))
    return parser


def add_listener_flags(flags: "argparse._ArgumentGroup", default_port: int) -> None:
    """Adds the flags of a listener for HTTP."""
    flags.add_argument(
        "--host", default="127.0.0.1", help="where to listen; 0.0.0.0 is everywhere (default: %(default)s)"
    )
    flags.add_argument(
        "--port", type=_number(0, 65535), default=default_port, help="0 takes a free one (default: %(default)s)"
    )
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
        "--allowed-origins", type=reporting(read_origins), default=(), metavar="ORIGINS",
        help="web pages of these origins may call, separated by commas, such as https://app.example.com; * is any "
        "origin (default: none)",
    )  # fmt: skip
    flags.add_argument(
        "--allowed-hosts", type=reporting(read_hosts), default=(), metavar="NAMES",
        help="further host names of the gateway, separated by commas, such as llm.example.com or *.example.com; * is "
        "any name. If callers need no key, requests with another Host are refused (default: addresses, names without a "
        "dot and this machine's name)",
    )  # fmt: skip
    flags.add_argument(
        "--admin-target", metavar="HOST:PORT|unix:PATH",
        help="the service's --admin-listen: /v1/load_lora_adapter and /v1/unload_lora_adapter are served for callers "
        "whose key may administer (default: they are not served)",
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
        "--objectives", type=reporting(read_objectives), default={}, metavar="JSON",
        help="priorities of the objectives that x-llm-d-inference-objective names, lower first, such as "
        '{"interactive": -10, "batch": 10}; they apply under the service\'s priority policy (default: none)',
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


def _add_response_flags(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--responses-file", type=Path, metavar="FILE",
        help="file of SQLite that keeps stored responses when the gateway restarts; only this user can read it "
        "(default: they are only in memory)",
    )  # fmt: skip
    flags.add_argument(
        "--responses-ttl", type=_number(0, 31_536_000), default=86_400, metavar="SECONDS",
        help="how long a response of /v1/responses is stored; 0 stores none (default: %(default)s)",
    )  # fmt: skip
    flags.add_argument(
        "--responses-mib", type=_number(1, 1 << 20), default=128, metavar="N",
        help="memory for all stored responses, and the file has as much; a tenant may take half of it, and the oldest "
        "responses give way (default: %(default)s)",
    )  # fmt: skip


def _number(low: int, high: int) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not (text.isdecimal() and low <= int(text) <= high):
            raise argparse.ArgumentTypeError(f"must be {low:,} to {high:,}; it is {text!r}")
        return int(text)

    return read


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
