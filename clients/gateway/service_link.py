"""The way to the gRPC service: one multiplexed stream for each caller's key, shared by all HTTP requests under it.

A Generate stream belongs to whoever opened it, so callers with keys of their own can't share one. They are pooled: a
key gets its stream with its first request and loses it after a minute without one, and only so many are open at once.
Where the gateway has a key of its own, all requests travel on one stream, and each may name its tenant.
"""

import asyncio
import copy
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

import grpc
from google.protobuf.message import Message

from penstock.clients.channel import call_metadata, open_channel
from penstock.clients.errors import RequestFailed, failure_from_call
from penstock.clients.gateway.errors import GatewayError
from penstock.clients.gateway.settings import GatewaySettings
from penstock.clients.health import is_serving
from penstock.clients.requests import MAX_START_BYTES
from penstock.clients.stream import Call, GenerateStream, Receiver
from penstock.v1 import generation_pb2 as pb
from penstock.v1.embedding_pb2_grpc import EmbeddingServiceStub
from penstock.v1.generation_pb2_grpc import GenerationServiceStub
from penstock.v1.model_pb2 import GetModelRequest, GetModelResponse
from penstock.v1.model_pb2_grpc import ModelServiceStub
from penstock.v1.tokenizer_pb2 import DescribeTokensRequest, RenderChatResponse, TokenDescription
from penstock.v1.tokenizer_pb2_grpc import TokenizerServiceStub

T = TypeVar("T")
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FULL_RETRY_S = 1.0
_MAX_DESCRIBED = 1 << 16
_MAX_TEXTS = 64
_MAX_TEXT_LENGTH = 1 << 16
_RENDERED_S = 60.0
"""How long a rendered text is believed: a service that restarts may have another template under the same name."""
_MAX_REQUEST_BYTES = 8 << 20
"""Of one call: more is refused by the service's transport, in words and with a code that are not for callers."""
_MAX_KEY_BYTES = 4096
"""More would be refused by the transport, which takes 8 KiB of metadata."""


class _Stubs:
    """The service's methods on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.generation = GenerationServiceStub(channel)
        self.model = ModelServiceStub(channel)
        self.tokenizer = TokenizerServiceStub(channel)
        self.embedding = EmbeddingServiceStub(channel)


class _Memory:
    """What is known of a model, so that it need not be asked again."""

    def __init__(self, of: tuple[str, str, int]) -> None:
        self.of = of
        self.tokens: dict[int, TokenDescription] = {}
        """Grows to the vocabulary at most."""
        self.rendered = LatestPrompts()
        self.rendered_since = time.monotonic()


class LatestPrompts(OrderedDict[bytes, RenderChatResponse]):
    """The last few that were put in, but for long ones."""

    def __setitem__(self, key: bytes, prompt: RenderChatResponse) -> None:
        if len(prompt.text) <= _MAX_TEXT_LENGTH:
            super().__setitem__(key, prompt)
        while len(self) > _MAX_TEXTS:
            self.popitem(last=False)


class _Identity:
    """One key: its stream, and what the service said of it. The key itself is in its metadata alone."""

    def __init__(self, link: "ServiceLink", key: str | None) -> None:
        self._link = link
        self.metadata = call_metadata(key)
        self.model = GetModelResponse()
        """As of the last check."""
        self.num_live = 0
        self.last_used = 0.0
        self.is_pooled = False
        self._checked_at = -1e9
        self._check: asyncio.Task[GetModelResponse] | None = None
        self._stream: GenerateStream | None = None

    @property
    def is_fresh(self) -> bool:
        """Whether the service took the key not long ago, and the stream stands that it took it for."""
        if self._stream is not None and not self._stream.is_open:
            return False
        return time.monotonic() - self._checked_at < self._link.settings.recheck_caller_s

    async def check(self) -> None:
        """Asks the service for its model under this key, once for all who wait. Raises RequestFailed."""
        if self._check is None:
            self._check = asyncio.create_task(self._ask(), name="penstock-gateway-check")
            self._check.add_done_callback(_see)
        try:
            self.model = await asyncio.shield(self._check)
        except RequestFailed as failure:
            raise copy.copy(failure) from None  # each is raised in a task of its own

    async def _ask(self) -> GetModelResponse:
        try:
            model = await self._link.call(self._link.stubs.model.GetModel, GetModelRequest(), self.metadata)
            self._checked_at = time.monotonic()
            return model
        finally:
            self._check = None

    def stream(self) -> GenerateStream:
        """The open stream, or a new one in place of a broken one."""
        if self._stream is None or not self._stream.is_open:

            def open_call() -> Call:
                return self._link.stubs.generation.Generate(metadata=self.metadata)

            self._stream = GenerateStream(open_call, self._link.settings.service.target)
        return self._stream

    def take_stream(self) -> GenerateStream | None:
        """The stream, which has no part in requests from now on."""
        stream, self._stream = self._stream, None
        return stream


class Caller:
    """Who made an HTTP request, as the service knows it. Made by ``ServiceLink.caller``."""

    def __init__(self, link: "ServiceLink", identity: _Identity, tenant: str) -> None:
        self._link = link
        self._identity = identity
        self.tenant = tenant
        """What the header named; empty: the key's own."""

    @property
    def model(self) -> GetModelResponse:
        """What is served, as of at most half a minute ago."""
        return self._identity.model

    @property
    def rendered(self) -> LatestPrompts:
        """What the chat template made of conversations that tell of the template, by a hash of theirs."""
        return self._link.rendered_of(self.model)

    @property
    def settings(self) -> GatewaySettings:
        """The gateway's."""
        return self._link.settings

    @property
    def stubs(self) -> _Stubs:
        """The service's methods, for ``call``."""
        return self._link.stubs

    async def call(self, method: Callable[..., Awaitable[T]], request: Message, *, is_short: bool = True) -> T:
        """One call in the caller's name, such as ``call(caller.stubs.tokenizer.Tokenize, request)``; one that is not
        short has the deadline of a generation. Raises RequestFailed, and GatewayError for one that is too large."""
        return await self._link.call(method, request, self._identity.metadata, is_short=is_short)

    def carry(self, start: pb.Start, receiver: Receiver) -> Callable[[], None]:
        """Sends a request on the caller's stream; what is returned cancels it. Each ``carry`` needs one ``done``."""
        if self.tenant:
            start.tenant = self.tenant
        if start.ByteSize() > MAX_START_BYTES:  # the transport's refusal would end the stream that others share
            raise GatewayError(413, "the prompt is too long for one request", code="request_too_large")
        stream = self._identity.stream()
        ref = stream.carry(start, receiver)
        self._identity.num_live += 1
        return lambda: stream.cancel(ref)

    def done(self) -> None:
        """A request that was carried has ended."""
        self._identity.num_live -= 1
        self._identity.last_used = time.monotonic()
        if not self._identity.is_pooled and not self._identity.num_live:  # it had to go before this request came
            self._link.retire(self._identity)

    async def describe(self, token_ids: set[int]) -> Mapping[int, TokenDescription]:
        """What tokens stand for, at least these. Raises RequestFailed."""
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
        self._identities: dict[bytes, _Identity] = {}
        """By a hash of the key. Those alone that the service took."""
        self._closing: set[asyncio.Task[None]] = set()
        self._memory = _Memory(("", "", 0))

    async def __aenter__(self) -> "ServiceLink":
        # The channel is made here, since it belongs to the loop that runs.
        self._channel = open_channel(self.settings.service.target, self.settings.service.tls)
        self.stubs = _Stubs(self._channel)
        self._sweeper = asyncio.create_task(self._sweep(), name="penstock-gateway-sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._sweeper.cancel()
        for name in list(self._identities):
            self._drop(name)
        if self._closing:
            await asyncio.wait(self._closing)
        await self._channel.close()

    @property
    def num_callers(self) -> int:
        """Keys that are in use."""
        return len(self._identities)

    async def caller(self, headers: Mapping[str, str]) -> Caller:
        """Who made a request with these headers; the service has taken the key. Raises RequestFailed, and
        GatewayError."""
        key = self.settings.service.api_key or _bearer(headers.get("authorization", ""))
        tenant = self._tenant(headers)
        name = hashlib.sha256((key or "").encode()).digest()
        identity = self._identities.get(name)
        if identity is None or not identity.is_fresh:
            identity = await self._check(name, identity or _Identity(self, key))
        identity.last_used = time.monotonic()
        return Caller(self, identity, tenant)

    async def is_serving(self) -> bool:
        """Whether the service takes requests; not if it does not answer."""
        try:
            return await is_serving(self._channel, timeout=self.settings.call_timeout_s)
        except grpc.aio.AioRpcError:
            return False

    async def call(
        self, method: Callable[..., Awaitable[T]], request: Message, metadata: object, *, is_short: bool = True
    ) -> T:
        """One call; what is not short has the deadline of a generation. Raises RequestFailed, and GatewayError for one
        that is too large."""
        if request.ByteSize() > _MAX_REQUEST_BYTES:
            raise GatewayError(413, "the request is too large; send less at once", code="request_too_large")
        timeout_s = self.settings.call_timeout_s if is_short else self.settings.request_timeout_s
        try:
            return await method(request, timeout=timeout_s, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise failure_from_call(error, self.settings.service.target) from None

    def memory_of(self, model: GetModelResponse) -> "_Memory":
        """What is remembered of a model."""
        of = (model.name, model.architecture, model.vocab_size)
        if self._memory.of != of:
            self._memory = _Memory(of)
        return self._memory

    def rendered_of(self, model: GetModelResponse) -> LatestPrompts:
        """What its template made of conversations in the last minute."""
        memory = self.memory_of(model)
        if time.monotonic() - memory.rendered_since >= _RENDERED_S:
            memory.rendered, memory.rendered_since = LatestPrompts(), time.monotonic()
        return memory.rendered

    async def _check(self, name: bytes, identity: _Identity) -> _Identity:
        try:
            await identity.check()
        except RequestFailed as failure:
            if failure.code is not grpc.StatusCode.UNAUTHENTICATED:
                raise
            if self.settings.service.api_key is not None:
                failure = _own_key_refused()
            if self._identities.get(name) is identity:  # the key was withdrawn: what still runs under it ends
                ended = copy.copy(failure)
                ended.request_id = ""  # the check's; what ends has its own
                self._drop(name, ended)
            raise failure from None
        # Another request may have brought the same key at the same moment.
        known = self._identities.get(name)
        if known is None:
            self._make_room()
            known = self._identities[name] = identity
            identity.is_pooled = True
        return known

    def _tenant(self, headers: Mapping[str, str]) -> str:
        header = self.settings.tenant_header
        named = [value for name, value in headers.items() if name == header] if header else []
        if len(named) > 1:  # a proxy may have added its own to one that its caller sent: which is which?
            raise GatewayError(400, f"the header {header} must be there once")
        tenant = named[0] if named else ""
        if tenant and not _TENANT.fullmatch(tenant):
            raise GatewayError(400, f"the header {header} must have 1 to 64 characters of [A-Za-z0-9_.-]")
        return tenant

    def _make_room(self) -> None:
        if len(self._identities) < self.settings.max_callers:
            return
        idle = [(each.last_used, name) for name, each in self._identities.items() if not each.num_live]
        if not idle:
            raise GatewayError(
                503,
                "too many callers at once; try again",
                code="gateway_full",
                retry_after_s=_FULL_RETRY_S,
                may_retry=True,
            )
        self._drop(min(idle)[1])

    def _drop(self, name: bytes, failure: RequestFailed | None = None) -> None:
        identity = self._identities.pop(name)
        identity.is_pooled = False
        self.retire(identity, failure)

    def retire(self, identity: _Identity, failure: RequestFailed | None = None) -> None:
        """Closes the stream of an identity that is not in the pool. It is out of reach at once: a request that comes
        before it is closed gets another. ``failure``: what requests that still run on it end with."""
        if (stream := identity.take_stream()) is None:
            return
        closing = asyncio.create_task(stream.close(failure))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def _sweep(self) -> None:
        """Closes streams that nobody uses."""
        idle_s = self.settings.idle_caller_s
        while True:
            await asyncio.sleep(idle_s / 4)
            oldest = time.monotonic() - idle_s
            for name, identity in list(self._identities.items()):
                if not identity.num_live and identity.last_used < oldest:
                    self._drop(name)


def _see(check: asyncio.Task[GetModelResponse]) -> None:
    """Its failure is told to who waits; if nobody does any more, it is not news."""
    if not check.cancelled():
        check.exception()


def _own_key_refused() -> RequestFailed:
    """No fault of the callers', and none that passes by itself."""
    message = "the service does not take the key of this gateway; tell its operator"
    failure = RequestFailed(grpc.StatusCode.UNAVAILABLE, message)
    failure.reason, failure.is_final = "GATEWAY_KEY_REFUSED", True
    return failure


def _bearer(authorization: str) -> str | None:
    """The key of an Authorization header; None if it shows none."""
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    if scheme.lower() != "bearer" or not key:
        return None
    if not (key.isascii() and key.isprintable() and len(key) <= _MAX_KEY_BYTES):
        message = f"the API key must be printable ASCII, at most {_MAX_KEY_BYTES:,} bytes"
        raise GatewayError(401, message, code="invalid_api_key")
    return key
