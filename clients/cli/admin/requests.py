"""``penstock requests`` and ``penstock cancel``: list and cancel the live requests of a running service."""

import argparse
import asyncio
import json
import sys

import penstock.v1 as pb
from penstock.clients.cli.admin.client import AdminClient, call_admin
from penstock.clients.cli.admin.request_list import HEADER, STATES, request_line
from penstock.clients.cli.as_dict import as_dict, duration_of
from penstock.clients.cli.command_parser import CommandParser, number_where
from penstock.clients.cli.options import ConnectionOptions, add_admin_flags, admin_connection
from penstock.clients.errors import PenstockError, shown

_MAX_LISTED = 1000
"""The service's limit on the requests in a page, and on the ids of one call."""
_MAX_NAME = 64
_CANCEL_TIMEOUT_S = 600.0
"""The deadline of a call that may cancel a hundred thousand requests."""

_REQUESTS_EPILOG = """\
examples:
  penstock requests                                      all live requests, the oldest first
  penstock requests --tenant acme --state waiting
  penstock requests --json | jq -r .client_request_id    one object per line, with all that is known
  penstock requests --min-age 60 --json | jq -r .request_id | xargs -r penstock cancel

A request is listed from when it enters the queue until it ends. Lengths are in tokens.
"""
_CANCEL_EPILOG = """\
examples:
  penstock cancel 01KAH3Y5W7Q2R8T4V6X0Z1B3C5        the id is in penstock requests, and in the service's log
  penstock cancel --tenant acme --state waiting     after a question
  penstock cancel --min-age 600 --yes               without a question, for scripts
  penstock cancel --all

A cancelled request ends with the status CANCELLED, and its caller keeps the output so far. The status is 1 if an id
names no live request; the others are still cancelled.
"""


def list_requests(argv: list[str] | None = None) -> int:
    """Runs ``penstock requests`` and returns its exit status."""
    arguments = list_requests_parser().parse_args(argv)
    asyncio.run(_list(admin_connection(arguments), _filter(arguments), arguments.json))
    return 0


def list_requests_parser() -> CommandParser:
    """Defines the flags of ``penstock requests``."""
    parser = CommandParser(
        "requests", "Lists the live requests of a running service, the oldest first.", _REQUESTS_EPILOG
    )
    _add_filter(parser.add_argument_group("which requests (default: all)"))
    parser.add_argument("--json", action="store_true", help="print one JSON object per line (default: a table)")
    add_admin_flags(parser)
    return parser


def cancel(argv: list[str] | None = None) -> int:
    """Runs ``penstock cancel`` and returns its exit status: 1 if an id is unknown or the operator declines."""
    parser = cancel_parser()
    arguments = parser.parse_args(argv)
    wanted = _filter(arguments)
    if bool(arguments.ids) + arguments.all + bool(wanted.ByteSize()) != 1:
        parser.error("name requests by their ids, or by --tenant, --state and --min-age, or give --all")
    service = admin_connection(arguments)
    if arguments.ids:
        return asyncio.run(_cancel_ids(service, list(dict.fromkeys(arguments.ids))))
    if not arguments.yes and not _is_confirmed(service, wanted):
        return 1
    request = pb.CancelRequestsRequest(all=pb.AllRequests())
    if not arguments.all:
        request.filter.CopyFrom(wanted)
    _report(call_admin(service, "CancelRequests", request, _CANCEL_TIMEOUT_S).cancelled_requests)
    return 0


def cancel_parser() -> CommandParser:
    """Defines the flags of ``penstock cancel``."""
    parser = CommandParser("cancel", "Cancels live requests of a running service.", _CANCEL_EPILOG)
    parser.add_argument("ids", nargs="*", type=_name, metavar="ID", help="the service's id of a request")
    which = parser.add_argument_group("which requests, instead of ids")
    _add_filter(which)
    which.add_argument("--all", action="store_true", help="every request")
    parser.add_argument("--yes", action="store_true", help="do not ask (default: ask, unless ids are given)")
    add_admin_flags(parser)
    return parser


def _add_filter(flags: argparse._ArgumentGroup) -> None:
    flags.add_argument("--tenant", type=_name, metavar="NAME", help="those of this tenant")
    flags.add_argument(
        "--state", action="append", default=[], choices=list(STATES), help="those in this state; may be repeated"
    )
    seconds = number_where(lambda value: 0 <= value <= 1e9, "must be a number of seconds, from 0; it is {0!r}")
    flags.add_argument(
        "--min-age", type=seconds, default=0.0, metavar="SECONDS", help="those that arrived at least this long ago"
    )


def _filter(arguments: argparse.Namespace) -> pb.RequestFilter:
    return pb.RequestFilter(
        tenant=arguments.tenant,
        states=[STATES[name] for name in dict.fromkeys(arguments.state)],
        min_age=duration_of(arguments.min_age) if arguments.min_age else None,
    )


async def _list(service: ConnectionOptions, wanted: pb.RequestFilter, as_json: bool) -> None:
    request = pb.ListRequestsRequest(filter=wanted, page_size=_MAX_LISTED)
    async with AdminClient.opened(service) as client:
        if not as_json:
            print(HEADER)
        while True:
            page = await client.call("ListRequests", request)
            for live in page.requests:
                print(json.dumps(as_dict(live)) if as_json else request_line(live))
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


async def _cancel_ids(service: ConnectionOptions, ids: list[str]) -> int:
    """Cancels the requests with these ids, which differ; returns the exit status. Raises PenstockError."""
    num_cancelled, unknown = 0, list[str]()
    async with AdminClient.opened(service) as client:
        for start in range(0, len(ids), _MAX_LISTED):
            named = pb.RequestIds(request_ids=ids[start : start + _MAX_LISTED])
            answer = await client.call("CancelRequests", pb.CancelRequestsRequest(ids=named), _CANCEL_TIMEOUT_S)
            num_cancelled += answer.cancelled_requests
            unknown += answer.unknown_request_ids
    _report(num_cancelled)
    for request_id in unknown:
        print(f"penstock cancel: {request_id}: no live request has this id; it may have ended", file=sys.stderr)
    return 1 if unknown else 0


def _is_confirmed(service: ConnectionOptions, wanted: pb.RequestFilter) -> bool:
    """Lets the operator confirm that all requests that match are cancelled. Raises PenstockError without a terminal."""
    if not sys.stdin.isatty():
        raise PenstockError("the input is not a terminal, so cancelling cannot be confirmed; pass --yes")
    page = call_admin(service, "ListRequests", pb.ListRequestsRequest(filter=wanted, page_size=_MAX_LISTED))
    number = "more than 1,000" if page.next_page_token else f"{len(page.requests):,}"
    try:
        answer = input(f"cancel {number} request{'' if number == '1' else 's'}? [y/N] ")
    except EOFError:
        answer = ""
    if answer.strip().lower() in ("y", "yes"):
        return True
    print("nothing was cancelled")
    return False


def _report(num_cancelled: int) -> None:
    print(f"{num_cancelled:,} request{'' if num_cancelled == 1 else 's'} cancelled")


def _name(text: str) -> str:
    # An empty name, perhaps of a variable that is not set, would match every request.
    if not (1 <= len(text) <= _MAX_NAME and text.isascii()):
        raise argparse.ArgumentTypeError(f"must be 1 to {_MAX_NAME} ASCII characters; it is {shown(text)}")
    return text
