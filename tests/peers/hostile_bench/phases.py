"""The phases of a class: the victim alone and under attack, by turns."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from hostile_bench.classes import HostileClass
from hostile_bench.live_service import LiveService, MemoryWatch, live_service, restarts
from hostile_bench.outcome import Outcome
from hostile_bench.victim import Seen, Way, capacity, load

AT_ONCE = 8
CAPACITY_S = 2.0
SETTLE_S = 0.5
"""Between the beginning of an attack and the victim's phase, and between the attack's end and the next phase."""
MAX_END_S = 60.0
_LONG_S = 10.0

Say = Callable[[str], None]


async def measure(each: HostileClass, directory: Path, seconds: float, pairs: int, outcome: Outcome, say: Say) -> None:
    """Measures a class on a service of its own, and fills in ``outcome``."""
    with live_service(directory, each.flags, each.max_open_files) as service:
        way = each.way(service)
        try:
            await _measure(each, service, way, seconds, pairs, outcome, say)
        finally:
            await way.close()


async def _measure(
    each: HostileClass, service: LiveService, way: Way, seconds: float, pairs: int, outcome: Outcome, say: Say
) -> None:
    attack_s = max(seconds, each.attack_s)
    if each.attack_s > _LONG_S:
        pairs = 1
    for _ in range(2):  # the first request is slow, and the first seconds still are
        await way.times()
    outcome.rate = max(0.5, await capacity(way, AT_ONCE, CAPACITY_S) / 2)
    processes = service.processes()

    async def alone() -> None:
        say(f"  undisturbed, {seconds:g} s")
        seen = await load(way, outcome.rate, seconds)
        outcome.alone.join(seen)
        outcome.phases.append(_phase("undisturbed", seen))

    with MemoryWatch(service) as before:
        await alone()
    outcome.before_bytes = {"all": before.peak_total_bytes, **before.peak_bytes}
    log_bytes = service.log_bytes()
    with MemoryWatch(service) as during:
        for _ in range(pairs):
            say(f"  under attack, {attack_s:g} s")
            seen = await _attack(each, service, way, attack_s, outcome)
            outcome.attacked.join(seen)
            outcome.phases.append(_phase("attacked", seen))
            say(f"    answers: {dict(outcome.cost.answers.most_common(5))}")
            await asyncio.sleep(SETTLE_S)
            await alone()
    outcome.peak_bytes = {"all": during.peak_total_bytes, **during.peak_bytes}
    outcome.log_bytes = service.log_bytes() - log_bytes
    outcome.restarted = restarts(processes, service.processes())
    if service.process.poll() is not None:
        outcome.restarted.append("service")


def _phase(name: str, seen: Seen) -> dict[str, object]:
    return {"phase": name, **seen.as_json(), "num_lost": len(seen.lost)}


async def _attack(each: HostileClass, service: LiveService, way: Way, seconds: float, outcome: Outcome) -> Seen:
    """The victim's phase while an attacker runs."""
    told = {"grpc": service.grpc, "http": service.http, "metrics": service.metrics, "seconds": seconds + SETTLE_S}
    command = ["nice", "-n", "19", sys.executable, "-P", "-m", "hostile_bench.attacks", each.attack, json.dumps(told)]
    attacker = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert attacker.stdout is not None
    said, seen = b"", Seen()
    try:
        async with asyncio.timeout(MAX_END_S):
            await attacker.stdout.readline()  # ready
        await asyncio.sleep(SETTLE_S)
        seen = await load(way, outcome.rate, seconds)
        async with asyncio.timeout(MAX_END_S):
            said = await attacker.stdout.read()
            status = await attacker.wait()
        if status or not said:
            outcome.failures.append(f"the attacker failed with status {status}")
        else:
            outcome.cost.add(json.loads(said))
    except TimeoutError:
        outcome.failures.append(f"the attacker did not start or end within {MAX_END_S:.0f} s")
    finally:
        if attacker.returncode is None:
            attacker.kill()
            await attacker.wait()
    return seen
