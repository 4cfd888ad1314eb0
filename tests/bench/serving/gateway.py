"""What the HTTP gateway passes of a service's speed, and what CPU it takes: 64 streams, by gRPC and by OpenAI's API.

Both ways by turns against one `penstock serve --http-port`, on the demo model and on the shape of Qwen3-0.6B with made
up weights (M1), with text for every token. The load generator is on the same cores, so over HTTP it reads bytes and
parses the last event alone of each answer; its own CPU is told beside the others'.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import uvloop
from gateway_load import GRPC, HTTP, Round, Serving, call, serving

NUM_STREAMS = 64
TARGET_ON_M1 = 0.97


@dataclass(frozen=True)
class Model:
    """What is served, and how many tokens a stream gets from it in a round."""

    name: str
    output_tokens: int
    target: float | None = None
    """The least share of gRPC's speed that is wanted."""


MODELS = (Model("demo", 400), Model("M1", 96, TARGET_ON_M1))


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[model.name for model in MODELS], default=["demo", "M1"])
    parser.add_argument("--rounds", type=int, default=5, help="of each way (default: 5)")
    parser.add_argument("--streams", type=int, default=NUM_STREAMS, help=f"at a time (default: {NUM_STREAMS})")
    arguments = parser.parse_args(argv)
    for model in MODELS:
        if model.name in arguments.models:
            with serving(model.name) as service:
                rounds = uvloop.run(measure(service, model, arguments.rounds, arguments.streams))
            report(model, rounds, arguments.streams)


async def measure(service: Serving, model: Model, num_rounds: int, num_streams: int) -> dict[str, list[Round]]:
    """The ways by turns, so that what changes on the machine changes for both."""
    rounds: dict[str, list[Round]] = {GRPC: [], HTTP: []}
    await call(service, HTTP, 4, num_streams)  # whatever is made at the first request
    for number in range(num_rounds):
        for way in (GRPC, HTTP) if number % 2 == 0 else (HTTP, GRPC):
            rounds[way].append(await call(service, way, model.output_tokens, num_streams))
    return rounds


def report(model: Model, rounds: dict[str, list[Round]], num_streams: int) -> None:
    """The medians, and what HTTP passes: by time, by rounds that followed each other, and by CPU, which others' work on
    the machine hardly changes."""
    num_rounds = len(rounds[GRPC])
    print(f"{model.name}: {num_streams} streams of {model.output_tokens} tokens, {num_rounds} rounds of each way")
    of_cpu = "CPU ms for 1,000 tokens: gateway"
    print(f"{'':8}{'tokens/s':>10}{'1st token':>12}{of_cpu:>36}{'service':>10}{'worker':>10}{'client':>10}")
    for way, measured in rounds.items():
        cpu = {name: 1e3 * statistics.median(each.cpu_s[name] for each in measured) for name in measured[0].cpu_s}
        speed = statistics.median(each.tokens_per_s for each in measured)
        first = statistics.median(each.ttft_s for each in measured)
        print(
            f"{way:8}{speed:10,.0f}{first * 1e3:9,.0f} ms"
            f"{cpu['gateway']:36,.1f}{cpu['service']:10,.1f}{cpu['worker']:10,.1f}{cpu['client']:10,.1f}"
        )
    ratios = [http.tokens_per_s / grpc.tokens_per_s for grpc, http in zip(rounds[GRPC], rounds[HTTP], strict=True)]
    seconds = {way: sum(1 / each.tokens_per_s for each in measured) for way, measured in rounds.items()}
    cpu_s = {way: sum(sum(each.cpu_s.values()) for each in measured) for way, measured in rounds.items()}
    wanted = "" if model.target is None else f" (wanted: at least {model.target:.0%})"
    print(f"HTTP passes {seconds[GRPC] / seconds[HTTP]:.1%} of gRPC's tokens in all rounds together{wanted}; "
          f"by pairs of rounds {min(ratios):.1%} to {max(ratios):.1%}, in the median {statistics.median(ratios):.1%}; "
          f"if all CPU were taken {cpu_s[GRPC] / cpu_s[HTTP]:.1%}\n", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
