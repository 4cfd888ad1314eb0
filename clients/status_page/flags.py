"""The flags of ``penstock status-page``. This module imports no web framework, so that shells complete the flags
fast."""

from penstock.clients.cli.command_parser import CommandParser, reporting
from penstock.clients.cli.options import add_admin_flags
from penstock.clients.gateway.server.flags import add_listener_flags
from penstock.clients.host.allowed_hosts import read_hosts

_EXAMPLES = """\
examples:
  penstock status-page                            the service on this machine, at http://127.0.0.1:8001/
  penstock status-page --admin gpu1:50052 --tls-ca ca.pem
  penstock status-page --host 0.0.0.0 --http-tls-cert page.pem --http-tls-key page.key

If the service needs keys, operators log in on the page with a key that may administer. penstock serve
--admin-http-port PORT starts this page in a child process.
"""


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser(
        "status-page",
        "A web page that shows what a running service does, and cancels requests.",
        _EXAMPLES,
    )
    add_admin_flags(parser, of_key=None)
    flags = parser.add_argument_group("HTTP")
    add_listener_flags(flags, default_port=8001)
    flags.add_argument(
        "--allowed-hosts", type=reporting(read_hosts), default=(), metavar="NAMES",
        help="further host names of the page, separated by commas, such as ops.example.com or *.example.com; * is any "
        "name. If the service needs no key, requests with another Host are refused (default: addresses, names without "
        "a dot and this machine's name)",
    )  # fmt: skip
    parser.set_defaults(max_connections=64, write_timeout=10, shutdown_grace=2)
    return parser
