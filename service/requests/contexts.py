"""The contexts of requests that ended, for requests that continue them.

Knows neither KV nor tokenizers: what it keeps are tokens and the names of their blocks. Whether their KV is still there
is the cache's business; without it the tokens are computed again.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from penstock.scheduler.request import Context

HASH_BYTES = 32
FULL_TENANTS = 16
"""The bound on all tenants together, in those that are at their own."""
MAX_PER_TENANT = 16_384
MAX_IN_ALL = 65_536
"""Contexts, however short: each takes about 1 KB besides its tokens, and a token 6 bytes."""


@dataclass(slots=True, eq=False)
class StoredContext:
    """One context, packed."""

    tenant: str
    token_ids: "array[int]"
    hashes: bytes
    """Of its first full blocks, one after another."""
    since: float

    def unpacked(self) -> Context:
        """As the request left it."""
        hashes = [self.hashes[at : at + HASH_BYTES] for at in range(0, len(self.hashes), HASH_BYTES)]
        return Context(self.token_ids.tolist(), hashes)


class TenantContexts:
    """One tenant's contexts, in the order in which they go when there are too many: first those that nobody is
    expected to continue, then the others; in each group the least recently used goes first."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._ordinary: OrderedDict[str, StoredContext] = OrderedDict()
        self._wanted: OrderedDict[str, StoredContext] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._wanted)

    def put(self, request_id: str, kept: StoredContext, wanted: bool) -> None:
        """Adds a context."""
        (self._wanted if wanted else self._ordinary)[request_id] = kept
        self.num_tokens += len(kept.token_ids)

    def touch(self, request_id: str) -> None:
        """The context is used now."""
        group = self._wanted if request_id in self._wanted else self._ordinary
        group.move_to_end(request_id)

    def supersede(self, request_id: str) -> None:
        """Another context goes on where this one ends: from now on it takes a branch to need it."""
        kept = self._wanted.pop(request_id, None)
        if kept is not None:
            self._ordinary[request_id] = kept

    def remove(self, request_id: str) -> None:
        """It was here."""
        group = self._wanted if request_id in self._wanted else self._ordinary
        self.num_tokens -= len(group.pop(request_id).token_ids)

    def first(self) -> str:
        """Which one goes next."""
        return next(iter(self._ordinary or self._wanted))


class ContextStore:
    """Bounded in time, and in tokens and contexts for each tenant and for all of them: memory stays constant."""

    def __init__(self, ttl_s: float, tokens_per_tenant: int, clock: Callable[[], float] = time.monotonic) -> None:
        """With either of the two at 0, nothing is kept."""
        self.ttl_s = ttl_s
        self._tokens_per_tenant = tokens_per_tenant
        self._clock = clock
        self._by_age: OrderedDict[str, StoredContext] = OrderedDict()
        """All of them, by their requests' ids; the oldest first."""
        self._shelves: OrderedDict[str, TenantContexts] = OrderedDict()
        """By tenant, without empty ones; the one that was quiet for longest first."""
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._by_age)

    def keep(self, request_id: str, tenant: str, context: Context, *, wanted: bool, continues: str = "") -> bool:
        """Keeps what a request left behind; returns whether ``find`` may be asked for it from now on.

        ``wanted`` says that somebody asked for it to be kept. ``continues``: the request whose context it began with.
        """
        self._expire()
        num_tokens = len(context.token_ids)
        if num_tokens > self._tokens_per_tenant or self.ttl_s <= 0:
            return False
        if continues and tenant in self._shelves:
            self._shelves[tenant].supersede(continues)
        self._make_room(tenant, num_tokens)
        kept = StoredContext(tenant, array("I", context.token_ids), b"".join(context.block_hashes), self._clock())
        self._shelves.setdefault(tenant, TenantContexts()).put(request_id, kept, wanted)
        self._shelves.move_to_end(tenant)
        self._by_age[request_id] = kept
        self.num_tokens += num_tokens
        return True

    def find(self, request_id: str, tenant: str) -> StoredContext | None:
        """The context of a request of this tenant; None if it is not, or no longer, here. Another tenant's is as if it
        were not."""
        self._expire()
        kept = self._by_age.get(request_id)
        if kept is None or kept.tenant != tenant:
            return None
        self._shelves[tenant].touch(request_id)
        self._shelves.move_to_end(tenant)
        return kept

    def _expire(self) -> None:
        oldest = self._clock() - self.ttl_s
        while self._by_age and self._by_age[request_id := next(iter(self._by_age))].since <= oldest:
            self._drop(request_id)

    def _make_room(self, tenant: str, num_tokens: int) -> None:
        while (shelf := self._shelves.get(tenant)) is not None and (
            len(shelf) >= MAX_PER_TENANT or shelf.num_tokens + num_tokens > self._tokens_per_tenant
        ):
            self._drop(shelf.first())
        limit = FULL_TENANTS * self._tokens_per_tenant
        while len(self) >= MAX_IN_ALL or self.num_tokens + num_tokens > limit:
            self._drop(next(iter(self._shelves.values())).first())

    def _drop(self, request_id: str) -> None:
        kept = self._by_age.pop(request_id)
        shelf = self._shelves[kept.tenant]
        shelf.remove(request_id)
        self.num_tokens -= len(kept.token_ids)
        if not shelf:
            del self._shelves[kept.tenant]
