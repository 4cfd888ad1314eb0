"""Measures the CPU time that the HTTP gateway costs for 1,000 streamed tokens, at several numbers of streams.

One `penstock serve --http-port` with the demo model. The same load arrives by gRPC, as completions over HTTP and as
chats over HTTP, in turns. Each token is an event of its own, and each stream has a connection of its own.

What is counted: all CPU time of the gateway's process, user and system, from the first request to the last event;
and what the service's process takes in addition to the same load by gRPC. So the cost of each request is included,
and the client's, the worker's and the model's are not. On loopback, the sender also pays for the receiving half of TCP.
"""

import argparse
import statistics
from collections.abc import Sequence

import uvloop
from gateway_load import CHAT, GRPC, HTTP, Round, Serving, call, serving

from penstock.models.checkpoint.checkpoint import DEMO

STREAMS = (1, 8, 64, 256)
OUTPUT_TOKENS = 400
MIN_TOKENS = 6400
"""A round has at least this many tokens, so that the clock of CPU time, 10 ms, is fine enough."""
TARGET_MS = 15.0


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS, help="at a time (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each way (default: %(default)s)")
    arguments = parser.parse_args(argv)
    print(f"CPU ms for 1,000 tokens, medians of {arguments.rounds} rounds; target: at most {TARGET_MS:g} in all")
    print(f"{'streams':>8}  {'':12}{'tokens/s':>10}{'gateway':>10}{'service':>10}{'more than gRPC':>16}{'in all':>9}")
    with serving(DEMO) as service:
        for num_streams in arguments.streams:
            report(num_streams, uvloop.run(measure(service, num_streams, arguments.rounds)))


async def measure(service: Serving, num_streams: int, num_rounds: int) -> dict[str, list[Round]]:
    """Measures all ways in turns, so that changes on the machine affect all of them."""
    rounds: dict[str, list[Round]] = {GRPC: [], HTTP: [], CHAT: []}
    for way in rounds:
        await call(service, way, 4, num_streams)
    for _ in range(num_rounds):
        for way, measured in rounds.items():
            measured.append(await one_round(service, way, num_streams))
    return rounds


async def one_round(service: Serving, way: str, num_streams: int) -> Round:
    """Measures one way once."""
    num_turns = -(-MIN_TOKENS // (num_streams * OUTPUT_TOKENS))
    turns = [await call(service, way, OUTPUT_TOKENS, num_streams) for _ in range(num_turns)]
    return Round(
        statistics.mean(turn.tokens_per_s for turn in turns),
        {name: statistics.mean(turn.cpu_s[name] for turn in turns) for name in turns[0].cpu_s},
        statistics.mean(turn.ttft_s for turn in turns),
    )


def report(num_streams: int, rounds: dict[str, list[Round]]) -> None:
    """Prints a line for each way. The difference between ways is the median of the differences of rounds."""
    for way, measured in rounds.items():
        speed = statistics.median(each.tokens_per_s for each in measured)
        gateway = 1e3 * statistics.median(each.cpu_s["gateway"] for each in measured)
        own = 1e3 * statistics.median(each.cpu_s["service"] for each in measured)
        line = f"{num_streams:8,}  {way:12}{speed:10,.0f}{gateway:10.1f}{own:10.1f}"
        if way != GRPC:
            pairs = zip(measured, rounds[GRPC], strict=True)
            more = 1e3 * statistics.median(each.cpu_s["service"] - by_grpc.cpu_s["service"] for each, by_grpc in pairs)
            line += f"{more:+16.1f}{gateway + more:9.1f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
