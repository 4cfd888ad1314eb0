"""Limits the memory that a worker needs for the grammars of live requests. It knows their texts only by length.

The factors are measured. Compiled, JSON schemas take 39 bytes per byte and choices 53; a long literal in a regular
expression takes 280 to 400, which the budget accepts so that it does not refuse ordinary schemas. A row takes up to 14
more, since the library follows forced text in advance.
"""

from collections import Counter
from dataclasses import dataclass, field

from penstock.scheduler.config import RETRY_AFTER_MS
from penstock.scheduler.request import RefusalKind, Refused, Request

MAX_BYTES = 256 << 20
"""The limit for all tenants. Each may have as much as the others leave, divided by two."""
SMALL_BYTES = 4 << 10
"""Grammars up to this length do not count."""
_COMPILED, _ROW = 60, 14
"""Bytes per byte of a grammar's text: once for all rows of a tenant that use it, and for each of them."""


@dataclass(slots=True)
class _Tenant:
    live: Counter[str] = field(default_factory=Counter)
    """The number of live requests by grammar."""
    num_bytes: int = 0


class GrammarBudget:
    """The memory of live requests' grammars, by tenant."""

    def __init__(self) -> None:
        self._tenants: dict[str, _Tenant] = {}
        self._total = 0

    def check(self, request: Request) -> None:
        """Raises Refused if the request's grammar needs more memory than its tenant may have."""
        own = self._tenants.get(request.tenant, _Tenant())
        new = self._bytes(request, own.live)
        most = (MAX_BYTES - (self._total - own.num_bytes)) // 2
        if not new or own.num_bytes + new <= most:
            return
        size = f"{len(request.grammar):,} bytes"
        if new > MAX_BYTES // 2:
            message = f"a constraint of {size} in {request.n} sequences needs too much memory; shorten it, or lower n"
            raise Refused(RefusalKind.TOO_LARGE, message)
        raise Refused(RefusalKind.QUEUE_FULL, f"large constraints in use; there is no room for {size}", RETRY_AFTER_MS)

    def count(self, request: Request, sign: int) -> None:
        """Counts a live request, or with ``sign`` -1 one that has ended."""
        if len(request.grammar) <= SMALL_BYTES:
            return
        own = self._tenants.setdefault(request.tenant, _Tenant())
        if sign < 0:
            own.live[request.grammar] -= 1
        change = sign * self._bytes(request, own.live)
        if sign > 0:
            own.live[request.grammar] += 1
        own.live = +own.live
        own.num_bytes += change
        self._total += change
        if not own.live:
            del self._tenants[request.tenant]

    def _bytes(self, request: Request, live: Counter[str]) -> int:
        """Returns what a request's grammar takes beside those of the live ones."""
        length = len(request.grammar)
        if length <= SMALL_BYTES:
            return 0
        return length * (_ROW * request.n + (0 if live[request.grammar] else _COMPILED))
