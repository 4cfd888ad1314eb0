"""Runs ``penstock top`` on a terminal: reads keys, calls the service, and draws the screen."""

import asyncio
import os
import re
import shutil
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

import penstock.v1 as pb
from penstock.clients.cli.admin.client import AdminClient
from penstock.clients.cli.admin.top_screen import Key, ScreenAction, TopScreen
from penstock.clients.cli.options import ConnectionOptions
from penstock.clients.errors import PenstockError

_ENTER, _LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
"""Switch to the terminal's alternate screen without a cursor, and back."""
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"
_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
_MAX_LISTED = 100
_KEYS = {key.value: key for key in Key} | {"\x1bOA": Key.UP, "\x1bOB": Key.DOWN}

Event = pb.WatchStatsResponse | Key | None
"""Statistics, a key, or None after the last statistics."""


def keys_in(text: str) -> Iterator[Key]:
    """Yields the keys in what a terminal sent."""
    for pressed in _KEY.findall(text):
        yield _KEYS.get(pressed, Key.OTHER)


async def run_on_terminal(service: ConnectionOptions, interval_s: float, screen: TopScreen) -> None:
    """Shows the screen until the operator quits. Raises PenstockError if the service ends."""
    events: asyncio.Queue[Event] = asyncio.Queue()
    async with AdminClient.opened(service) as client:
        watcher = asyncio.create_task(_watch(client, interval_s, events))
        try:
            with _keys(events.put_nowait), _display() as draw:
                while (event := await events.get()) is not None:
                    if await _handle(event, screen, client) is ScreenAction.QUIT:
                        return
                    if events.empty():
                        draw(screen)
            await watcher
        finally:
            watcher.cancel()
            await asyncio.wait([watcher])
    raise PenstockError(f"the service at {service.target} has stopped")


async def _watch(client: AdminClient, interval_s: float, events: asyncio.Queue[Event]) -> None:
    try:
        async with aclosing(client.watch_stats(interval_s)) as answers:
            async for stats in answers:
                events.put_nowait(stats)
    finally:
        events.put_nowait(None)


async def _handle(event: pb.WatchStatsResponse | Key, screen: TopScreen, client: AdminClient) -> ScreenAction:
    if isinstance(event, Key):
        action = screen.press(event)
    else:
        screen.update(event)
        action = ScreenAction.LIST if screen.shows_requests else ScreenAction.DRAW
    try:
        if action is ScreenAction.CANCEL:
            screen.message = await _cancel(client, screen.to_cancel)
        if action in (ScreenAction.CANCEL, ScreenAction.LIST):
            answer = await client.call("ListRequests", pb.ListRequestsRequest(page_size=_MAX_LISTED))
            screen.set_requests(list(answer.requests))
    except PenstockError as error:
        screen.message = str(error).partition("\n")[0]
    return action


async def _cancel(client: AdminClient, request_id: str) -> str:
    """Cancels a request; returns what became of it."""
    ids = pb.RequestIds(request_ids=[request_id])
    answer = await client.call("CancelRequests", pb.CancelRequestsRequest(ids=ids))
    return f"{request_id} {'was cancelled' if answer.cancelled_requests else 'had ended already'}"


@contextmanager
def _keys(on_key: Callable[[Key], None]) -> Iterator[None]:
    """Passes the keys of the terminal on standard input to ``on_key``, without waiting for Enter. Ctrl-C still
    interrupts the program. Without a terminal there are no keys."""
    if not sys.stdin.isatty():
        yield
        return
    terminal, loop = sys.stdin.fileno(), asyncio.get_running_loop()

    def read() -> None:
        data = os.read(terminal, 1024)
        if not data:  # the terminal is gone
            loop.remove_reader(terminal)
        for key in keys_in(data.decode(errors="replace")):
            on_key(key)

    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal)
    loop.add_reader(terminal, read)
    try:
        yield
    finally:
        loop.remove_reader(terminal)
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


@contextmanager
def _display() -> Iterator[Callable[[TopScreen], None]]:
    """Yields a function that draws a screen over the last one, on the alternate screen of the terminal on standard
    output. The first drawing switches to it."""
    enter = _ENTER

    def draw(screen: TopScreen) -> None:
        nonlocal enter
        drawn = "".join(f"{text}{_END_OF_LINE}\n" for text in screen.lines(*shutil.get_terminal_size()))
        output, enter = f"{enter}{_HOME}{drawn}{_END_OF_SCREEN}", ""
        print(output, end="", flush=True)

    try:
        yield draw
    finally:
        if not enter:
            print(_LEAVE, end="", flush=True)
