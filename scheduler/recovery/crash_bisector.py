"""Finds which request kills workers, by running those that may have done it in ever smaller groups. Plain data;
knows no rows and no plans.

Whoever was in a fatal step is a suspect. At first all of them resume together, since most crashes happen once. If the
worker dies again, one of those who were in that step did it: they are cut in half, one half goes on trial, the other
waits for its turn. A group that lives past where its members were when they died is cleared, and the next one goes on
trial. While a trial goes on nobody else runs, so that each crash can be held against the group alone; it takes about as
long as to compute the members' histories again.

    {a b c d}  crash -> {a b} {c d}  crash -> {a} {b} {c d}  lives -> {b} {c d}  crash, crash -> b is convicted
"""

from collections.abc import Mapping
from dataclasses import dataclass

CRASHES_ALONE = 2
"""That convict a request: one could be chance."""
MAX_PROBATION = 64
"""Tokens that a suspect must live on for, at most."""


@dataclass(slots=True)
class _Record:
    """What is held against a request."""

    must_reach: int = 0
    """The number of its output tokens at which it is cleared."""
    num_cleared: int = 0
    num_alone: int = 0
    """Fatal steps that it was in alone."""

    @property
    def probation(self) -> int:
        """Tokens to live on for: twice as many each time, for one that kills only now and then."""
        return min(1 << self.num_cleared, MAX_PROBATION)


class CrashBisector:
    """Who may run after a crash that a step is to blame for."""

    def __init__(self) -> None:
        self.on_trial: frozenset[str] = frozenset()
        """The only ones that may run; empty where nobody is on trial."""
        self._groups: list[list[str]] = []
        """The first is on trial; no request is in two."""
        self._passed: set[str] = set()
        """Of the group on trial, those who have lived on for long enough."""
        self._held: set[str] = set()
        """Requests that cannot run now."""
        self._postponed: set[str] = set()
        """Suspects among them."""
        self._records: dict[str, _Record] = {}

    def __bool__(self) -> bool:
        """Whether anybody is on trial."""
        return bool(self._groups)

    def may_run(self, request_id: str) -> bool:
        """Whether a request may be in the next step."""
        return not self._groups or request_id in self.on_trial

    def crashed(self, step: Mapping[str, int]) -> list[str]:
        """A step killed the worker: ``step`` has the requests in it, and how many tokens each had put out. Returns
        those who are convicted, and forgets them."""
        for request_id, num_tokens in step.items():
            record = self._records.setdefault(request_id, _Record())
            record.must_reach = num_tokens + record.probation
        if len(step) == 1 and self._is_convicted(next(iter(step))):
            return list(step)
        self._passed.clear()
        group = self._groups[0] if self._groups else []
        guilty = [request_id for request_id in group if request_id in step]
        if guilty:
            half = -(-len(guilty) // 2)
            others = [request_id for request_id in group if request_id not in step]
            self._arrange([guilty[:half], guilty[half:], *self._groups[1:], others])
        else:
            rest = [[request_id for request_id in group if request_id not in step] for group in self._groups]
            self._postponed |= self._held.intersection(step)
            self._arrange([[request_id for request_id in step if request_id not in self._held], *rest])
        return []

    def _is_convicted(self, request_id: str) -> bool:
        record = self._records[request_id]
        record.num_alone += 1
        if record.num_alone < CRASHES_ALONE:
            return False
        self.drop_request(request_id)
        return True

    def answered(self, step: Mapping[str, int]) -> None:
        """A step went well: ``step`` has the requests in it, those on trial at least, and how many tokens each has put
        out now."""
        ran = self.on_trial.intersection(step)
        self._passed.update(
            request_id for request_id in ran if step[request_id] >= self._records[request_id].must_reach
        )
        # Members that are in no step cannot run beside the others, for want of blocks or rows: they are next.
        if ran and ran <= self._passed:
            for request_id in self._passed:
                self._records[request_id].num_cleared += 1
            group, *rest = self._groups
            self._arrange([[request_id for request_id in group if request_id not in self._passed], *rest])

    def hold(self, request_id: str, held: bool) -> None:
        """A request cannot run, or can again. Nobody waits for the trial of one that cannot: it is tried alone then."""
        if held:
            self._held.add(request_id)
            if self._remove(request_id):
                self._postponed.add(request_id)
        else:
            self._held.discard(request_id)
            if request_id in self._postponed:
                self._postponed.discard(request_id)
                self._arrange([*self._groups, [request_id]])

    def drop_request(self, request_id: str) -> None:
        """The request has ended."""
        self._held.discard(request_id)
        self._postponed.discard(request_id)
        if self._records.pop(request_id, None) is not None:
            self._remove(request_id)

    def _remove(self, request_id: str) -> bool:
        """Whether it was in a group."""
        for group in self._groups:
            if request_id in group:
                group.remove(request_id)
                self._arrange(self._groups)
                return True
        return False

    def _arrange(self, groups: list[list[str]]) -> None:
        self._groups = [group for group in groups if group]
        self.on_trial = frozenset(self._groups[0] if self._groups else ())
        self._passed &= self.on_trial
