"""``penstock top``: live statistics of a running service, full screen or as lines."""

import argparse
import asyncio
import json
import os
import sys
from contextlib import aclosing
from typing import Protocol

from penstock.clients.cli.admin.client import AdminClient
from penstock.clients.cli.admin.stats_view import Rates, line
from penstock.clients.cli.admin.top_screen import TopScreen
from penstock.clients.cli.as_dict import as_dict
from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.options import ConnectionOptions, add_admin_flags, admin_connection
from penstock.clients.cli.terminal import shows
from penstock.clients.errors import PenstockError
from penstock.v1 import admin_pb2 as pb

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 3600.0

_EPILOG = """\
examples:
  penstock top                          keys: r lists the live requests, x cancels one, q or Ctrl-C quits
  penstock top --admin gpu1:50052 --interval 5
  penstock top --once                   one line, for a script; speeds are over one interval
  penstock top --json | jq .kv_usage    one object per line, with totals since the start of the service
  penstock top --once --json | jq .last_10s.time_to_first_token.p99_us
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
        sink = _Objects() if arguments.json else _Lines()
        asyncio.run(_watch(service, arguments.interval, arguments.once, sink))
    return 0


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser(
        "top",
        "Shows live statistics of a running service: full screen on a terminal, otherwise one line per update.",
        _EPILOG,
    )
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="SECONDS", help="time between two updates (default: 1)"
    )
    parser.add_argument("--once", action="store_true", help="print one line, or one object, and exit")
    parser.add_argument("--json", action="store_true", help="print JSON objects")
    add_admin_flags(parser)
    return parser


async def _watch(service: ConnectionOptions, interval_s: float, once: bool, sink: "_Sink") -> None:
    request = pb.WatchStatsRequest(interval_ms=round(interval_s * 1000))
    async with AdminClient.opened(service) as client, aclosing(client.watch("WatchStats", request)) as answers:
        async for stats in answers:
            if sink.show(stats) and once:
                return
    raise PenstockError(f"the service at {service.target} has stopped")


class _Sink(Protocol):
    """An output for updates."""

    def show(self, stats: pb.WatchStatsResponse) -> bool:
        """Shows an update. Returns whether that is enough for ``--once``."""
        ...


class _Objects:
    def show(self, stats: pb.WatchStatsResponse) -> bool:
        print(json.dumps(as_dict(stats)), flush=True)
        return True


class _Lines:
    def __init__(self) -> None:
        self._before: pb.WatchStatsResponse | None = None

    def show(self, stats: pb.WatchStatsResponse) -> bool:
        before, self._before = self._before, stats
        if before is None:
            return False  # rates need two updates
        print(line(stats, Rates.between(before, stats)), flush=True)
        return True


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _MIN_INTERVAL_S <= seconds <= _MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"must be {_MIN_INTERVAL_S} to {_MAX_INTERVAL_S:.0f} seconds")
    return seconds
