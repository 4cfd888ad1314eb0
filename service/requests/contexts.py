"""Stores the contexts of ended requests, for requests that continue them.

A context has the request's tokens and the hashes of their blocks. Knows neither the KV cache nor tokenizers: if the
blocks are no longer in the KV cache, the tokens are computed again.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

from penstock.scheduler.request import Context
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.return_times import ReturnTimes

HASH_BYTES = 32
FULL_TENANTS = 16
"""The limit on the tokens of all tenants together, as a multiple of one tenant's limit."""
MAX_PER_TENANT = 16_384
MAX_IN_ALL = 65_536
"""The maximum number of contexts, even short ones: each takes about 1 KB, and 6 bytes per token."""


@dataclass(slots=True, eq=False)
class StoredContext:
    """One context, packed."""

    tenant: str
    token_ids: "array[int]"
    hashes: bytes
    """The concatenated hashes of its first full blocks."""
    since: float
    adapter: bytes = b""
    """The digest of the LoRA adapter that its KV was computed with; empty: none."""
    was_continued: bool = False

    def unpacked(self, adapter: bytes = b"") -> Context:
        """Returns the context for a request with the LoRA adapter that has this digest. That of another adapter has
        hashes of other blocks, so they are left out."""
        if adapter != self.adapter:
            return Context(self.token_ids.tolist(), [])
        hashes = [self.hashes[at : at + HASH_BYTES] for at in range(0, len(self.hashes), HASH_BYTES)]
        return Context(self.token_ids.tolist(), hashes)


class TenantContexts:
    """One tenant's contexts, in the order of their eviction: first those that are unlikely to be continued, then the
    others; the least recently used first in each group."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self._ordinary: OrderedDict[str, StoredContext] = OrderedDict()
        self._wanted: OrderedDict[str, StoredContext] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ordinary) + len(self._wanted)

    def put(self, request_id: str, kept: StoredContext, wanted: bool) -> None:
        (self._wanted if wanted else self._ordinary)[request_id] = kept
        self.num_tokens += len(kept.token_ids)

    def values(self) -> Iterator[StoredContext]:
        return chain(self._ordinary.values(), self._wanted.values())

    def touch(self, request_id: str) -> None:
        self._group(request_id).move_to_end(request_id)

    def supersede(self, request_id: str) -> None:
        """Makes a context that another one continues unlikely to be needed: only a branch would need it."""
        if request_id in self._wanted:
            self._ordinary[request_id] = self._wanted.pop(request_id)

    def remove(self, request_id: str) -> None:
        self.num_tokens -= len(self._group(request_id).pop(request_id).token_ids)

    def first(self) -> str:
        """Returns the request id of the next context to evict."""
        return next(iter(self._ordinary or self._wanted))

    def _group(self, request_id: str) -> OrderedDict[str, StoredContext]:
        return self._wanted if request_id in self._wanted else self._ordinary


class ContextStore:
    """Stores all tenants' contexts. Limits their age, and their tokens and number per tenant and in total, so that
    memory use is bounded."""

    def __init__(self, ttl_s: float, tokens_per_tenant: int, clock: Callable[[], float] = time.monotonic) -> None:
        """If either limit is 0, nothing is stored."""
        self.ttl_s = ttl_s
        self._tokens_per_tenant = tokens_per_tenant
        self._clock = clock
        self._by_age: OrderedDict[str, StoredContext] = OrderedDict()
        """All contexts by request id, the oldest first."""
        self._tenants: OrderedDict[str, TenantContexts] = OrderedDict()
        """The contexts by tenant, without empty groups; the least recently active tenant first."""
        self.num_tokens = 0
        self.return_times = ReturnTimes(clock)

    def __len__(self) -> int:
        return len(self._by_age)

    def keep(
        self, request_id: str, tenant: str, context: Context, *, wanted: bool, continues: str = "", adapter: bytes = b""
    ) -> bool:
        """Stores a request's context; returns whether it was stored. ``wanted``: whether the request set a time to
        retain it. ``continues`` is the id of the request that it continued, and ``adapter`` the digest of its LoRA
        adapter."""
        self._expire()
        num_tokens = len(context.token_ids)
        if num_tokens > self._tokens_per_tenant or self.ttl_s <= 0:
            return False
        if continues and tenant in self._tenants:
            self._tenants[tenant].supersede(continues)
        self._make_room(tenant, num_tokens)
        token_ids, hashes = array("I", context.token_ids), b"".join(context.block_hashes)
        kept = StoredContext(tenant, token_ids, hashes, self._clock(), adapter)
        self._tenants.setdefault(tenant, TenantContexts()).put(request_id, kept, wanted)
        self._tenants.move_to_end(tenant)
        self._by_age[request_id] = kept
        self.num_tokens += num_tokens
        return True

    def find(self, request_id: str, tenant: str) -> StoredContext | None:
        """Returns the context of a request of this tenant; None if it is not, or no longer, stored, or belongs to
        another tenant."""
        self._expire()
        kept = self._by_age.get(request_id)
        if kept is None or kept.tenant != tenant:
            return None
        self._tenants[tenant].touch(request_id)
        self._tenants.move_to_end(tenant)
        if not kept.was_continued:
            kept.was_continued = True
            self.return_times.add_return(tenant, self._clock() - kept.since)
        return kept

    def existing(self, request_id: str, tenant: str) -> StoredContext:
        """Returns the context that a request continues. Raises ServiceError CONTEXT_NOT_FOUND where ``find`` returns
        None."""
        kept = self.find(request_id, tenant)
        if kept is None:
            raise ServiceError(Reason.CONTEXT_NOT_FOUND, field="continue_from")
        return kept

    def release(self, request_id: str, tenant: str) -> list[bytes] | None:
        """Drops a context of this tenant. Returns the hashes of its blocks that no other context of the tenant has;
        None if there is no such context."""
        self._expire()
        kept = self._by_age.get(request_id)
        if kept is None or kept.tenant != tenant:
            return None
        self._drop(request_id)
        first = kept.hashes[:HASH_BYTES]
        others = self._tenants[tenant].values() if first and tenant in self._tenants else ()
        sharing = (other.hashes for other in others if other.hashes.startswith(first))
        num_shared = max((_num_common(kept.hashes, hashes) for hashes in sharing), default=0)
        hashes = kept.hashes
        return [hashes[at : at + HASH_BYTES] for at in range(num_shared * HASH_BYTES, len(hashes), HASH_BYTES)]

    def _expire(self) -> None:
        oldest = self._clock() - self.ttl_s
        while self._by_age and self._by_age[request_id := next(iter(self._by_age))].since <= oldest:
            self._drop(request_id)

    def _make_room(self, tenant: str, num_tokens: int) -> None:
        while (tenant_contexts := self._tenants.get(tenant)) is not None and (
            len(tenant_contexts) >= MAX_PER_TENANT or tenant_contexts.num_tokens + num_tokens > self._tokens_per_tenant
        ):
            self._drop(tenant_contexts.first())
        limit = FULL_TENANTS * self._tokens_per_tenant
        while len(self) >= MAX_IN_ALL or self.num_tokens + num_tokens > limit:
            self._drop(next(iter(self._tenants.values())).first())

    def _drop(self, request_id: str) -> None:
        kept = self._by_age.pop(request_id)
        tenant_contexts = self._tenants[kept.tenant]
        tenant_contexts.remove(request_id)
        self.num_tokens -= len(kept.token_ids)
        if not tenant_contexts:
            del self._tenants[kept.tenant]


def _num_common(first: bytes, second: bytes) -> int:
    """Returns how many hashes at the beginning of two contexts are the same: each hash covers all tokens before it, so
    once they differ, all that follow do."""
    low, high = 0, min(len(first), len(second)) // HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * HASH_BYTES, middle * HASH_BYTES)
        low, high = (middle, high) if first[at] == second[at] else (low, middle - 1)
    return low
