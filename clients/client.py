"""The asynchronous client: every request travels on one Generate stream, opened when it is first needed.

async with AsyncClient("127.0.0.1:50051") as client:
    print((await client.complete("Once upon a time", max_tokens=20)).text)
    async for piece in client.stream("Once upon a time"):
        print(piece.text, end="")
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Self, TypeVar, Unpack

import grpc

import penstock.v1 as pb
from penstock.clients.channel import DEFAULT_TARGET, Tls, call_metadata, open_channel
from penstock.clients.chat_messages import ChatMessage, ChatOptions, build_chat
from penstock.clients.classification import (
    Classes,
    ClassifyOptions,
    ScoreOptions,
    Scores,
    build_classify_request,
    build_score_request,
)
from penstock.clients.embeddings import Embeddings, EmbedOptions, Input, build_embed_request, embed_at_once
from penstock.clients.errors import PenstockError, RequestFailed, failure_from_call
from penstock.clients.events import Completion, Delta, Event, Finished, collect
from penstock.clients.health import is_serving
from penstock.clients.requests import Options, Prompt, build_start, build_update
from penstock.clients.stream import GenerateStream, Mailbox
from penstock.v1 import (
    DetokenizeRequest,
    RenderChatRequest,
    RenderChatResponse,
    TokenizeRequest,
)
from penstock.v1.classification_pb2_grpc import ClassificationServiceStub
from penstock.v1.embedding_pb2_grpc import EmbeddingServiceStub
from penstock.v1.generation_pb2_grpc import GenerationServiceStub
from penstock.v1.model_pb2_grpc import ModelServiceStub
from penstock.v1.tokenizer_pb2_grpc import TokenizerServiceStub

T = TypeVar("T")

_UNARY_SECONDS = 60.0
_DEADLINE_GRACE_SECONDS = 5.0


class RequestStream:
    """One request, from its start to its end, as events.

    It starts with ``async with`` or with the first event that is awaited. Leaving ``async with`` or the loop before the
    end cancels it. A request that fails raises RequestFailed from the loop, after the events that came before.
    """

    def __init__(self, open_stream: Callable[[], GenerateStream], start: pb.GenerationStart) -> None:
        self._open_stream = open_stream
        self._start = start
        self._carrier: GenerateStream | None = None
        self._mailbox = Mailbox()
        self._ref = 0
        self._ended = False
        self._cancelled = False
        self._give_up_at: float | None = None
        self._limit: asyncio.Timeout | None = None
        """Enforces ``_give_up_at`` while events are awaited."""

    async def __aenter__(self) -> Self:
        self._begin()
        return self

    async def __aexit__(self, *error: object) -> None:
        self.leave()

    async def __aiter__(self) -> AsyncIterator[Event]:
        try:
            while events := await self.take():
                for event in events:
                    yield event
        finally:
            self.leave()

    @property
    def request_id(self) -> str:
        """The service's id of the request; empty until it is accepted."""
        return self._mailbox.request_id

    async def take(self) -> list[Event]:
        """Waits for events and returns all since the last call. Returns an empty list once the request has ended."""
        return await self._receive(rest=False)

    async def completion(self) -> Completion:
        """Collects the remaining events into a ``Completion``."""
        events: list[Event] = []
        while more := await self._receive(rest=True):
            events += more
        if not events:
            raise PenstockError("the request has ended, and its events were taken already")
        return collect(events, max(1, self._start.sampling.n))

    def cancel(self) -> None:
        """Requests an early end. Events continue until ``Finished``, which has the usage so far."""
        self._cancelled = True
        if self._carrier is not None:
            self._carrier.cancel(self._ref)

    def update(
        self, *, timeout: float | None = None, priority: int | None = None, max_tokens: int | None = None
    ) -> None:
        """Changes the request while it runs; ``timeout`` is in seconds from now. If the service refuses, nothing
        changes, and an ``UpdateRefused`` is among the events. Raises InvalidOption."""
        update = build_update(timeout, priority, max_tokens)
        if self._carrier is None:
            self._amend(update)
        elif not self._ended:
            self._carrier.update(self._ref, update)
            if update.HasField("timeout_ms"):
                self._expect_end_within(update.timeout_ms / 1000)

    def leave(self) -> None:
        """Cancels the request, if it has not ended, and takes no more of its events. Safe to call twice."""
        if not self._ended:
            self._ended = True
            self._mailbox.abandoned = True
            self.cancel()

    def _begin(self) -> None:
        if self._carrier is None and not self._ended:
            self._carrier = self._open_stream()
            self._ref = self._carrier.carry(self._start, self._mailbox)
            if self._cancelled:
                self._carrier.cancel(self._ref)
            if self._start.HasField("timeout_ms"):
                self._expect_end_within(self._start.timeout_ms / 1000)

    def _amend(self, update: pb.GenerationUpdate) -> None:
        """Changes the start message, before it is sent."""
        if update.HasField("priority"):
            self._start.priority = update.priority
        if update.HasField("max_tokens"):
            self._start.sampling.max_tokens = update.max_tokens
        if update.HasField("timeout_ms"):
            self._start.timeout_ms = update.timeout_ms

    def _expect_end_within(self, seconds: float) -> None:
        """Limits the wait if the service does not respond at all; otherwise the service enforces the deadline."""
        self._give_up_at = asyncio.get_running_loop().time() + seconds + _DEADLINE_GRACE_SECONDS
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(self._give_up_at)

    async def _receive(self, *, rest: bool) -> list[Event]:
        if self._ended:
            return []
        self._begin()
        try:
            async with asyncio.timeout_at(self._give_up_at) as self._limit:
                events = await self._mailbox.take_event(rest=rest)
        except TimeoutError:
            self.leave()
            failure = RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline passed without a response")
            failure.request_id = self.request_id
            raise failure from None
        except RequestFailed as failure:
            self._ended = True
            if self._cancelled and failure.code is grpc.StatusCode.CANCELLED and failure.finished is not None:
                return [failure.finished]
            raise
        finally:
            self._limit = None
        self._ended = isinstance(events[-1], Finished)
        return events


async def _deltas(request: RequestStream) -> AsyncIterator[Delta]:
    async with request:
        async for event in request:
            if isinstance(event, Delta):
                yield event


class AsyncClient:
    """Calls one service. Use it from one event loop, in as many tasks as you like.

    ``api_key`` is in every call's metadata: without ``tls``, anyone on the network path can read it. Raises subclasses
    of PenstockError: InvalidOption before anything is sent, RequestFailed for failures of the service or the
    connection.
    """

    def __init__(self, target: str = DEFAULT_TARGET, *, api_key: str | None = None, tls: Tls | None = None) -> None:
        self.target = target
        self._tls = tls
        self._metadata = call_metadata(api_key)
        self._opened: grpc.aio.Channel | None = None
        self._stream: GenerateStream | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> RequestStream:
        """Returns a request as a stream of events: Accepted, PromptLogprobs, Delta, UpdateRefused, Finished.

        ``prompt`` is text, token ids, or a conversation: a list of messages (see ChatMessage); ``timeout`` is in
        seconds; options have the contract's names. With ``continue_from`` the prompt is only the new part: after a
        chat, only the new messages; an empty text continues the output. Raises InvalidOption immediately; nothing is
        sent before the stream is used.
        """
        return RequestStream(self._generate_stream, build_start(prompt, options, timeout))

    def send(self, start: pb.GenerationStart) -> RequestStream:
        """Like ``generate``, for a ``GenerationStart``, which is used only once; its ref is overwritten."""
        return RequestStream(self._generate_stream, start)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[Delta]:
        """Yields only the output, as it arrives. Leaving the loop cancels the request."""
        return _deltas(self.generate(prompt, timeout=timeout, **options))

    async def complete(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the service keeps it
        **options: Unpack[Options],
    ) -> Completion:
        """Returns the whole answer. Raises RequestFailed."""
        async with self.generate(prompt, timeout=timeout, **options) as request:
            return await request.completion()

    async def embed(
        self,
        inputs: str | Sequence[Input],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the service keeps it
        **options: Unpack[EmbedOptions],
    ) -> Embeddings:
        """Returns a vector for each input. ``inputs``: a text, or a list of texts or of lists of token ids. One call
        for many inputs is faster than many calls. ``timeout`` is in seconds; default: none. Raises
        InvalidOption and RequestFailed."""
        request = build_embed_request(inputs, options)
        stub = EmbeddingServiceStub(self._channel())
        return Embeddings.from_proto(await self._unary(partial(embed_at_once, stub), request, timeout))

    async def classify(
        self,
        inputs: str | Sequence[Input],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the service keeps it
        **options: Unpack[ClassifyOptions],
    ) -> Classes:
        """Returns a value for each label of the model's classification head, for each input. ``inputs``: as for
        ``embed``. Raises InvalidOption and RequestFailed."""
        request = build_classify_request(inputs, options)
        stub = ClassificationServiceStub(self._channel())
        return Classes.from_proto(await self._unary(stub.Classify, request, timeout))

    async def score(
        self,
        query: str | Sequence[str],
        documents: Sequence[str],
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the service keeps it
        **options: Unpack[ScoreOptions],
    ) -> Scores:
        """Returns how relevant each document is to the query, or to its own query if there are several. Raises
        InvalidOption and RequestFailed."""
        request = build_score_request(query, documents, options)
        stub = ClassificationServiceStub(self._channel())
        return Scores.from_proto(await self._unary(stub.Score, request, timeout))

    async def model(self, name: str = "") -> pb.Model:
        """Returns a served model, by default the only one, and the service's limits."""
        request = pb.GetModelRequest(model=name)
        return (await self._unary(ModelServiceStub(self._channel()).GetModel, request)).model

    async def models(self) -> list[pb.Model]:
        """Returns all served models."""
        stub, found, token = ModelServiceStub(self._channel()), list[pb.Model](), ""
        while True:
            page = await self._unary(stub.ListModels, pb.ListModelsRequest(page_token=token))
            found += page.models
            token = page.next_page_token
            if not token:
                return found

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Returns the token ids of a text, the same as in a prompt."""
        request = TokenizeRequest(text=text, add_special_tokens=add_special_tokens)
        return list((await self._unary(TokenizerServiceStub(self._channel()).Tokenize, request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, include_special_tokens: bool = False) -> str:
        """Returns the text of token ids."""
        request = DetokenizeRequest(token_ids=token_ids, include_special_tokens=include_special_tokens)
        return (await self._unary(TokenizerServiceStub(self._channel()).Detokenize, request)).text

    async def render_chat(self, messages: Sequence[ChatMessage], **options: Unpack[ChatOptions]) -> RenderChatResponse:
        """Returns the prompt of a conversation, as text and as token ids."""
        request = RenderChatRequest(chat=build_chat(messages, options))
        return await self._unary(TokenizerServiceStub(self._channel()).RenderChat, request)

    async def wait_ready(self, timeout: float = 60.0) -> None:  # noqa: ASYNC109 - the error has the last response
        """Waits until the service reports that it is serving. Raises RequestFailed after ``timeout`` seconds."""
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout
        while True:
            answer = "its status is NOT_SERVING"
            try:
                left = max(0.001, give_up - loop.time())
                if await is_serving(self._channel(), self._metadata, timeout=left, wait_for_ready=True):
                    return
            except grpc.aio.AioRpcError as error:
                failure = failure_from_call(error, self.target)
                if not failure.retryable and failure.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                    raise failure from None
                answer = failure.message
            if loop.time() + 0.1 >= give_up:
                message = f"{self.target} was not ready within {timeout:g} s: {answer}"
                raise RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, message)
            await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Cancels running requests and closes the connection. Safe to call twice."""
        self._closed = True
        if self._stream is not None:
            await self._stream.close()
        if self._opened is not None:
            await self._opened.close()

    def _channel(self) -> grpc.aio.Channel:
        # Created here and not in __init__, since a channel belongs to the loop that runs when it is created.
        if self._closed:
            raise PenstockError("the client is closed")
        if self._opened is None:
            self._opened = open_channel(self.target, self._tls)
        return self._opened

    def _generate_stream(self) -> GenerateStream:
        """Returns the open stream, or a new one in place of a broken one."""
        channel = self._channel()
        if self._stream is None or not self._stream.is_open:
            stub = GenerationServiceStub(channel)
            self._stream = GenerateStream(lambda: stub.Generate(metadata=self._metadata), self.target)
        return self._stream

    async def _unary(
        self, method: Callable[..., Awaitable[T]], request: object, seconds: float | None = _UNARY_SECONDS
    ) -> T:
        try:
            return await method(request, timeout=seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise failure_from_call(error, self.target) from None
