"""The streams between gateway and service, one for each tenant, and the keys that share them."""

import asyncio
import copy
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Protocol

from penstock.clients.channel import call_metadata
from penstock.clients.errors import RequestFailed
from penstock.clients.stream import GenerateStream, Receiver
from penstock.v1 import generation_pb2 as pb
from penstock.v1.model_pb2 import GetModelResponse

MAX_KEYS_OF_TENANT = 256
"""The limit of remembered keys per tenant. Other keys are checked again with their next request."""

Metadata = tuple[tuple[str, str], ...]
PlaceName = tuple[str, bool]
"""A tenant, and whether it may act for others."""


class Running(Protocol):
    """The requests of one caller."""

    def fail(self, failure: RequestFailed) -> None:
        """Ends the requests."""


class Identity:
    """A key, the tenant that its requests name, and the service's response for the two. Only the metadata has the key
    itself."""

    def __init__(self, name: bytes, key: str | None, tenant: str) -> None:
        """``name`` is a hash of the two; ``tenant`` is empty if none is named."""
        self.name = name
        self.tenant = tenant
        self.metadata = call_metadata(key)
        self.model = GetModelResponse()
        """The service's response to the last check."""
        self.place: SharedStream | None = None
        self.running: set[Running] = set()
        """The callers whose requests run under the key."""
        self.checked_at = -1e9
        self._check: asyncio.Task[None] | None = None

    async def check(self, fetch: Callable[["Identity"], Awaitable[GetModelResponse]]) -> None:
        """Requests the service's model under this key, once for all waiting callers. Raises RequestFailed."""
        if self._check is None:
            self._check = asyncio.create_task(self._fetch_model(fetch), name="penstock-gateway-check")
            self._check.add_done_callback(_see)
        try:
            await asyncio.shield(self._check)
        except RequestFailed as failure:
            raise copy.copy(failure) from None  # each is raised in a different task

    def withdraw(self, failure: RequestFailed) -> None:
        """Ends the requests under the key, since the service no longer accepts it."""
        for running in list(self.running):
            running.fail(failure)

    async def _fetch_model(self, fetch: Callable[["Identity"], Awaitable[GetModelResponse]]) -> None:
        try:
            self.model = await fetch(self)
            self.checked_at = time.monotonic()
        finally:
            self._check = None


class SharedStream:
    """One stream, which the keys of one tenant share: the service treats all of them alike."""

    def __init__(
        self,
        of: PlaceName,
        open_stream: Callable[[Metadata], GenerateStream],
        on_end: Callable[["SharedStream"], None],
    ) -> None:
        """``on_end`` is called when one of its requests has ended."""
        self.of = of
        self._on_end = on_end
        self.identities: OrderedDict[bytes, Identity] = OrderedDict()
        """The remembered identities; the most recently used one is last."""
        self.num_live = 0
        self.is_left = False
        """Whether it accepts no new requests. Requests whose bodies are still arriving may still use it."""
        self.last_used = 0.0
        self._opened_with: Metadata | None = None
        self._open_stream = open_stream
        self._stream: GenerateStream | None = None

    @property
    def is_broken(self) -> bool:
        """Whether the stream was open and has broken."""
        return self._stream is not None and not self._stream.is_open

    def was_opened_with(self, identity: Identity) -> bool:
        """Whether the stream was opened with this key, or is not open yet."""
        return self._opened_with in (None, identity.metadata)

    def carry(self, identity: Identity, start: pb.Start, receiver: Receiver) -> Callable[[], None]:
        """Sends a request on the stream, or on a new one in place of a broken one; returns a function that cancels it.
        Each ``carry`` needs one ``done``."""
        if self._stream is None or not self._stream.is_open:
            self._stream, self._opened_with = self._open_stream(identity.metadata), identity.metadata
        stream, ref = self._stream, self._stream.carry(start, receiver)
        self.num_live += 1
        return lambda: stream.cancel(ref)

    def done(self) -> None:
        """Notes that a carried request has ended."""
        self.num_live -= 1
        self.last_used = time.monotonic()
        self._on_end(self)

    def take_stream(self) -> GenerateStream | None:
        """Removes and returns the stream."""
        stream, self._stream = self._stream, None
        return stream

    def remember(self, identity: Identity) -> Identity | None:
        """Remembers a key; returns one that is dropped for it, if any."""
        if identity.place is not None and identity.place is not self:  # its rights have changed
            identity.place.identities.pop(identity.name, None)
        self.identities[identity.name] = identity
        self.identities.move_to_end(identity.name)
        identity.place = self
        if len(self.identities) <= MAX_KEYS_OF_TENANT:
            return None
        idle = next((each for each in self.identities.values() if not each.running), identity)
        return self.identities.pop(idle.name)


def _see(check: "asyncio.Task[None]") -> None:
    """Retrieves the failure of a check for which no caller waits any more, so that asyncio does not log it."""
    if not check.cancelled():
        check.exception()
