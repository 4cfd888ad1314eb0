"""Connects to the gRPC service by one multiplexed stream per tenant, shared by all HTTP requests under its keys.

A Generate stream belongs to the tenant that opened it. The service returns the tenant of a key, so all keys of a tenant
share one stream, however many there are: tokens of an identity provider change by the hour. A tenant gets its stream
with its first request and loses it after a minute without one, and a bounded number are open at once. If the gateway
has its own key, all requests use one stream, and each may name its tenant.
"""

import asyncio
import copy
import hashlib
import time
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message
from starlette.datastructures import Headers

import penstock.v1 as pb
from penstock.clients.channel import call_metadata, open_channel
from penstock.clients.errors import RequestFailed, failure_from_call
from penstock.clients.failover.target_list import channel_for_stream, open_targets, split_targets
from penstock.clients.gateway.errors import GatewayError, try_again
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.gateway.tracing import trace_metadata
from penstock.clients.gateway.upstream.body_budget import BodyInMemory
from penstock.clients.gateway.upstream.caller_headers import bearer_key, fairness_tenant, named_tenant
from penstock.clients.gateway.upstream.load_reports import LoadReports, load_header
from penstock.clients.gateway.upstream.places import Identity, Metadata, PlaceName, SharedStream
from penstock.clients.gateway.upstream.refusal_rates import RefusalRates
from penstock.clients.gateway.upstream.service_state import ServiceState
from penstock.clients.requests import MAX_START_BYTES
from penstock.clients.stream import GenerateStream, Receiver
from penstock.v1 import DescribeTokensRequest, GetModelRequest, GetModelResponse, TokenDescription
from penstock.v1.admin_pb2_grpc import AdminServiceStub
from penstock.v1.classification_pb2_grpc import ClassificationServiceStub
from penstock.v1.embedding_pb2_grpc import EmbeddingServiceStub
from penstock.v1.generation_pb2_grpc import GenerationServiceStub
from penstock.v1.model_pb2_grpc import ModelServiceStub
from penstock.v1.tokenizer_pb2_grpc import TokenizerServiceStub

T = TypeVar("T")
_MAX_DESCRIBED = 1 << 16
_MAX_REQUEST_BYTES = 8 << 20
"""The limit for one call: larger ones are refused by the service's transport, with an error that is not meant for
callers."""


class _Stubs:
    """The service's methods besides generation, on one channel, and its administration on another."""

    def __init__(self, channel: grpc.aio.Channel, admin_channel: grpc.aio.Channel) -> None:
        self.model = ModelServiceStub(channel)
        self.tokenizer = TokenizerServiceStub(channel)
        self.embedding = EmbeddingServiceStub(channel)
        self.classification = ClassificationServiceStub(channel)
        self.admin = AdminServiceStub(admin_channel)


class _Memory:
    """A cache of a model's properties."""

    def __init__(self, of: tuple[str, str, int]) -> None:
        self.of = of
        self.tokens: dict[int, TokenDescription] = {}
        """At most the size of the vocabulary."""


class UpstreamCaller:
    """The caller of an HTTP request, as identified by the service. Created by ``ServiceLink.caller``."""

    def __init__(self, link: "ServiceLink", identity: Identity, place: SharedStream) -> None:
        self._link = link
        self._identity = identity
        self._place = place
        self._metadata = (*identity.metadata, *trace_metadata())
        self.tenant = identity.tenant
        """The tenant that the header names; empty: the key's own."""
        self.counted_as = identity.tenant or place.of[0]
        """The tenant whose share of the gateway's resources the request uses."""
        self.model = identity.response.model
        """The served model, at most half a minute old when the request arrived."""
        self.adapter = ""
        """The LoRA adapter that the request names as its model; empty: none."""
        self.settings = link.settings
        self.stubs = link.stubs
        self._carried: list[tuple[Callable[[], None], Receiver]] = []
        """All requests, each with the function that cancels it."""
        self._num_live = 0
        self.body: BodyInMemory | None = None

    @property
    def model_name(self) -> str:
        """The name of what computes the answer: the model, or its adapter."""
        return self.adapter or self.model.name

    def _named(self, request: Message) -> Message:
        """Returns the request, for the adapter if there is one."""
        if self.adapter and "model" in request.DESCRIPTOR.fields_by_name:
            request.model = self.adapter  # type: ignore[attr-defined]
        return request

    async def call(self, method: Callable[..., Awaitable[T]], request: Message, *, is_short: bool = True) -> T:
        """Calls the service for the caller, such as ``call(caller.stubs.tokenizer.Tokenize, request)``. Without
        ``is_short`` the deadline is that of a generation. Raises RequestFailed, and GatewayError for a request that is
        too large."""
        return await self._link.call(method, self._named(request), self._metadata, is_short=is_short)

    def stream(self, method: Callable[..., AsyncIterable[T]], request: Message) -> AsyncGenerator[T, None]:
        """Yields the messages of a call with the deadline of a generation. The call ends with the generator. Raises
        RequestFailed, and GatewayError for a request that is too large."""
        return self._link.stream(method, self._named(request), self._metadata)

    def carry(self, start: pb.GenerationStart, receiver: Receiver) -> Callable[[], None]:
        """Sends a request on the stream of the caller's tenant; returns a function that cancels it. Each ``carry``
        needs one ``done``."""
        if self.tenant:
            start.tenant = self.tenant
        self._named(start)
        if start.ByteSize() > MAX_START_BYTES:  # a refusal by the transport would end the shared stream
            raise GatewayError(413, "the prompt is too long for one request", code="request_too_large")
        cancel = self._place.carry(self._identity, start, receiver)
        self._carried.append((cancel, receiver))
        self._num_live += 1
        self._identity.running.add(self)
        return cancel

    def done(self) -> None:
        """Notes that a carried request has ended."""
        self._num_live -= 1
        if not self._num_live:
            self._carried.clear()
            self._identity.running.discard(self)
        self._place.done()

    def fail(self, failure: RequestFailed) -> None:
        """Ends the running requests, since the service no longer accepts the key. Ended requests ignore it."""
        for cancel, receiver in list(self._carried):
            cancel()
            receiver.fail(copy.copy(failure))

    async def load_header(self, wanted: str) -> tuple[str, str] | None:
        """Returns the header with the service's load in the format ``wanted``; None if the format is unknown or there
        is no report."""
        report = await self._link.load_reports.get()
        return None if report is None else load_header(report, wanted)

    def keep_of_body(self, num_bytes: int) -> None:
        """Counts only ``num_bytes`` of the request's body from now on: the part that the answer still needs."""
        if self.body is not None and len(split_targets(self.settings.service.target)) == 1:  # others keep the prompt
            self.body.shrink_to(num_bytes)

    def check_rate(self) -> None:
        """Raises GatewayError if too many of the tenant's requests were refused; called before a body is read."""
        wait_s = self._link.refusals.wait_s(self.counted_as)
        if wait_s > 0:
            message = f"this tenant exceeds its rate of requests; try again in {wait_s:.3g} s"
            raise try_again(429, message, code="tenant_rate", retry_after_s=wait_s)

    def count_refusal(self) -> None:
        """Counts a request that the gateway refused against the tenant's rate."""
        self._link.refusals.count(self.counted_as)

    async def describe(self, token_ids: set[int]) -> Mapping[int, TokenDescription]:
        """Returns descriptions of at least these tokens. Raises RequestFailed."""
        known = self._link.memory_of(self.model).tokens
        if unknown := sorted(token_ids - known.keys()):
            for begin in range(0, len(unknown), _MAX_DESCRIBED):
                part = unknown[begin : begin + _MAX_DESCRIBED]
                response = await self.call(self.stubs.tokenizer.DescribeTokens, DescribeTokensRequest(token_ids=part))
                known.update(zip(part, response.tokens, strict=True))
        return known


class ServiceLink:
    """The channel, and the streams on it. Use it from one event loop, by ``async with``."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.refusals = RefusalRates()
        self._places: dict[PlaceName, SharedStream] = {}
        self._identities: dict[bytes, Identity] = {}
        """The identities that places remember: only those that the service has accepted."""
        self._leaving: set[SharedStream] = set()
        """Places that accept no further requests but still have running ones."""
        self._closing: set[asyncio.Task[None]] = set()
        self._memory = _Memory(("", "", 0))
        self.on_move: Callable[[], None] = lambda: None
        """Called when a request continues at another target. Set before the first request."""

    async def __aenter__(self) -> "ServiceLink":
        # The channel is created here, since it belongs to the running loop.
        self._channel = open_targets(self.settings.service.target, self.settings.service.tls)
        self._admin_channel = _open_admin(self.settings)
        self.stubs = _Stubs(self._channel, self._admin_channel)
        self.load_reports = LoadReports(self._channel)
        self._state = ServiceState(self._channel, self.settings, lambda: service_needs_key(self))
        self._sweeper = asyncio.create_task(self._sweep(), name="penstock-gateway-sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sweeper.cancel()
        for place in (*self._places.values(), *self._leaving):
            self._close(place)
        if self._closing:
            await asyncio.wait(self._closing)
        await self._channel.close()
        await self._admin_channel.close()

    async def caller(self, headers: Headers) -> UpstreamCaller:
        """Returns the caller of a request with these headers, once the service has accepted the key. Raises
        RequestFailed and GatewayError."""
        shown = bearer_key(headers)
        key = self.settings.service.api_key or shown
        tenant = named_tenant(headers, self.settings)
        identity = await self._identity(key, tenant)
        place = self._place_of(identity)
        # With the gateway's own key, any caller could name any tenant, so only the operator's header applies.
        may_act = identity.response.may_act_for_others and self.settings.service.api_key is None
        if may_act and not tenant and (tenant := fairness_tenant(headers)):
            identity = await self._identity(key, tenant)
            place = self._place_of(identity)
        place.last_used = time.monotonic()
        return UpstreamCaller(self, identity, place)

    async def _identity(self, key: str | None, tenant: str) -> Identity:
        """Returns the identity of a key, or of a tenant that it acts for, once the service has accepted it. Raises
        RequestFailed."""
        name = hashlib.sha256(f"{key or ''}\n{tenant}".encode()).digest()
        identity = self._identities.get(name)
        if identity is None:
            identity = Identity(name, key, tenant, self._fetch_model, self.settings.recheck_caller_s)
        await self._check(identity)
        return self._identities.get(name, identity)  # another request may have just added it

    async def is_serving(self) -> bool:
        """Whether the service accepts requests; False if it does not respond."""
        return await self._state.is_serving()

    async def needs_key(self) -> bool:
        """Whether callers need a key. Raises RequestFailed if the service has never responded."""
        return self.settings.service.api_key is None and await self._state.needs_key()

    async def call(
        self, method: Callable[..., Awaitable[T]], request: Message, metadata: Metadata, *, is_short: bool = True
    ) -> T:
        """Makes one call; without ``is_short``, with the deadline of a generation. Raises RequestFailed, and
        GatewayError for a request that is too large."""
        _check_size(request)
        timeout_s = self.settings.call_timeout_s if is_short else self.settings.request_timeout_s
        try:
            return await method(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise failure_from_call(error, self.settings.service.target) from None

    async def stream(
        self, method: Callable[..., AsyncIterable[T]], request: Message, metadata: Metadata
    ) -> AsyncGenerator[T, None]:
        """Yields the messages of one call with the deadline of a generation. Raises as ``call`` does."""
        _check_size(request)
        call: Any = method(request, timeout=self.settings.request_timeout_s, metadata=metadata)
        try:
            async for message in call:
                yield message
        except grpc.aio.AioRpcError as error:
            raise failure_from_call(error, self.settings.service.target) from None
        finally:
            call.cancel()

    def memory_of(self, model: pb.Model) -> _Memory:
        of = (model.name, model.architecture, model.vocab_size)
        if self._memory.of != of:
            self._memory = _Memory(of)
        return self._memory

    async def _check(self, identity: Identity) -> None:
        try:
            await identity.check()
        except RequestFailed as failure:
            if failure.code is not grpc.StatusCode.UNAUTHENTICATED:
                raise
            if self.settings.service.api_key is not None:
                failure = _own_key_refused()
            ended = copy.copy(failure)
            ended.request_id = ""  # the check's id; the ended requests have their own
            self._withdraw(identity, ended)
            raise failure from None

    async def _fetch_model(self, metadata: Metadata, tenant: str) -> GetModelResponse:
        traced = (*metadata, *trace_metadata())  # in the trace of the first request that needs it
        response = await self.call(self.stubs.model.GetModel, GetModelRequest(tenant=tenant), traced)
        rate = response.requests_per_second if response.HasField("requests_per_second") else None
        self.refusals.set(tenant or response.tenant, rate)
        return response

    def _place_of(self, identity: Identity) -> SharedStream:
        """Returns the tenant's place, a new one if its own has gone to another tenant."""
        # An older service returns no tenant: then keys share nothing.
        of = identity.response.tenant or identity.name.hex(), identity.response.may_act_for_others
        place = self._places.get(of)
        if place is not None and self.settings.service.api_key is not None and not place.was_opened_with(identity):
            self._drop(place)  # the gateway's key has changed
            place = None
        if place is None:
            self._make_room()
            num_targets = len(split_targets(self.settings.service.target))
            place = SharedStream(of, self._open_stream, self._close_if_left, num_targets, self.on_move)
            self._places[of] = place
        self._identities[identity.name] = identity
        if (forgotten := place.remember(identity)) is not None:
            del self._identities[forgotten.name]
        return place

    def _open_stream(self, metadata: Metadata, avoid: GenerateStream | None) -> GenerateStream:
        channel = channel_for_stream(self._channel, None if avoid is None else avoid.channel)
        stub = GenerationServiceStub(channel)
        return GenerateStream(lambda: stub.Generate(metadata=metadata), self.settings.service.target, channel)

    def _make_room(self) -> None:
        if len(self._places) < self.settings.max_callers:
            return
        idle = [place for place in self._places.values() if not place.num_live]
        if not idle:
            raise try_again(503, "too many tenants at once; try again", code="gateway_full")
        self._drop(min(idle, key=lambda place: place.last_used))

    def _withdraw(self, identity: Identity, failure: RequestFailed) -> None:
        """Ends the requests under a key that the service no longer accepts, and stops using streams opened with it."""
        if (place := identity.place) is not None and self._identities.get(identity.name) is identity:
            place.identities.pop(identity.name)
            del self._identities[identity.name]
            if place.was_opened_with(identity) or not place.identities:
                self._drop(place)
        for running in list(identity.running):
            running.fail(failure)

    def _drop(self, place: SharedStream) -> None:
        """Stops using a place for new requests; running ones end on it."""
        del self._places[place.of]
        for name in place.identities:
            del self._identities[name]
        place.identities.clear()
        place.is_left = True
        self._leaving.add(place)
        self._close_if_left(place)

    def _close_if_left(self, place: SharedStream) -> None:
        """Closes the stream of a dropped place when its last request has ended."""
        if place.is_left and not place.num_live:
            self._close(place)

    def _close(self, place: SharedStream) -> None:
        """Removes the stream immediately, so that a request that arrives before it is closed gets another one."""
        self._leaving.discard(place)
        if (stream := place.take_stream()) is None:
            return
        closing = asyncio.create_task(stream.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _sweep(self) -> None:
        """Closes unused streams."""
        idle_s = self.settings.idle_caller_s
        while True:
            await asyncio.sleep(idle_s / 4)
            oldest = time.monotonic() - idle_s
            for place in list(self._places.values()):
                if not place.num_live and place.last_used < oldest:
                    self._drop(place)


def _check_size(request: Message) -> None:
    if request.ByteSize() > _MAX_REQUEST_BYTES:
        raise GatewayError(413, "the request is too large; send less at once", code="request_too_large")


async def service_needs_key(link: ServiceLink) -> bool:
    """Whether the service refuses a call without a key. Raises RequestFailed if that is unclear."""
    try:
        await link.call(link.stubs.model.GetModel, GetModelRequest(), call_metadata(None))
    except RequestFailed as failure:
        if failure.code is not grpc.StatusCode.UNAUTHENTICATED:
            raise
        return True
    return False


def _own_key_refused() -> RequestFailed:
    """Returns the error for the gateway's own key: not the callers' mistake, and not temporary."""
    message = "the service does not accept this gateway's key; report it to the gateway's operator"
    failure = RequestFailed(grpc.StatusCode.UNAVAILABLE, message)
    failure.reason, failure.is_final = "GATEWAY_KEY_REFUSED", True
    return failure


def _open_admin(settings: GatewaySettings) -> grpc.aio.Channel:
    """Returns a channel to the service's administration. It connects on first use, so its address may be unknown."""
    target = settings.admin_target or "unix:unknown"
    return open_channel(target, None if target.startswith("unix:") else settings.service.tls)
