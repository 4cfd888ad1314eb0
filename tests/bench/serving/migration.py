"""Measures what a killed replica costs its streams: how many end with the right tokens, and the time without tokens.

Two services on this machine serve the demo model. All streams run at the first one, which is killed with SIGKILL once
each stream has some tokens. Their client has a list of both, and continues them at the second. The right tokens are
those of an undisturbed run. Half of the streams are greedy, half are sampled.
"""

import argparse
import asyncio
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from penstock.clients.client import AsyncClient
from penstock.clients.errors import RequestFailed
from penstock.clients.events import Delta

PENSTOCK = Path(sys.executable).with_name("penstock")
PROMPT = "Once upon a time, in town {number} by the sea, there was a"


@dataclass
class Stream:
    """What one stream brought."""

    token_ids: list[int] = field(default_factory=list)
    last_at: float = 0.0
    """The time of the newest token."""
    gap_s: float = 0.0
    """The longest time without a token since the replica was killed."""
    failure: str = ""


class Killed:
    """The replica to kill, and when that was."""

    def __init__(self, process: "subprocess.Popen[str] | None", num_before: int) -> None:
        self.process = process
        self.num_before = num_before
        self.at = 0.0

    def check(self, streams: Sequence[Stream]) -> None:
        """Kills the replica once every stream has enough tokens."""
        if self.process is None or self.at or any(len(stream.token_ids) < self.num_before for stream in streams):
            return
        self.at = time.monotonic()
        self.process.kill()


def start(exits: ExitStack) -> "tuple[subprocess.Popen[str], str]":
    """Starts a service; returns it and its target."""
    command = [PENSTOCK, "serve", "demo", "--port=0", "--dtype=float32", "--max-num-seqs=256", "--log-level=error"]
    process = subprocess.Popen([str(each) for each in command], stdout=subprocess.PIPE, text=True)
    exits.callback(process.wait)
    exits.callback(process.kill)
    assert process.stdout is not None
    for line in process.stdout:
        if " serves " in line:
            return process, line.partition(" on ")[2].split()[0]
    raise SystemExit("a service did not start")


async def run(client: AsyncClient, number: int, max_tokens: int, streams: Sequence[Stream], killed: Killed) -> None:
    """Runs one stream to its end."""
    stream = streams[number]
    options = {"temperature": 0.0 if number % 2 else 1.0, "seed": number, "ignore_eos": True, "max_tokens": max_tokens}
    try:
        async for event in client.generate(PROMPT.format(number=number), **options):  # type: ignore[arg-type]
            if isinstance(event, Delta):
                now = time.monotonic()
                if killed.at:
                    stream.gap_s = max(stream.gap_s, now - max(stream.last_at, killed.at))
                stream.token_ids += event.token_ids
                stream.last_at = now
                killed.check(streams)
    except RequestFailed as failure:
        stream.failure = str(failure)


async def measure(target: str, arguments: argparse.Namespace, killed: Killed) -> tuple[list[Stream], int]:
    """Runs all streams; returns them, and how often one of them moved."""
    streams = [Stream() for _ in range(arguments.streams)]
    async with AsyncClient(target) as client:
        runs = [run(client, number, arguments.max_tokens, streams, killed) for number in range(arguments.streams)]
        await asyncio.gather(*runs)
        return streams, client.num_moves


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64, help="how many at once (default: 64)")
    parser.add_argument("--max-tokens", type=int, default=256, help="of each stream (default: 256)")
    parser.add_argument("--tokens-before", type=int, default=64, help="of each when it is killed (default: 64)")
    arguments = parser.parse_args(argv)
    logging.getLogger("penstock.clients").setLevel(logging.ERROR)  # a line for each move
    with ExitStack() as exits:
        (victim, first), (_, second) = start(exits), start(exits)
        right, _ = asyncio.run(measure(second, arguments, Killed(None, 0)))
        killed = Killed(victim, arguments.tokens_before)
        streams, num_moves = asyncio.run(measure(f"{first},{second}", arguments, killed))
    num_right = sum(one.token_ids == other.token_ids for one, other in zip(streams, right, strict=True))
    print(f"{num_right} of {len(streams)} streams ended with the right tokens; {num_moves} moves")
    for failure in sorted({stream.failure for stream in streams if stream.failure}):
        print(f"failed: {failure}")
    gaps = sorted(stream.gap_s * 1000 for stream in streams)
    p50, p99 = (gaps[min(len(gaps) - 1, int(share * len(gaps)))] for share in (0.5, 0.99))
    print(f"longest time without tokens after the kill: p50 {p50:.0f} ms, p99 {p99:.0f} ms, max {gaps[-1]:.0f} ms")


if __name__ == "__main__":
    main()
