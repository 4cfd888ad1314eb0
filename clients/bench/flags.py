"""The flags of ``penstock bench``."""

import argparse
import math
from pathlib import Path

from penstock.clients.bench.lengths import parse_lengths
from penstock.clients.bench.report import Slo
from penstock.clients.bench.runner import MAX_OUTSTANDING
from penstock.clients.bench.workload import DEFAULT_OPTIONS, Arrivals, ClosedLoop, OpenLoop
from penstock.clients.cli.command_parser import CommandParser, number_where, positive, reporting
from penstock.clients.cli.options import add_connection_flags, default_target, name_and_value, setting
from penstock.clients.errors import InvalidOption

_DEFAULT_CONCURRENCY = 16
_DEFAULT_REQUESTS = 100
_OWN_OPTIONS = {"max_tokens", "continue_from", "n"}
_above_zero = number_where(lambda value: 0 < value < math.inf, "expected a number above 0, got {0}")

_EPILOG = """\
Times are measured by the client, from the moment it sends a request. The same seed gives the same requests for any
server. Exit status: 0 if at least one request was answered, 1 if none was or the run could not start, 2 for invalid
flags, 130 if it was interrupted (the results so far are reported).

examples:
  penstock bench                                          100 requests, 16 at a time, to the service on this machine
  penstock bench --rate 20 --duration 60 --slo ttft=500ms,itl=50ms
  penstock bench --concurrency 64 --prompt-tokens lognormal:400,600 --output-tokens uniform:16-256
  penstock bench --turns 5 --prefix-tokens 1000 --prefixes 4
  penstock bench --trace requests.jsonl --json out.json --plot out.png
  penstock bench http://127.0.0.1:8000 --api openai --vocab-size 32000

line of a trace: {"arrival_s": 0.25, "prompt_tokens": 300, "max_tokens": 64, "conversation": "a"}
                 or prompt_token_ids instead of prompt_tokens; conversation is optional
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """Parses the arguments and checks their combinations; exits with status 2 if any is invalid. Adds ``options``,
    those of every request, and ``arrivals``."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if arguments.address is not None and arguments.target is not None:
        parser.error("specify the service once: as TARGET or with --target")
    arguments.target = arguments.address or arguments.target
    if arguments.rate is not None and arguments.concurrency is not None:
        parser.error("--rate and --concurrency cannot be combined; use one of them")
    if arguments.burstiness != 1 and arguments.rate is None:
        parser.error("--burstiness needs --rate")
    if arguments.prefixes > 1 and not arguments.prefix_tokens:
        parser.error("--prefixes needs --prefix-tokens")
    if arguments.trace is not None and (arguments.turns > 1 or arguments.prefix_tokens):
        parser.error("a --trace has its own prompts and conversations; leave out --turns and --prefix-tokens")
    if arguments.api == "openai":
        if arguments.vocab_size is None:
            parser.error(
                "--api openai needs --vocab-size: prompts are random token ids, and such a server does not report its "
                "vocabulary size"
            )
    elif arguments.endpoint is not None:
        parser.error("--endpoint needs --api openai")
    if arguments.num_requests is None and arguments.duration is None and arguments.trace is None:
        arguments.num_requests = _DEFAULT_REQUESTS
    try:
        arguments.options = _options(arguments)
    except InvalidOption as error:
        parser.error(f"--set: {error}")
    arguments.arrivals = _arrivals(arguments)
    return arguments


def _arrivals(arguments: argparse.Namespace) -> Arrivals | None:
    """Returns when conversations start; None: at the times of the trace."""
    if arguments.rate is not None:
        return OpenLoop(arguments.rate, arguments.burstiness)
    if arguments.trace is not None and arguments.concurrency is None:
        return None
    return ClosedLoop(arguments.concurrency or _DEFAULT_CONCURRENCY)


def _options(arguments: argparse.Namespace) -> dict[str, object]:
    """Returns the options of every request except its prompt and length. Raises InvalidOption."""
    given = dict(map(setting if arguments.api == "grpc" else name_and_value, arguments.settings))
    if mine := sorted(_OWN_OPTIONS & given.keys()):
        raise InvalidOption(mine[0], "set per request; see --output-tokens and --turns")
    return {**DEFAULT_OPTIONS, **given}


def make_parser() -> argparse.ArgumentParser:
    """Defines the flags."""
    parser = CommandParser("bench", "Measures the latency and throughput of a running service.", _EPILOG)
    parser.add_argument("address", nargs="?", metavar="TARGET", help="the service; same as --target")
    _add_api(parser.add_argument_group("API"))
    _add_arrivals(parser.add_argument_group("arrivals"))
    _add_shape(parser.add_argument_group("requests"))
    _add_output(parser.add_argument_group("output"))
    add_connection_flags(
        parser, f"the service (default: {default_target()}, or http://127.0.0.1:8000 with --api openai)"
    )
    return parser


def _add_api(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--api",
        choices=("grpc", "openai"),
        default="grpc",
        help="penstock's gRPC API, or OpenAI's HTTP API (default: grpc)",
    )
    flags.add_argument(
        "--model", metavar="NAME", help="the model, which the service must serve (default: the served one)"
    )
    flags.add_argument(
        "--streams",
        type=lambda text: None if text == "per-request" else positive(text),
        default=1,
        metavar="N",
        help="number of Generate streams, or per-request for one call per request (default: 1)",
    )
    flags.add_argument(
        "--endpoint",
        metavar="/PATH",
        help="the path for --api openai; /v1/chat/completions gets words (default: /v1/completions)",
    )
    flags.add_argument("--timeout-ms", type=positive, metavar="MS", help="deadline of each request (default: none)")
    flags.add_argument(
        "--max-outstanding",
        type=positive,
        default=MAX_OUTSTANDING,
        metavar="N",
        help=f"maximum number of conversations in flight; others are counted but not sent (default: {MAX_OUTSTANDING})",
    )
    flags.add_argument(
        "--resend-context",
        action="store_true",
        help="send the whole conversation in each later turn, even with --api grpc",
    )


def _add_arrivals(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--concurrency",
        type=positive,
        metavar="N",
        help=f"closed loop: number of concurrent conversations (default: {_DEFAULT_CONCURRENCY})",
    )
    flags.add_argument(
        "--rate", type=_above_zero, metavar="R", help="open loop: conversations per second, at random times"
    )
    flags.add_argument(
        "--burstiness",
        type=_above_zero,
        default=1.0,
        metavar="B",
        help="burstiness of the arrivals: 1 is Poisson, below 1 is burstier, above 1 is more even (default: 1)",
    )
    flags.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.jsonl",
        help="send the requests in a file, at its times unless --rate or --concurrency is set",
    )
    flags.add_argument(
        "--num-requests",
        type=positive,
        metavar="N",
        help=f"number of requests, counting all --turns (default: {_DEFAULT_REQUESTS}, or no limit with --duration or "
        "--trace)",
    )
    flags.add_argument(
        "--duration",
        type=_above_zero,
        metavar="SECONDS",
        help="stop sending after this time, and wait for running requests",
    )
    flags.add_argument(
        "--warmup",
        type=lambda text: 0 if text == "0" else positive(text),
        default=4,
        metavar="N",
        help="number of requests before the run, which are not counted (default: 4)",
    )


def _add_shape(flags: "argparse._ArgumentGroup") -> None:
    forms = "N, uniform:A-B, normal:MEAN,DEVIATION or lognormal:MEAN,DEVIATION"
    flags.add_argument(
        "--prompt-tokens",
        type=reporting(parse_lengths),
        default=parse_lengths("512"),
        metavar="LENGTHS",
        help=f"prompt tokens of each turn: {forms} (default: 512)",
    )
    flags.add_argument(
        "--output-tokens",
        type=reporting(parse_lengths),
        default=parse_lengths("128"),
        metavar="LENGTHS",
        help="output tokens of each turn (default: 128); stop tokens are ignored unless --set ignore_eos=false",
    )
    flags.add_argument(
        "--prefix-tokens",
        type=positive,
        default=0,
        metavar="N",
        help="tokens of a shared prefix before the first turn (default: none)",
    )
    flags.add_argument(
        "--prefixes", type=positive, default=1, metavar="K", help="number of different prefixes (default: 1)"
    )
    flags.add_argument("--turns", type=positive, default=1, metavar="N", help="requests per conversation (default: 1)")
    flags.add_argument("--seed", default="0", metavar="SEED", help="seed of all random choices (default: 0)")
    flags.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="limit on token ids (default: the service's vocabulary size; required with --api openai)",
    )
    flags.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="an option for every request, such as temperature=0.7, tenant=a, priority=1 (default: temperature=0 and "
        "repetition_penalty=1); "
        "with --api openai, any field of the body, or NAME= to leave it out; may be repeated",
    )


def _add_output(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--slo",
        type=reporting(Slo.parse),
        metavar="BOUNDS",
        help="limits that a request must meet to count as goodput: any of ttft=500ms,itl=50ms,tpot=40ms,e2e=5s",
    )
    flags.add_argument(
        "--json",
        metavar="FILE",
        help="write all figures, and the times and tokens of each request, as JSON; - is stdout",
    )
    flags.add_argument("--plot", type=Path, metavar="FILE.png", help="write a plot of the distributions")
