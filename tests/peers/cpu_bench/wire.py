"""How the driver and a runner talk: a line of JSON each way, over the runner's stdin and stdout.

    runner  {"ready": {"version": ..., "pid": ..., "ready_s": ...}}     once
    driver  {"requests": [[[ids], num_output], ...]}                    any number of times
    runner  {"began": s, "ended": s, "events": [[[s, tokens], ...], ...], "extra": {...}}
    runner  {"failed": "why"}                                           and ends

Times are of the monotonic clock, which all processes share. The standard library alone: every engine's environment
imports this.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

Request = tuple[list[int], int]
"""Prompt's ids, and tokens of output."""


@dataclass
class Ready:
    """What a runner says of its engine once it would take requests."""

    version: str
    pid: int = field(default_factory=os.getpid)
    """Of the process whose memory counts, with its children."""
    ready_s: float | None = None
    """From start to ready, where the engine is a process of its own; else the driver takes the runner's time."""


@dataclass
class Ran:
    """One set of requests."""

    began: float
    ended: float
    events: list[list[tuple[float, int]]]
    """Of each request: when tokens came, and how many."""
    extra: dict[str, float] = field(default_factory=dict)


class Wire:
    """A runner's end. Takes stdout for itself: what the engine prints goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)

    def ready(self, ready: Ready) -> None:
        """Says that the engine takes requests."""
        self._tell({"ready": asdict(ready)})

    def answer(self, ran: Ran) -> None:
        """Tells what became of the last set."""
        self._tell(asdict(ran))

    def failed(self, why: str) -> None:
        """Tells why nothing more will come."""
        self._tell({"failed": why})

    def sets(self) -> Iterator[list[Request]]:
        """The sets to run, until the driver has no more."""
        for line in sys.stdin:
            yield [(ids, num_output) for ids, num_output in json.loads(line)["requests"]]

    def _tell(self, message: dict[str, object]) -> None:
        self._out.write(json.dumps(message) + "\n")
        self._out.flush()


def run_engine(program: Callable[[Wire, argparse.Namespace], None], **flags: object) -> None:
    """The main function of a runner: MODEL, --threads and those of ``flags`` (name, default), then ``program``."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, required=True)
    for name, default in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default)
    arguments = parser.parse_args()
    wire = Wire()
    try:
        program(wire, arguments)
    except Exception as error:
        traceback.print_exc()
        wire.failed(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        sys.exit(1)
