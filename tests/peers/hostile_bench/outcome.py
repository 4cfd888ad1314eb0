"""What a class of attacks did to the victim and the service, and whether that is as wanted."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from hostile_bench.classes import HostileClass
from hostile_bench.victim import Seen

MAX_RATIO = 1.5
MAX_GROWTH_MS = 20.0
MAX_MEMORY_BYTES = 256 << 20
MAX_LOG_BYTES = 64 << 10
"""The log has at most 10 lines a minute of each kind that a caller causes."""
_MIB = 1 << 20
_TIMES = {"first_token": "first token", "between_tokens": "between tokens"}


@dataclass
class Cost:
    """What the attacks cost the attacker, and their answers."""

    cpu_s: float = 0.0
    num_calls: int = 0
    num_bytes: int = 0
    answers: Counter[str] = field(default_factory=Counter)

    def add(self, said: dict[str, Any]) -> None:
        """Adds what an attacker's process printed."""
        self.cpu_s += said["cpu_s"]
        self.num_calls += said["num_calls"]
        self.num_bytes += said["num_bytes"]
        self.answers.update(said["answers"])


@dataclass
class Outcome:
    """Of one class."""

    alone: Seen = field(default_factory=Seen)
    """All undisturbed phases."""
    attacked: Seen = field(default_factory=Seen)
    phases: list[dict[str, Any]] = field(default_factory=list)
    """Each phase by itself, in order."""
    rate: float = 0.0
    """Of the victim's requests, per second."""
    cost: Cost = field(default_factory=Cost)
    before_bytes: dict[str, int] = field(default_factory=dict)
    """The peak memory of each kind of process before the first attack, and of all of them together."""
    peak_bytes: dict[str, int] = field(default_factory=dict)
    """The same from the first attack on."""
    log_bytes: int = 0
    """What the service logged from the first attack on."""
    restarted: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    """What kept the benchmark from measuring."""

    def faults(self, each: HostileClass) -> list[str]:
        """Returns what is not as wanted."""
        found = list(self.failures)
        answers = self.cost.answers
        if not self.failures and not any(answer.startswith(tuple(each.expects)) for answer in answers):
            found.append(f"the attack did not get through: expected an answer with {' or '.join(each.expects)}")
        alone, attacked = self.alone.as_json(), self.attacked.as_json()
        for name, words in _TIMES.items():
            before, after = alone[name]["p99_ms"], attacked[name]["p99_ms"]
            if before is None or after is None:
                found.append(f"no times were measured ({words})")
            elif after > max(MAX_RATIO * before, before + MAX_GROWTH_MS):
                found.append(f"{words}: p99 {before:.0f} -> {after:.0f} ms")
        if self.growth_bytes() > MAX_MEMORY_BYTES:
            found.append(f"memory: {self.growth_bytes() / _MIB:+.0f} MiB")
        if self.log_bytes > MAX_LOG_BYTES:
            found.append(f"log: {self.log_bytes >> 10} KiB")
        if self.restarted:
            found.append(f"restarted or ended: {', '.join(self.restarted)}")
        for seen, when in ((self.alone, "undisturbed"), (self.attacked, "under attack")):
            if seen.lost:
                found.append(f"lost {len(seen.lost)} requests {when} ({Counter(seen.lost).most_common(1)[0][0][:100]})")
        return found

    def growth_bytes(self) -> int:
        """Returns how much more all processes took together than undisturbed."""
        return self.peak_bytes.get("all", 0) - self.before_bytes.get("all", 0)

    def as_json(self, each: HostileClass) -> dict[str, Any]:
        """All figures."""
        faults = self.faults(each)
        return {
            "class": each.attack,
            "item": each.item,
            "as_wanted": not faults,
            "faults": faults,
            "attacker": {
                "cpu_s": self.cost.cpu_s,
                "num_calls": self.cost.num_calls,
                "num_bytes": self.cost.num_bytes,
                "answers": dict(self.cost.answers.most_common()),
            },
            "memory_bytes": {
                "undisturbed": self.before_bytes,
                "attacked": self.peak_bytes,
                "growth": self.growth_bytes(),
            },
            "victim": {
                "requests_per_second": self.rate,
                "undisturbed": self.alone.as_json(),
                "attacked": self.attacked.as_json(),
                "lost": dict(Counter(self.alone.lost + self.attacked.lost)),
                "phases": self.phases,
            },
            "log_bytes": self.log_bytes,
            "restarted": self.restarted,
        }

    def text(self, each: HostileClass) -> str:
        """The same figures as lines for people."""
        cost, faults = self.cost, self.faults(each)
        answers = ", ".join(f"{number} x {answer}" for answer, number in cost.answers.most_common()) or "none"
        kinds = ", ".join(
            f"{kind} {peak / _MIB:.0f} ({(peak - self.before_bytes.get(kind, 0)) / _MIB:+.0f})"
            for kind, peak in self.peak_bytes.items()
            if kind != "all"
        )
        before, peak = (found.get("all", 0) / _MIB for found in (self.before_bytes, self.peak_bytes))
        num_lost = len(self.alone.lost) + len(self.attacked.lost)
        rows = [
            f"{each.attack} (item {each.item}): {each.summary}",
            f"  {'NOT as wanted: ' + '; '.join(faults) if faults else 'as wanted'}",
            f"  attacker        {cost.num_calls} calls, {cost.num_bytes / _MIB:.1f} MiB, {cost.cpu_s:.1f} s of a core",
            f"  answers         {answers}",
            f"  memory in MiB   {before:.0f} undisturbed, {peak:.0f} at the peak ({peak - before:+.0f}): {kinds}",
        ]
        alone, attacked = self.alone.as_json(), self.attacked.as_json()
        rows += [f"  {words:<16}{_change(alone[name], attacked[name])}" for name, words in _TIMES.items()]
        rows.append(
            f"  {self.rate:.1f} requests/s of the victim, {num_lost} lost; "
            f"restarted: {', '.join(self.restarted) or 'nothing'}; log: {self.log_bytes / 1024:.1f} KiB"
        )
        return "\n".join(rows)


def _change(before: dict[str, float | int | None], after: dict[str, float | int | None]) -> str:
    def both(name: str) -> str:
        return " -> ".join("-" if value is None else f"{value:.1f}" for value in (before[name], after[name]))

    few = min(before["num_samples"] or 0, after["num_samples"] or 0) < 100
    return (
        f"p50 {both('p50_ms')} ms, p99 {both('p99_ms')} ms; {before['num_samples']} and {after['num_samples']} samples"
        + (" (few: p99 is about the maximum)" if few else "")
    )
