"""Attacks on a live service beside a well-behaved tenant at half load: what they cost, and what that tenant notices.

Each class has a service of its own: `penstock serve` with the demo model, keys, the HTTP gateway and the metrics' page.
The victim sends half of the requests that the service can answer, first undisturbed, then under attack. The attacker
is a process of its own, with the lowest priority, since it shares the cores. A class is as wanted if the victim's p99
is at most 1.5 times the undisturbed one or 20 ms above it, no process takes more than 256 MiB more, none is started
again, and no request is lost.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hostile_bench.attacks import ATTACKS
from hostile_bench.live_service import LiveService, MemoryWatch, live_service
from hostile_bench.victim import LONG_PROMPT, ByGrpc, ByHttp, Seen, Way, capacity, load

MAX_RATIO = 1.5
MAX_GROWTH_S = 0.020
MAX_MEMORY_BYTES = 256 << 20
AT_ONCE = 8
CAPACITY_S = 3.0
SETTLE_S = 1.0
MAX_END_S = 60.0
_MIB = 1 << 20


@dataclass(frozen=True)
class HostileClass:
    """A kind of attack, and the way of the victim that it is meant to hurt."""

    attack: str
    item: str
    """Of the issue that asked for the bound."""
    way: Callable[[LiveService], Way] = ByGrpc
    flags: Sequence[str] = ()
    max_open_files: int | None = None


def by_long_prompts(service: LiveService) -> Way:
    """The victim's prompts are long ones too."""
    return ByGrpc(service, LONG_PROMPT)


CLASSES = (
    HostileClass("constraint_choice", "1"),
    HostileClass("constraint_grammar", "1"),
    HostileClass("gateway_bodies", "2", ByHttp),
    HostileClass("tool_parser", "3", ByHttp),
    HostileClass("refused_prompts", "4", by_long_prompts),
    HostileClass("map_collisions", "5"),
    HostileClass("stalled_streams", "6", flags=("--kv-cache-memory-bytes=256M",)),
    HostileClass("heads", "7"),
    HostileClass("partial_messages", "8"),
    HostileClass("partial_messages_with_key", "8"),
    HostileClass("refused_tokenize", "9"),
    HostileClass("gateway_bodies_that_almost_end", "10", ByHttp),
    HostileClass("unread_answers", "10"),
    HostileClass("gateway_places", "12", ByHttp),
    HostileClass("idle_connections", "12", max_open_files=256),
    HostileClass("idle_metrics", "12"),
    HostileClass("bad_bytes", "13", ByHttp),
)


@dataclass(frozen=True)
class Outcome:
    """Of one class."""

    alone: Seen
    attacked: Seen
    cost: dict[str, Any]
    before_bytes: dict[str, int]
    """The most that each process took undisturbed."""
    peak_bytes: dict[str, int]
    num_lives: dict[str, int]

    def faults(self) -> list[str]:
        """What is not as wanted."""
        found = []
        for name, before, after in zip(_COLUMNS, self.alone.quantiles(), self.attacked.quantiles(), strict=True):
            if name.endswith("p99") and after > max(MAX_RATIO * before, before + MAX_GROWTH_S):
                found.append(f"{name} {before * 1e3:.0f} -> {after * 1e3:.0f} ms")
        for kind, peak in self.peak_bytes.items():
            if (growth := peak - self.before_bytes.get(kind, 0)) > MAX_MEMORY_BYTES:
                found.append(f"{kind} +{growth / _MIB:.0f} MiB")
        found += [f"{kind} started {number} times" for kind, number in self.num_lives.items() if number > 1]
        if self.attacked.lost:
            found.append(f"{len(self.attacked.lost)} requests lost ({self.attacked.lost[0]})")
        return found


_COLUMNS = ("first token p50", "first token p99", "between tokens p50", "between tokens p99")


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [each.attack for each in CLASSES]
    parser.add_argument("names", nargs="*", metavar="CLASS", help=f"which classes; default: all of {', '.join(names)}")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each phase (default: 10)")
    arguments = parser.parse_args(argv)
    if unknown := set(arguments.names) - set(names):
        parser.error(f"no class named {unknown.pop()}; there are: {', '.join(names)}")
    num_fine = num_run = 0
    print(f"{'':31}{'victim, undisturbed -> attacked: p50 and p99 in ms':>52}")
    print(f"{'class':27}{'item':>4}{'to first token':>28}{'between tokens':>28}  peak memory in MiB, +growth; attacker")
    for each in CLASSES:
        if arguments.names and each.attack not in arguments.names:
            continue
        outcome = measure(each, arguments.seconds)
        faults = outcome.faults()
        num_run, num_fine = num_run + 1, num_fine + (not faults)
        print(
            line(each, outcome),
            "     " + (f"NOT as wanted: {'; '.join(faults)}" if faults else "as wanted"),
            sep="\n",
            flush=True,
        )
    print(
        f"{num_fine} of {num_run} classes are as wanted: p99 at most {MAX_RATIO:g} times as long or "
        f"{MAX_GROWTH_S * 1e3:.0f} ms longer, +{MAX_MEMORY_BYTES // _MIB} MiB, nothing started again, nothing lost"
    )


def measure(each: HostileClass, seconds: float) -> Outcome:
    """Both phases, on a service of their own."""
    assert each.attack in ATTACKS
    with (
        tempfile.TemporaryDirectory() as directory,
        live_service(Path(directory), each.flags, each.max_open_files) as service,
    ):
        return asyncio.run(phases(each, service, seconds))


async def phases(each: HostileClass, service: LiveService, seconds: float) -> Outcome:
    """The victim alone, then under attack."""
    way = each.way(service)
    try:
        await way.times()
        rate = max(0.5, await capacity(way, AT_ONCE, CAPACITY_S) / 2)
        with MemoryWatch(service) as before:
            alone = await load(way, rate, seconds)
        told = {"grpc": service.grpc, "http": service.http, "metrics": service.metrics, "seconds": seconds + SETTLE_S}
        command = [
            "nice",
            "-n",
            "19",
            sys.executable,
            "-P",
            "-m",
            "hostile_bench.attacks",
            each.attack,
            json.dumps(told),
        ]
        with MemoryWatch(service) as during:
            attacker = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
            try:
                await asyncio.sleep(SETTLE_S)
                attacked = await load(way, rate, seconds)
                said, _ = await asyncio.wait_for(attacker.communicate(), MAX_END_S)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    attacker.kill()
    finally:
        await way.close()
    cost = json.loads(said) if said else {"cpu_s": 0.0, "num_calls": 0, "num_bytes": 0, "answers": {"failed": 1}}
    return Outcome(alone, attacked, cost, before.peak_bytes, during.peak_bytes, during.num_lives)


def line(each: HostileClass, outcome: Outcome) -> str:
    """The class's figures."""
    before, after = outcome.alone.quantiles(), outcome.attacked.quantiles()

    def pair(at: int) -> str:
        p50s, p99s = ((before[i] * 1e3, after[i] * 1e3) for i in (at, at + 1))
        return f"{p50s[0]:.0f} {p99s[0]:.0f} -> {p50s[1]:.0f} {p99s[1]:.0f}"

    memory = ", ".join(
        f"{kind} {peak / _MIB:.0f} ({(peak - outcome.before_bytes.get(kind, 0)) / _MIB:+.0f})"
        for kind, peak in outcome.peak_bytes.items()
    )
    cost = outcome.cost
    answers = ", ".join(f"{number} {answer}" for answer, number in cost["answers"].items())
    return (
        f"{each.attack:27.27}{each.item:>4}{pair(0):>28}{pair(2):>28}  {memory}; {cost['num_calls']} calls, "
        f"{cost['num_bytes'] / _MIB:.1f} MiB, {cost['cpu_s']:.1f} s of a core ({answers})"
    )


if __name__ == "__main__":
    main()
