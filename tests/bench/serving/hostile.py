"""Attacks on a live service beside a well-behaved tenant at half load: their cost, and what the tenant notices.

Each class has a service of its own: `penstock serve` with the demo model, API keys, the HTTP gateway and the metrics
page. The victim sends half of the requests that the service can answer. Undisturbed phases and attacks take turns, so
that other work on the machine shows in both. The attacker is a process with the lowest priority, since it shares the
cores.

A class is as wanted if the victim's p99 is at most 1.5 times the undisturbed one or 20 ms above it, all processes
together take at most 256 MiB more than before the first attack, the log grows by at most 64 KiB, no process is
restarted, no request is lost, and the attack got an answer that shows that it did what it is meant to do.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from hostile_bench.classes import CLASSES, HostileClass
from hostile_bench.outcome import MAX_GROWTH_MS, MAX_MEMORY_BYTES, MAX_RATIO, Outcome
from hostile_bench.phases import measure

_EPILOG = """\
examples:
  make bench ARGS=hostile                                          all classes, about 12 minutes on 2 cores
  make bench ARGS='hostile --classes heads,tool_parser'            two of them
  make bench ARGS='hostile --seconds 20 --json build/hostile.json' longer phases, and all figures as JSON
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the figures of each class."""
    arguments = _parse(argv)
    outcomes: list[tuple[HostileClass, Outcome]] = []
    began = time.monotonic()
    for number, each in enumerate(arguments.classes, 1):
        _say(f"[{number}/{len(arguments.classes)}, {time.monotonic() - began:.0f} s] {each.attack}: {each.summary}")
        outcome = _measure(each, arguments.seconds, arguments.pairs)
        outcomes.append((each, outcome))
        print(outcome.text(each), end="\n\n", flush=True)
        if arguments.json is not None:
            arguments.json.parent.mkdir(parents=True, exist_ok=True)
            arguments.json.write_text(json.dumps([outcome.as_json(each) for each, outcome in outcomes], indent=2))
    bad = [each.attack for each, outcome in outcomes if outcome.faults(each)]
    print(
        f"{len(outcomes) - len(bad)} of {len(outcomes)} classes are as wanted (p99 at most {MAX_RATIO:g} times as long "
        f"or {MAX_GROWTH_MS:.0f} ms longer, at most {MAX_MEMORY_BYTES >> 20} MiB more, nothing restarted, nothing lost)"
        + (f"; not: {', '.join(bad)}" if bad else "")
    )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = "\n".join(f"  {each.attack:27}{each.summary}" for each in CLASSES)
    parser = argparse.ArgumentParser(
        prog="make bench ARGS='hostile ...'",
        description=__doc__,
        epilog=f"classes:\n{names}\n\n{_EPILOG}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--classes", type=_classes, default=CLASSES, metavar="NAME,NAME", help="which classes to run (default: all)"
    )
    parser.add_argument(
        "--seconds",
        type=_positive,
        default=3.0,
        help="length of each phase; attacks whose limit acts later last longer (default: 3)",
    )
    parser.add_argument(
        "--pairs",
        type=int,
        choices=range(1, 11),
        default=2,
        metavar="1..10",
        help="attacks of each class, each between two undisturbed phases; long attacks come once (default: 2)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file, after each class")
    return parser.parse_args(argv)


def _classes(text: str) -> Sequence[HostileClass]:
    known = {each.attack: each for each in CLASSES}
    names = text.split(",")
    for name in names:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no class named {name!r}; there are: {', '.join(known)}")
    return [known[name] for name in names]


def _positive(text: str) -> float:
    try:
        if 0 < (value := float(text)) < 3600:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0 and below 3600")


def _measure(each: HostileClass, seconds: float, pairs: int) -> Outcome:
    """Measures a class; a failure becomes part of its outcome, so that the other classes are measured all the same."""
    outcome = Outcome()
    try:
        with tempfile.TemporaryDirectory() as directory:
            asyncio.run(measure(each, Path(directory), seconds, pairs, outcome, _say))
    except Exception as error:
        outcome.failures.append(f"{type(error).__name__}: {error}")
    return outcome


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
