"""The flags of ``penstock simulate``."""

import argparse
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.clients.bench.report import Slo
from penstock.clients.bench.workload import Arrivals, ClosedLoop, OpenLoop
from penstock.clients.cli.command_parser import CommandParser, number_where, positive, reporting
from penstock.scheduler.policy import Policy
from penstock.scheduler.simulation.costs import (
    MESSAGE_S,
    REQUEST_S,
    UNITS,
    ServiceCosts,
    SimulatedCosts,
    StepCosts,
)
from penstock.scheduler.simulation.simulation import Routing
from penstock.service.simulate.settings import KV_TOKENS, RATE, REPLICAS, SETTINGS, STAGES, parse_setting

DEFAULT_SHARE = 0.99
MAX_CONFIGURATIONS = 1000
_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_TIME = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)(s|ms|us|ns)")
_SERVICE_NAMES = {"service": "handle_s", "service_rows": "handle_row_s"}
_above_zero = number_where(lambda value: 0 < value < math.inf, "expected a number above 0, got {0}")
_not_negative = number_where(lambda value: 0 <= value <= 1e6, "expected a number from 0 to 1,000,000, got {0}")
_share = number_where(lambda value: 0 < value <= 1, "expected a share above 0 and at most 1, got {0}")

_EPILOG = """\
Runs the scheduler and the KV cache of penstock serve in virtual time. A step takes as long as the fit to a step log
predicts. docs/simulate.md describes the figures, and what is not simulated. Exit status: 0 if a request was answered,
1 if none was or a file cannot be used, 2 for invalid flags, 3 if no configuration of a sweep meets the SLOs.

examples:
  penstock serve ./my-model --step-log steps.jsonl        a service that logs its steps, under a load like yours
  penstock simulate trace.jsonl --step-log steps.jsonl    the same machine, under the load in trace.jsonl
  penstock simulate trace.jsonl --step-log steps.jsonl --rate 20 --slo ttft=500ms,itl=50ms
  penstock simulate trace.jsonl --step-log steps.jsonl --replicas 4 --max-num-seqs 64
  penstock simulate trace.jsonl --step-log steps.jsonl --slo ttft=500ms,itl=50ms --plot sweep.png \\
          --sweep rate=1,2,4,8 --sweep replicas=1,2,4 --sweep pipeline-parallel-size=1,2
  penstock simulate trace.jsonl --step-cost constant=20ms,prefill_tokens=50us,decodes=100us,decode_kv=0.1us \\
          --kv-cache-tokens 100000 --max-model-len 8192   a machine of which only estimates are known

line of a trace: {"arrival_s": 0.25, "prompt_tokens": 300, "max_tokens": 64, "conversation": "a"}
                 or prompt_token_ids instead of prompt_tokens, to share prefixes; conversation is optional
"""


@dataclass(frozen=True)
class CommandLineCosts:
    """The costs of ``--step-cost``."""

    step: StepCosts
    service: ServiceCosts

    @property
    def simulated(self) -> SimulatedCosts:
        """The costs of a simulation: steps have no noise, and nothing is drafted."""
        return SimulatedCosts(self.step, service=self.service)


def parse_costs(text: str) -> CommandLineCosts:
    """Parses costs such as ``constant=20ms,decodes=100us``. Raises ValueError, which lists the names."""
    names = ("constant", *UNITS, *_SERVICE_NAMES)
    found: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        match = _TIME.fullmatch(value)
        if name not in names or name in found or match is None:
            raise ValueError(f"expected times of {', '.join(names)}, such as constant=20ms,decodes=100us; got {part!r}")
        found[name] = float(match[1]) * _UNITS[match[2]]
    service = {field: found.pop(name) for name, field in _SERVICE_NAMES.items() if name in found}
    costs = StepCosts(**found)
    if not any(costs):
        raise ValueError(f"a step must take some time; got {text}")
    return CommandLineCosts(costs, ServiceCosts(**service, request_s=REQUEST_S, message_s=MESSAGE_S))


def parse_sweep(text: str) -> tuple[str, Sequence[Any]]:
    """Parses a setting and its values, such as ``replicas=1,2,4``. Raises ValueError."""
    name, equals, values = text.removeprefix("--").partition("=")
    if name not in SETTINGS or not equals:
        raise ValueError(f"expected NAME=VALUE,VALUE with one of {', '.join(SETTINGS)}; got {text}")
    try:
        return name, [parse_setting(name, value.strip()) for value in values.split(",")]
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"{name}: {error}") from None


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parses the arguments and checks their combinations; exits with status 2 if any is invalid. Adds ``arrivals``,
    and ``sweep`` as a mapping from settings to their values."""
    parser = make_parser()
    arguments: argparse.Namespace = parser.parse_args(argv)
    if (arguments.step_log is None) == (arguments.step_cost is None):
        parser.error("step costs come from either --step-log FILE or --step-cost COSTS; give one of them")
    if arguments.step_cost is not None:
        for name in (KV_TOKENS, "max-model-len"):
            if getattr(arguments, name.replace("-", "_")) is None:
                parser.error(f"--step-cost needs --{name} as well, which a step log would contain")
    if arguments.rate is not None and arguments.concurrency is not None:
        parser.error("--rate and --concurrency cannot be combined; use one of them")
    arguments.arrivals = _arrivals(arguments)
    arguments.sweep = _sweep(parser, arguments)
    return arguments


def _arrivals(arguments: argparse.Namespace) -> Arrivals | None:
    """Returns when conversations start; None: at the times of the trace."""
    if arguments.rate is not None:
        return OpenLoop(arguments.rate)
    return None if arguments.concurrency is None else ClosedLoop(arguments.concurrency)


def _sweep(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Mapping[str, Sequence[Any]]:
    sweep: dict[str, Sequence[Any]] = {}
    for name, values in arguments.sweep:
        if name in sweep:
            parser.error(f"--sweep {name}: is given twice; list all of its values in one")
        sweep[name] = values
    if RATE in sweep and arguments.concurrency is not None:
        parser.error("--sweep rate: --concurrency has no rate; leave one of them out")
    number = math.prod(map(len, sweep.values()))
    if number > MAX_CONFIGURATIONS:
        parser.error(f"--sweep: has {number:,} configurations; at most {MAX_CONFIGURATIONS:,} are simulated")
    return sweep


def make_parser() -> CommandParser:
    """Defines the flags."""
    parser = CommandParser("simulate", "Predicts throughput and latency under a load, without a model.", _EPILOG)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="the load, in the format of penstock bench --trace")
    _add_costs(parser.add_argument_group("step costs"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    _add_service(parser.add_argument_group("the simulated service"))
    _add_output(parser.add_argument_group("output"))
    return parser


def _add_costs(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--step-log",
        type=Path,
        metavar="FILE",
        help="a file that penstock serve --step-log wrote, also with its limits",
    )
    flags.add_argument(
        "--step-cost",
        type=reporting(parse_costs),
        metavar="COSTS",
        help="times of a step in s, ms, us or ns: constant, and one for each unit of its work: "
        f"{', '.join((*UNITS, *_SERVICE_NAMES))}",
    )
    flags.add_argument(
        "--network",
        type=_not_negative,
        metavar="MS",
        help="time of a request and its first message on their way between client and scheduler "
        f"(default: {(REQUEST_S + MESSAGE_S) * 1e3:g}, or more if the cores were busy in the log)",
    )


def _add_arrivals(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--rate", type=_above_zero, metavar="R", help="conversations per second at random times, not those of the trace"
    )
    flags.add_argument(
        "--concurrency", type=positive, metavar="N", help="closed loop: number of concurrent conversations"
    )
    flags.add_argument(
        "--num-requests", type=positive, metavar="N", help="only the first requests of the trace (default: all)"
    )
    flags.add_argument("--timeout-ms", type=positive, metavar="MS", help="deadline of each request (default: none)")
    flags.add_argument(
        "--seed", default="0", metavar="SEED", help="seed of prompts, arrivals and the noise of steps (default: 0)"
    )


def _add_service(flags: "argparse._ArgumentGroup") -> None:
    for name, metavar, text in (
        (REPLICAS, "N", "services that share the load (default: 1)"),
        (STAGES, "N", "stages of each replica, as in penstock serve (default: 1)"),
        ("max-num-seqs", "N", "as in penstock serve (default: that of the log, or 256)"),
        ("max-num-batched-tokens", "N", "as in penstock serve (default: that of the log, or 2048)"),
        (KV_TOKENS, "N", "tokens in the KV cache of each replica (default: that of the log)"),
        ("target-itl", "MS", "as in penstock serve (default: that of the log)"),
        ("max-queued-requests", "N", "as in penstock serve (default: that of the log, or 1024)"),
        ("max-queued-tokens", "N", "as in penstock serve (default: that of the log, or 4000000)"),
    ):
        flags.add_argument(f"--{name}", type=_setting(name), metavar=metavar, help=text)
    policies = ",".join(policy.value for policy in Policy)
    flags.add_argument(
        "--scheduling-policy",
        type=_setting("scheduling-policy"),
        metavar=f"{{{policies}}}",
        help="as in penstock serve (default: that of the log, or fcfs)",
    )
    flags.add_argument(
        "--max-model-len", type=positive, metavar="N", help="as in penstock serve (default: that of the log)"
    )
    flags.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="as in penstock serve (default: that of the log, or on)",
    )
    flags.add_argument(
        "--routing",
        choices=[routing.value for routing in Routing],
        default=Routing.LEAST_REQUESTS.value,
        help="the replica of a conversation: that with the fewest live requests, or each in turn "
        f"(default: {Routing.LEAST_REQUESTS.value})",
    )
    flags.add_argument(
        "--stage-hop",
        type=_not_negative,
        default=0.2,
        metavar="MS",
        help="time from one stage to the next, and from the last to the first (default: 0.2)",
    )


def _setting(name: str) -> Callable[[str], Any]:
    """Returns a parser of a setting's value for argparse."""
    return lambda text: parse_setting(name, text)


def _add_output(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--slo",
        type=reporting(Slo.parse),
        metavar="BOUNDS",
        help="limits that a request must meet to count as goodput: any of ttft=500ms,itl=50ms,tpot=40ms,e2e=5s",
    )
    flags.add_argument(
        "--slo-share",
        type=_share,
        default=DEFAULT_SHARE,
        metavar="SHARE",
        help=f"the share of requests that must meet --slo in the cheapest configuration (default: {DEFAULT_SHARE})",
    )
    flags.add_argument(
        "--sweep",
        action="append",
        type=reporting(parse_sweep),
        default=[],
        metavar="NAME=VALUE,VALUE",
        help="simulate each value of a flag of the simulated service, or of rate, whose values are factors of the "
        "arrival rate; may be repeated, and all combinations are simulated",
    )
    flags.add_argument("--json", metavar="FILE", help="write all figures as JSON; - is stdout")
    flags.add_argument(
        "--plot",
        type=Path,
        metavar="FILE.png",
        help="write a plot of the distributions, or of throughput against p99 for a sweep; needs penstock-llm[bench]",
    )
