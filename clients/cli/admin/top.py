"""``penstock top``: live statistics of a running service, full screen or as lines."""

import asyncio
import json
import os
import sys
from contextlib import aclosing

import penstock.v1 as pb
from penstock.clients.cli.admin.client import AdminClient
from penstock.clients.cli.admin.stats_view import Rates, line
from penstock.clients.cli.admin.top_screen import TopScreen
from penstock.clients.cli.as_dict import as_dict
from penstock.clients.cli.command_parser import CommandParser, number_where
from penstock.clients.cli.options import ConnectionOptions, add_admin_flags, admin_connection
from penstock.clients.cli.terminal import shows
from penstock.clients.errors import PenstockError

_EPILOG = """\
examples:
  penstock top                          keys: r lists the live requests, x cancels one, q or Ctrl-C quits
  penstock top --admin gpu1:50052 --interval 5
  penstock top --once                   one line, for a script; speeds are over one interval
  penstock top --json | jq .kv_usage    one object per line, with totals since the start of the service
  penstock top --once --json | jq .last_10s.time_to_first_token.p99   # in seconds
"""


def main(argv: list[str]) -> int:
    """Runs the command until Ctrl-C or ``q``, or until the service ends, which is a failure."""
    arguments = make_parser().parse_args(argv)
    service = admin_connection(arguments)
    if sys.stdout.isatty() and not arguments.once and not arguments.json:
        # Imported here: only a terminal needs it, and only a system with terminals has its modules.
        from penstock.clients.cli.admin.top_terminal import run_on_terminal

        screen = TopScreen(
            service.target,
            unicode=shows("█░▁", sys.stdout),
            colours=not os.environ.get("NO_COLOR"),
            has_keys=sys.stdin.isatty(),
        )
        asyncio.run(run_on_terminal(service, arguments.interval, screen))
    else:
        asyncio.run(_watch(service, arguments.interval, arguments.once, arguments.json))
    return 0


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser(
        "top",
        "Shows live statistics of a running service: full screen on a terminal, otherwise one line per update.",
        _EPILOG,
    )
    interval = number_where(lambda value: 0.1 <= value <= 3600, "must be 0.1 to 3600 seconds")
    parser.add_argument(
        "--interval", type=interval, default=1.0, metavar="SECONDS", help="time between two updates (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one line, or one object, and exit")
    parser.add_argument("--json", action="store_true", help="print JSON objects")
    add_admin_flags(parser)
    return parser


async def _watch(service: ConnectionOptions, interval_s: float, once: bool, as_json: bool) -> None:
    before: pb.WatchStatsResponse | None = None
    async with AdminClient.opened(service) as client, aclosing(client.watch_stats(interval_s)) as answers:
        async for stats in answers:
            if as_json:
                print(json.dumps(as_dict(stats)), flush=True)
            elif before is not None:  # rates need two updates
                print(line(stats, Rates.between(before, stats)), flush=True)
            if once and (as_json or before is not None):
                return
            before = stats
    raise PenstockError(f"the service at {service.target} has stopped")
