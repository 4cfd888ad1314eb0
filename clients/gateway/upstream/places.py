"""The streams between gateway and service, one for each tenant, and the keys that share them."""

import copy
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Protocol

import penstock.v1 as pb
from penstock.clients.channel import call_metadata
from penstock.clients.errors import RequestFailed
from penstock.clients.failover.carried_request import CarriedRequest
from penstock.clients.gateway.upstream.recent import Recent
from penstock.clients.stream import GenerateStream, Receiver
from penstock.v1 import GetModelResponse

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

    def __init__(
        self,
        name: bytes,
        key: str | None,
        tenant: str,
        fetch: Callable[[Metadata, str], Awaitable[GetModelResponse]],
        kept_s: float,
    ) -> None:
        """``name`` is a hash of key and tenant; ``tenant`` is empty if none is named. ``fetch`` requests the service's
        model; its response is trusted for ``kept_s``."""
        self.name = name
        self.tenant = tenant
        self.metadata = call_metadata(key)
        self.response = GetModelResponse()
        self.place: SharedStream | None = None
        self.running: set[Running] = set()
        """The callers whose requests run under the key."""
        self._recent = Recent(partial(fetch, self.metadata, tenant), kept_s)

    async def check(self) -> None:
        """Checks that the service accepts the key, if it was not checked recently or its stream is broken. Raises
        RequestFailed."""
        if self.place is not None and self.place.is_broken:
            self._recent.expire()
        try:
            self.response = await self._recent.get()
        except RequestFailed as failure:
            raise copy.copy(failure) from None  # each is raised in a different task


class SharedStream:
    """One stream, which the keys of one tenant share: the service treats all of them alike."""

    def __init__(
        self,
        of: PlaceName,
        open_stream: Callable[[Metadata, GenerateStream | None], GenerateStream],
        on_end: Callable[["SharedStream"], None],
        num_targets: int = 1,
        on_move: Callable[[], None] = lambda: None,
    ) -> None:
        """``open_stream`` opens a stream, at another target than that of the given stream. ``on_end`` is called when
        one of its requests has ended, and ``on_move`` when one continues at another target."""
        self._num_targets = num_targets
        self._on_move = on_move
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
        return self._stream is not None and not self._stream.is_open

    def was_opened_with(self, identity: Identity) -> bool:
        """Whether the stream was opened with this key, or is not open yet."""
        return self._opened_with in (None, identity.metadata)

    def carry(self, identity: Identity, start: pb.GenerationStart, receiver: Receiver) -> Callable[[], None]:
        """Sends a request on the stream, or on a new one in place of a broken one; returns a function that cancels it.
        Each ``carry`` needs one ``done``."""

        def open_stream(avoid: GenerateStream | None = None) -> GenerateStream:
            leaves = avoid is not None and avoid is self._stream
            if leaves and avoid is not None:
                avoid.leave()
            if leaves or self._stream is None or not self._stream.is_open:
                self._stream = self._open_stream(identity.metadata, avoid)
                self._opened_with = identity.metadata
            return self._stream

        request = CarriedRequest(start, receiver, open_stream, num_targets=self._num_targets, on_move=self._on_move)
        self.num_live += 1
        return request.cancel

    def done(self) -> None:
        """Notes that a carried request has ended."""
        self.num_live -= 1
        self.last_used = time.monotonic()
        self._on_end(self)

    def take_stream(self) -> GenerateStream | None:
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
