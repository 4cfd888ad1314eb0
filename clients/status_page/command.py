"""``penstock status-page``: the status page of a running service, for operators."""

from penstock.clients.cli.options import ConnectionOptions, admin_target, tls_options
from penstock.clients.gateway.server.command import (
    allowed_hosts,
    exposed_address,
    http_settings,
    set_up_logging,
)
from penstock.clients.gateway.server.http_server import serve
from penstock.clients.host.open_files import raise_open_files_limit
from penstock.clients.status_page.app import create_app
from penstock.clients.status_page.flags import make_parser
from penstock.clients.status_page.settings import StatusPageSettings


def main(argv: list[str]) -> int:
    """Serves until a signal; returns the exit status. Raises PenstockError."""
    arguments = make_parser().parse_args(argv)
    raise_open_files_limit()
    target = admin_target(arguments)
    settings = StatusPageSettings(
        service=ConnectionOptions(target, tls=tls_options(arguments)),
        allowed_hosts=allowed_hosts(arguments),
        is_exposed=bool(exposed_address(arguments)),
    )
    http = http_settings(arguments)
    set_up_logging()
    return serve(create_app(settings), http, lambda url: f"penstock status-page: {url}/ shows the service at {target}.")
