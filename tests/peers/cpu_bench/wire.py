"""How the driver and a runner talk: a line of JSON each way, over the runner's stdin and stdout.

    runner  {"ready": {"version": ..., "pid": ..., "ready_s": ...}}     once
    driver  {"requests": [[[ids], num_output], ...], "arrivals_s": [s, ...], "turns": n, "pause_s": s}     repeatedly
    runner  {"began": s, "ended": s, "events": [[[s, tokens], ...], ...], "extra": {...}, "arrivals": [s, ...]}
    runner  {"failed": "why"} or {"unsupported": "why"}                 and ends

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
class Work:
    """A set of requests, and when each of them is sent."""

    requests: list[Request]
    arrivals_s: list[float] = field(default_factory=list)
    """When each request or conversation arrives, in seconds from the beginning; empty: all at once."""
    turns: int = 1
    """Requests that form a conversation; they follow one another in ``requests``. The prompt of a turn is the whole
    history, outputs included, and then the ids of its request."""
    pause_s: float = 0.0
    """Seconds from the end of a turn to the arrival of the next one."""


class Unsupported(Exception):
    """This machine cannot run the engine, by the engine's own rules. The text says which."""


@dataclass
class Ready:
    """What a runner says of its engine once it would take requests."""

    version: str
    """The engine's name, its version, and whatever else tells how it was built or runs."""
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
    arrivals: list[float] = field(default_factory=list)
    """When each request arrived; empty: all when the run began."""

    def arrival_of(self, number: int) -> float:
        """When the request of this number arrived."""
        return self.arrivals[number] if self.arrivals else self.began


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

    def unsupported(self, why: str) -> None:
        """Reports that the engine does not run on this machine."""
        self._tell({"unsupported": why})

    def sets(self) -> Iterator[Work]:
        """The sets to run, until the driver has no more."""
        for line in sys.stdin:
            work = Work(**json.loads(line))
            work.requests = [(ids, num_output) for ids, num_output in work.requests]
            yield work

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
    except Unsupported as error:
        wire.unsupported(str(error))
        sys.exit(1)
    except Exception as error:
        traceback.print_exc()
        wire.failed(" ".join(f"{type(error).__name__}: {error}".split())[:300])
        sys.exit(1)
