"""The flags of ``penstock bench``."""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.clients.bench.lengths import parse_lengths
from penstock.clients.bench.report import Slo
from penstock.clients.bench.runner import MAX_OUTSTANDING
from penstock.clients.bench.workload import DEFAULT_OPTIONS, Arrivals, ClosedLoop, OpenLoop
from penstock.clients.cli.command_parser import CommandParser
from penstock.clients.cli.options import add_connection_flags, default_target, setting
from penstock.clients.errors import InvalidOption

T = TypeVar("T")

_DEFAULT_CONCURRENCY = 16
_DEFAULT_REQUESTS = 100
_OWN_OPTIONS = {"max_tokens", "continue_from", "n"}

_EPILOG = """\
Times are the client's own, from the moment at which a request is sent. The same seed asks the same, of any server.
Exit status: 0, 1 if it could not begin or no request was answered, 2 for wrong flags, 130 if it was interrupted (what
there is, is told).

examples:
  penstock bench                                          100 requests, 16 at a time, to the service on this machine
  penstock bench --rate 20 --duration 60 --slo ttft=500ms,itl=50ms
  penstock bench --concurrency 64 --prompt-tokens lognormal:400,600 --output-tokens uniform:16-256
  penstock bench --turns 5 --prefix-tokens 1000 --prefixes 4
  penstock bench --trace requests.jsonl --json out.json --plot out.png
  penstock bench http://127.0.0.1:8000 --api openai --vocab-size 32000

a line of a trace: {"arrival_s": 0.25, "prompt_tokens": 300, "max_tokens": 64, "conversation": "a"}
                   or prompt_token_ids instead of prompt_tokens; conversation may be left out
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The arguments, checked together; ends the program with status 2 if something is wrong."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.address is not None and arguments.target is not None:
        parser.error("give the service once: as TARGET, or by --target")
    arguments.target = arguments.address or arguments.target
    if arguments.rate is not None and arguments.concurrency is not None:
        parser.error("--rate and --concurrency are two ways to load a service; give one of them")
    if arguments.burstiness != 1 and arguments.rate is None:
        parser.error("--burstiness is of --rate")
    if arguments.prefixes > 1 and not arguments.prefix_tokens:
        parser.error("--prefixes needs --prefix-tokens")
    if arguments.trace is not None and (arguments.turns > 1 or arguments.prefix_tokens):
        parser.error("a --trace has its own prompts and conversations: leave --turns and --prefix-tokens out")
    if arguments.api == "openai":
        if arguments.vocab_size is None:
            parser.error(
                "--api openai needs --vocab-size: prompts are random token ids, and such a server tells no size"
            )
    elif arguments.endpoint is not None:
        parser.error("--endpoint is of --api openai")
    if arguments.num_requests is None and arguments.duration is None and arguments.trace is None:
        arguments.num_requests = _DEFAULT_REQUESTS
    try:
        options(arguments)
    except InvalidOption as error:
        parser.error(f"--set: {error}")
    return arguments


def arrivals(arguments: argparse.Namespace) -> Arrivals:
    """When conversations start."""
    if arguments.rate is not None:
        return OpenLoop(arguments.rate, arguments.burstiness)
    return ClosedLoop(arguments.concurrency or _DEFAULT_CONCURRENCY)


def options(arguments: argparse.Namespace) -> dict[str, object]:
    """What every request says besides its prompt and its length. Raises InvalidOption."""
    read = setting if arguments.api == "grpc" else _body_setting
    given = dict(map(read, arguments.settings))
    if mine := sorted(_OWN_OPTIONS & given.keys()):
        raise InvalidOption(mine[0], "each request has its own; see --output-tokens and --turns")
    return {**DEFAULT_OPTIONS, **given}


def _body_setting(text: str) -> tuple[str, object]:
    """A member of a JSON body from ``name=value``; ``name=`` leaves it out. Raises InvalidOption."""
    name, equals, written = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise InvalidOption(name or "name", "write it as name=value, such as temperature=0.7")
    try:
        return name, json.loads(written) if written else None
    except RecursionError:
        raise InvalidOption(name, "nested too deeply") from None
    except ValueError:
        return name, written


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        "bench",
        "Loads a running service, and tells how it bore it.",
        _EPILOG,
    )
    parser.add_argument("address", nargs="?", metavar="TARGET", help="the service, as --target")
    _add_api(parser.add_argument_group("how it is called"))
    _add_arrivals(parser.add_argument_group("when requests come"))
    _add_shape(parser.add_argument_group("what they ask"))
    _add_output(parser.add_argument_group("what is told"))
    add_connection_flags(parser, f"the service (default: {default_target()}, or of --api openai http://127.0.0.1:8000)")
    return parser


def _add_api(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--api",
        choices=("grpc", "openai"),
        default="grpc",
        help="penstock's own, or OpenAI's over HTTP (default: grpc)",
    )
    flags.add_argument("--model", metavar="NAME", help="what it must serve (default: what it does)")
    flags.add_argument(
        "--streams",
        type=_streams,
        default=1,
        metavar="N",
        help="Generate streams that share the requests, or per-request for a call each (default: 1)",
    )
    flags.add_argument(
        "--endpoint", metavar="PATH", help="of --api openai; /v1/chat/completions gets words (default: /v1/completions)"
    )
    flags.add_argument("--timeout-ms", type=_whole, metavar="MS", help="each request's deadline (default: none)")
    flags.add_argument(
        "--max-outstanding",
        type=_whole,
        default=MAX_OUTSTANDING,
        metavar="N",
        help=f"conversations on their way at a time; more are not sent, and counted (default: {MAX_OUTSTANDING})",
    )
    flags.add_argument(
        "--resend-context", action="store_true", help="later turns send all of the conversation again, over grpc too"
    )


def _add_arrivals(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--concurrency",
        type=_whole,
        metavar="N",
        help=f"closed loop: so many conversations at a time (default: {_DEFAULT_CONCURRENCY})",
    )
    flags.add_argument("--rate", type=_above_zero, metavar="R", help="open loop: so many a second, at random times")
    flags.add_argument(
        "--burstiness",
        type=_above_zero,
        default=1.0,
        metavar="B",
        help="shape of the times between: 1 is Poisson, less comes in bursts, more comes evenly (default: 1)",
    )
    flags.add_argument(
        "--trace", type=Path, metavar="FILE.jsonl", help="requests of a file, at its times unless told otherwise"
    )
    flags.add_argument(
        "--num-requests",
        type=_whole,
        metavar="N",
        help=f"how many, all --turns of conversations counted (default: {_DEFAULT_REQUESTS}, or as --duration says)",
    )
    flags.add_argument(
        "--duration", type=_above_zero, metavar="SECONDS", help="send nothing more after this; what runs is waited for"
    )
    flags.add_argument(
        "--warmup", type=_whole_or_zero, default=4, metavar="N", help="requests before, not counted (default: 4)"
    )


def _add_shape(flags: "argparse._ArgumentGroup") -> None:
    forms = "N, uniform:A-B, normal:MEAN,DEVIATION or lognormal:MEAN,DEVIATION"
    flags.add_argument(
        "--prompt-tokens",
        type=_told(parse_lengths),
        default=parse_lengths("512"),
        metavar="LENGTHS",
        help=f"of each turn: {forms} (default: 512)",
    )
    flags.add_argument(
        "--output-tokens",
        type=_told(parse_lengths),
        default=parse_lengths("128"),
        metavar="LENGTHS",
        help="of each turn (default: 128); stop tokens are passed over unless --set ignore_eos=false",
    )
    flags.add_argument(
        "--prefix-tokens", type=_whole, default=0, metavar="N", help="before the first turn, shared (default: none)"
    )
    flags.add_argument(
        "--prefixes", type=_whole, default=1, metavar="K", help="so many different prefixes (default: 1)"
    )
    flags.add_argument("--turns", type=_whole, default=1, metavar="N", help="requests of a conversation (default: 1)")
    flags.add_argument("--seed", default="0", metavar="SEED", help="what everything is drawn from (default: 0)")
    flags.add_argument(
        "--vocab-size", type=_whole, metavar="N", help="ids are below it (default: asked for; --api openai needs it)"
    )
    flags.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="NAME=VALUE",
        help="an option of every request, such as temperature=0.7, tenant=a, priority=1 (default: temperature=0 and "
        "repetition_penalty=1); "
        "of --api openai any member of the body, NAME= to leave one out; may be repeated",
    )


def _add_output(flags: "argparse._ArgumentGroup") -> None:
    flags.add_argument(
        "--slo",
        type=_told(Slo.parse),
        metavar="BOUNDS",
        help="count requests that keep them as goodput: ttft=500ms,itl=50ms,tpot=40ms,e2e=5s or some of these",
    )
    flags.add_argument("--json", metavar="FILE", help="all figures, and each request's times and tokens; - is stdout")
    flags.add_argument("--plot", type=Path, metavar="FILE.png", help="a picture of the distributions")


def _told(parse: Callable[[str], T]) -> Callable[[str], T]:
    """The same, for argparse, which keeps what a ValueError says to itself."""

    def read(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def _whole(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return int(text)


def _whole_or_zero(text: str) -> int:
    return 0 if text == "0" else _whole(text)


def _above_zero(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text}")
    return number


def _streams(text: str) -> int | None:
    return None if text == "per-request" else _whole(text)
