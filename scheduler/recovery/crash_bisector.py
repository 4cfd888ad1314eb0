"""Finds the request that crashes workers, by running the suspects in ever smaller groups. Plain data, without rows or
plans.

Every request in a fatal step is a suspect. At first all of them resume together, because most crashes happen once. If
the worker dies again, one of the requests in that step is the cause: they are split in two, one half goes on trial, the
other waits for its turn. A group that gets past the point where the worker died is cleared, and the next one goes on
trial. During a trial no other request runs, so only the group can be the cause of a crash. A trial takes about as long
as it takes to recompute the members' histories.

    {a b c d}  crash -> {a b} {c d}  crash -> {a} {b} {c d}  lives -> {b} {c d}  crash, crash -> b is convicted
"""

from collections.abc import Mapping
from dataclasses import dataclass

CRASHES_ALONE = 2
"""The number of crashes in which a request ran alone that convict it: a single one could be chance."""
MAX_PROBATION = 64
"""The maximum number of tokens that a suspect must generate to be cleared."""


@dataclass(slots=True)
class _Record:
    """A suspect's record."""

    must_reach: int = 0
    """The number of output tokens at which it is cleared."""
    num_cleared: int = 0
    num_alone: int = 0
    """The number of fatal steps with no other request."""


class CrashBisector:
    """Decides which requests may run after a step has crashed the worker."""

    def __init__(self) -> None:
        self.on_trial: frozenset[str] = frozenset()
        """The only requests that may run; empty without a trial."""
        self._groups: list[list[str]] = []
        """The first group is on trial. No request is in two groups."""
        self._passed: set[str] = set()
        """Requests of the group on trial that have generated enough tokens."""
        self._held: set[str] = set()
        """Requests that cannot run now."""
        self._postponed: set[str] = set()
        """The suspects among the held requests."""
        self._records: dict[str, _Record] = {}

    def __bool__(self) -> bool:
        """Whether there is a trial."""
        return bool(self._groups)

    def may_run(self, request_id: str) -> bool:
        return not self._groups or request_id in self.on_trial

    def crashed(self, step: Mapping[str, int]) -> list[str]:
        """Records that a step crashed the worker. ``step`` maps the requests in it to their numbers of output tokens.
        Returns the convicted requests, and drops them."""
        for request_id, num_tokens in step.items():
            record = self._records.setdefault(request_id, _Record())
            # Twice as many each time, for a request that crashes the worker only sometimes.
            record.must_reach = num_tokens + min(1 << record.num_cleared, MAX_PROBATION)
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
        """Records a step without a crash. ``step`` maps at least those of its requests that are on trial to their
        numbers of output tokens."""
        ran = self.on_trial.intersection(step)
        self._passed.update(
            request_id for request_id in ran if step[request_id] >= self._records[request_id].must_reach
        )
        # Members in no step cannot run beside the others, for lack of blocks or rows: they are next.
        if ran and ran <= self._passed:
            for request_id in self._passed:
                self._records[request_id].num_cleared += 1
            group, *rest = self._groups
            self._arrange([[request_id for request_id in group if request_id not in self._passed], *rest])

    def hold(self, request_id: str, held: bool) -> None:
        """Records that a request cannot run, or can again. No request waits for the trial of one that cannot run; it is
        tried alone later."""
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
        self._held.discard(request_id)
        self._postponed.discard(request_id)
        if self._records.pop(request_id, None) is not None:
            self._remove(request_id)

    def _remove(self, request_id: str) -> bool:
        """Returns whether it was in a group."""
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
