"""The live requests of another engine's contract, by the ids that callers gave them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class LiveCalls:
    """Ends requests by their ids. Only the tenant of a request can end it."""

    def __init__(self) -> None:
        self._aborts: dict[str, dict[str, list[Callable[[], None]]]] = {}
        """What ends each request, by tenant and id. Several live requests may have the same id."""

    @contextmanager
    def registered(self, tenant: str, request_id: str, abort: Callable[[], None]) -> Iterator[None]:
        """Registers a request, which ``abort`` ends, for the duration of the context."""
        own = self._aborts.setdefault(tenant, {})
        aborts = own.setdefault(request_id, [])
        aborts.append(abort)
        try:
            yield
        finally:
            aborts.remove(abort)
            if not aborts:
                del own[request_id]
            if not own:
                del self._aborts[tenant]

    def abort(self, tenant: str, request_id: str) -> int:
        """Ends the tenant's requests with this id. Returns their number."""
        return _abort_each(list(self._aborts.get(tenant, {}).get(request_id, ())))

    def abort_all(self, tenant: str) -> int:
        """Ends all of the tenant's requests. Returns their number."""
        return _abort_each([abort for aborts in self._aborts.get(tenant, {}).values() for abort in aborts])


def _abort_each(aborts: list[Callable[[], None]]) -> int:
    for abort in aborts:
        abort()
    return len(aborts)
