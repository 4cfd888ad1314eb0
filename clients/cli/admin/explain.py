"""``penstock explain``: what a request waited for, which steps it was in, and where its time went."""

import json
import os
import sys

import grpc

import penstock.v1 as pb
from penstock.clients.cli.admin.client import call_admin
from penstock.clients.cli.admin.timeline_view import TimelineView
from penstock.clients.cli.as_dict import as_dict
from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.options import add_admin_flags, admin_connection
from penstock.clients.cli.terminal import shows
from penstock.clients.errors import PenstockError, RequestFailed

_EPILOG = """\
examples:
  penstock explain 01KAH3Y5W7Q2R8T4V6X0Z1B3C5
  penstock explain 01KAH3Y5W7Q2R8T4V6X0Z1B3C5 --admin gpu1:50052
  penstock explain 01KAH3Y5W7Q2R8T4V6X0Z1B3C5 --json | jq '.timeline[] | select(.kind == "waited")'

ID is the service's id of the request: it is in accepted.request_id and finished.request_id, in the details of an error,
in the log, and in every error that penstock chat shows. Only live requests and the last ones that ended are known
(penstock serve --explain-requests).
"""


def main(argv: list[str]) -> int:
    """Runs the command; the status is 1 if the request is unknown."""
    arguments = make_parser().parse_args(argv)
    try:
        request = pb.ExplainRequest(request_id=arguments.id)
        response = call_admin(admin_connection(arguments), "Explain", request)
    except RequestFailed as failure:
        if failure.code is grpc.StatusCode.NOT_FOUND:
            raise PenstockError(f"{arguments.id}: {failure.message}") from None
        raise
    if arguments.json:
        print(json.dumps(as_dict(response), indent=2))
        return 0
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for line in TimelineView(response, colours=colours, unicode=shows("░▒▓█◆", sys.stdout)).lines():
        print(line.rstrip())
    return 0


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser(
        "explain",
        "Shows what a request waited for, which steps it was in, and where its time went.",
        _EPILOG,
    )
    parser.add_argument("id", metavar="ID", help="the service's id of the request")
    parser.add_argument("--json", action="store_true", help="print JSON (default: a timeline)")
    add_admin_flags(parser)
    return parser
