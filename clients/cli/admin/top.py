"""``penstock top``: live statistics of a running service, full screen or as lines."""

import argparse
import asyncio
import json
import os
import shutil
import sys
from collections import deque
from contextlib import aclosing
from typing import Protocol

from penstock.clients.cli.admin.client import AdminClient
from penstock.clients.cli.admin.stats_view import Rates, dashboard, line
from penstock.clients.cli.as_dict import as_dict
from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.options import ConnectionOptions, add_admin_flags, admin_connection
from penstock.clients.cli.terminal import shows
from penstock.clients.errors import PenstockError
from penstock.v1 import admin_pb2 as pb

_MIN_INTERVAL_S, _MAX_INTERVAL_S = 0.1, 3600.0
_MAX_HISTORY = 40
_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switch to the terminal's alternate screen without a cursor, and back."""
_GOOD, _BAD = "1;32", "1;31"
"""Bold green, bold red."""
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"

_EPILOG = """\
examples:
  penstock top                          Ctrl-C exits
  penstock top --admin gpu1:50052 --interval 5
  penstock top --once                   one line, for a script; speeds are over one interval
  penstock top --json | jq .kv_usage    one object per line, with totals since the start of the service
"""


def main(argv: list[str]) -> int:
    """Runs the command until Ctrl-C, or until the service ends, which is a failure."""
    arguments = make_parser().parse_args(argv)
    service = admin_connection(arguments)
    sink: _Sink
    if arguments.json:
        sink = _Objects()
    elif sys.stdout.isatty() and not arguments.once:
        sink = _Screen(service.target)
    else:
        sink = _Lines()
    try:
        asyncio.run(_watch(service, arguments.interval, arguments.once, sink))
    finally:
        sink.close()
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

    def close(self) -> None:
        """Restores the terminal."""
        ...


class _Objects:
    def close(self) -> None:
        pass

    def show(self, stats: pb.WatchStatsResponse) -> bool:
        print(json.dumps(as_dict(stats)), flush=True)
        return True


class _Lines:
    def __init__(self) -> None:
        self._before: pb.WatchStatsResponse | None = None

    def close(self) -> None:
        pass

    def show(self, stats: pb.WatchStatsResponse) -> bool:
        before, self._before = self._before, stats
        if before is None:
            return False  # rates need two updates
        print(line(stats, Rates.between(before, stats)), flush=True)
        return True


class _Screen:
    def __init__(self, target: str) -> None:
        self._target = target
        self._unicode = shows("█░▁", sys.stdout)
        self._colours = not os.environ.get("NO_COLOR")
        self._before: pb.WatchStatsResponse | None = None
        self._history: deque[float] = deque(maxlen=_MAX_HISTORY)
        self._entered = False

    def show(self, stats: pb.WatchStatsResponse) -> bool:
        before, self._before = self._before, stats
        if before is not None:
            self._history.append(Rates.between(before, stats).output_tokens)
        columns, rows = shutil.get_terminal_size()
        lines = [text[: columns - 1] for text in dashboard(self._target, before, stats, self._history, self._unicode)]
        if self._colours:
            lines[0] = f"\x1b[{_GOOD if stats.state == pb.ENGINE_STATE_SERVING else _BAD}m{lines[0]}\x1b[0m"
        enter = "" if self._entered else _ENTER
        self._entered = True
        sys.stdout.write(enter + _HOME + "".join(f"{text}{_END_OF_LINE}\n" for text in lines[: rows - 1]))
        sys.stdout.write(_END_OF_SCREEN)
        sys.stdout.flush()
        return True

    def close(self) -> None:
        if self._entered:
            sys.stdout.write(_LEAVE)
            sys.stdout.flush()


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _MIN_INTERVAL_S <= seconds <= _MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"must be {_MIN_INTERVAL_S} to {_MAX_INTERVAL_S:.0f} seconds")
    return seconds
