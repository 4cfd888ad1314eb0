"""Stores responses, limited in age, number and bytes: per tenant and in total. In memory; knows no files and no HTTP.

A response that others continue outlives its own end, hidden: its items are part of their conversations.
"""

import heapq
import time
from collections.abc import Callable, Iterable, Iterator
from copy import copy

from penstock.clients.gateway.stored.stored_response import Content, StoredResponse
from penstock.clients.gateway.upstream.body_budget import TENANT_SHARE

MAX_PER_TENANT = 4096
MAX_IN_ALL = 16_384

Changes = dict[str, StoredResponse | None]
"""What changed since the last time, by id; None: removed."""


class StoreFull(Exception):
    """Raised if a response does not fit even if all others that may be removed are removed."""


class _TenantResponses:
    """One tenant's responses, the oldest first, hidden ones too."""

    def __init__(self) -> None:
        self.responses: dict[str, StoredResponse] = {}
        self.num_bytes = 0


class ResponseStore:
    """If there is no room for a response, the oldest ones of its tenant that have ended and that no other response
    continues are removed; if all tenants together take too much, those of the tenant with the most bytes."""

    def __init__(self, ttl_s: float, max_bytes: int, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds since 1970, which mean the same after a restart."""
        self._ttl_s = ttl_s
        self._max_bytes = max_bytes
        self.max_tenant_bytes = int(max_bytes * TENANT_SHARE)
        self._clock = clock
        self._by_id: dict[str, StoredResponse] = {}
        self._by_expiry: dict[str, StoredResponse] = {}
        """The responses that can expire, the first to expire first."""
        self._tenants: dict[str, _TenantResponses] = {}
        self.num_bytes = 0
        self._changes: Changes = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def load(self, responses: Iterable[StoredResponse]) -> None:
        """Adds the responses of a file, in the order in which they were stored. Drops what has expired, what no longer
        fits, and what continues a response that is missing."""
        latest = self._clock() + self._ttl_s
        for response in responses:
            if response.expires_at > latest:
                response.expires_at = latest
                self._changes[response.id] = response
            if response.previous_id and response.previous_id not in self._by_id:
                self._changes[response.id] = None
            else:
                self._insert(response)
        loaded = sorted(self._by_id.values(), key=lambda response: response.expires_at)
        self._by_expiry = {response.id: response for response in loaded if not response.is_hidden}
        for response in loaded:
            if response.is_hidden and not response.num_users and response.id in self._by_id:
                self._remove(response)
        self.expire()
        for tenant in list(self._tenants):
            self._make_room(tenant, 0, 0)

    def add(self, response: StoredResponse) -> None:
        """Stores a response; what it continues must be held. Raises StoreFull, and then does not store it."""
        self.expire()
        self._make_room(response.tenant, response.num_bytes, 1)
        self._insert(response)
        self._renew(response)
        self._changes[response.id] = response

    def end(self, response: StoredResponse, content: Content, *, may_exceed: bool = False) -> None:
        """Gives a live response, unless it was deleted, its final content; its time to live begins. Raises StoreFull,
        and then changes nothing. ``may_exceed``: stores it even if there is no room."""
        if self._by_id.get(response.id) is not response:
            return
        if not may_exceed:
            self._make_room(response.tenant, content.num_bytes - response.content.num_bytes, 0)
        self._count(response, -response.num_bytes)
        response.content = content
        response.is_live = False
        self._count(response, response.num_bytes)
        self._renew(response)
        self._changes[response.id] = response

    def find(self, response_id: str, tenant: str) -> StoredResponse | None:
        """Returns a response of this tenant; None if it is not, or no longer, stored, or belongs to another tenant."""
        found = self._by_id.get(response_id)
        if found is None or found.tenant != tenant or found.is_hidden or self._has_expired(found):
            return None
        return found

    def conversation(self, response: StoredResponse) -> list[StoredResponse]:
        """Returns a response and all that it continues, the oldest first."""
        turns = [response]
        while turns[-1].previous_id:
            turns.append(self._by_id[turns[-1].previous_id])
        return turns[::-1]

    def hold(self, response: StoredResponse) -> None:
        """Keeps the items of a response, whatever happens to it, until ``release``."""
        response.num_users += 1

    def release(self, response: StoredResponse) -> None:
        """Ends one ``hold``."""
        response.num_users -= 1
        if response.is_hidden and not response.num_users:
            self._remove(response)

    def delete(self, response: StoredResponse) -> None:
        """Ends a response's life: it is no longer found."""
        if self._by_id.get(response.id) is response and not response.is_hidden:
            self._remove(response)

    def expire(self) -> None:
        """Ends the life of responses that are too old."""
        while self._by_expiry and self._has_expired(first := next(iter(self._by_expiry.values()))):
            self._remove(first)

    def take_changes(self) -> Changes:
        """Returns what changed since the last time: copies, since a thread reads them while others go on here."""
        changes, self._changes = self._changes, {}
        return {id_: None if response is None else copy(response) for id_, response in changes.items()}

    def restore_changes(self, changes: Changes) -> None:
        """Takes back changes that could not be written, for the next time."""
        self._changes = changes | self._changes

    def _has_expired(self, response: StoredResponse) -> bool:
        return not response.is_live and self._clock() >= response.expires_at

    def _renew(self, response: StoredResponse) -> None:
        """Starts the response's time to live, once it has ended."""
        response.expires_at = self._clock() + self._ttl_s
        if not response.is_live:
            self._by_expiry[response.id] = response

    def _insert(self, response: StoredResponse) -> None:
        if response.previous_id:
            self.hold(self._by_id[response.previous_id])
        self._by_id[response.id] = response
        self._tenants.setdefault(response.tenant, _TenantResponses()).responses[response.id] = response
        self._count(response, response.num_bytes)

    def _count(self, response: StoredResponse, num_bytes: int) -> None:
        self._tenants[response.tenant].num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _remove(self, response: StoredResponse) -> StoredResponse | None:
        """Removes a response, and hidden ones that nothing else needs. Returns the one that these continued and that
        remains, if any. If others continue the response, hides it and keeps only its items."""
        self._by_expiry.pop(response.id, None)
        if response.num_users:
            before = response.num_bytes
            response.is_hidden = True
            response.content = Content(output=response.content.output)
            self._count(response, response.num_bytes - before)
            self._changes[response.id] = response
            return None
        while True:
            self._drop(response)
            if not response.previous_id:
                return None
            response = self._by_id[response.previous_id]
            response.num_users -= 1
            if response.num_users or not response.is_hidden:
                return response

    def _drop(self, response: StoredResponse) -> None:
        self._count(response, -response.num_bytes)
        del self._by_id[response.id]
        tenant = self._tenants[response.tenant]
        del tenant.responses[response.id]
        if not tenant.responses:
            del self._tenants[response.tenant]
        self._changes[response.id] = None

    def _make_room(self, tenant_name: str, num_bytes: int, num_more: int) -> None:
        """Evicts until so many more bytes and responses fit. Raises StoreFull."""
        if num_bytes > self.max_tenant_bytes:
            raise StoreFull
        if (tenant := self._tenants.get(tenant_name)) is not None:
            evictions = self._evictions(tenant)
            while self._is_over(tenant, num_bytes, num_more):
                if next(evictions, None) is None:
                    raise StoreFull
        if self._is_full(num_bytes, num_more):
            self._make_room_in_all(num_bytes, num_more)

    def _make_room_in_all(self, num_bytes: int, num_more: int) -> None:
        """Evicts from the tenant that has the most bytes at the time. Raises StoreFull."""
        largest_first = [(-tenant.num_bytes, at, tenant) for at, tenant in enumerate(self._tenants.values())]
        heapq.heapify(largest_first)
        evictions: dict[int, Iterator[StoredResponse]] = {}
        while self._is_full(num_bytes, num_more):
            if not largest_first:
                raise StoreFull
            _, at, tenant = heapq.heappop(largest_first)
            if at not in evictions:
                evictions[at] = self._evictions(tenant)
            if next(evictions[at], None) is not None:
                heapq.heappush(largest_first, (-tenant.num_bytes, at, tenant))

    def _is_over(self, tenant: _TenantResponses, num_bytes: int, num_more: int) -> bool:
        num_after = len(tenant.responses) + num_more
        return num_after > MAX_PER_TENANT or tenant.num_bytes + num_bytes > self.max_tenant_bytes

    def _is_full(self, num_bytes: int, num_more: int) -> bool:
        return len(self._by_id) + num_more > MAX_IN_ALL or self.num_bytes + num_bytes > self._max_bytes

    def _evictions(self, tenant: _TenantResponses) -> Iterator[StoredResponse]:
        """Removes one response with each step, the oldest that has ended and that no other continues, and yields it."""
        for each in list(tenant.responses.values()):
            response: StoredResponse | None = each
            while response is not None and response.id in tenant.responses:
                if response.num_users or response.is_live:
                    break
                # All that is older is still needed, except for what only this one continued.
                older = self._remove(response)
                yield response
                response = older
