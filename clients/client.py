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
from penstock.clients.channel import DEFAULT_TARGET, Tls, call_metadata
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
from penstock.clients.events import Completion, Delta
from penstock.clients.failover.target_list import any_is_serving, channel_for_stream, open_targets, split_targets
from penstock.clients.request_stream import RequestStream, only_deltas
from penstock.clients.requests import Options, Prompt, build_start
from penstock.clients.stream import GenerateStream
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


class AsyncClient:
    """Calls one service. Use it from one event loop, in as many tasks as you like.

    ``target`` may list several replicas of a service, separated by commas. Calls go to the first one that answers. If
    it dies, its requests continue at the next one with the same tokens as without its death, after a pause; see
    docs/client.md.

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
        self._left: list[GenerateStream] = []
        """Open streams to targets that were left for another one."""
        self._closed = False
        self.num_moves = 0
        """How often a request continued at another target."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> RequestStream:
        """Returns a request as a stream of events: Accepted, PromptLogprobs, Delta, Injected, FrameRefused,
        Finished.

        ``prompt`` is text, token ids, or a conversation: a list of messages (see ChatMessage); ``timeout`` is in
        seconds; options have the contract's names. With ``continue_from`` the prompt is only the new part: after a
        chat, only the new messages; an empty text continues the output. Raises InvalidOption immediately; nothing is
        sent before the stream is used.
        """
        return self.send(build_start(prompt, options, timeout))

    def open_prompt(
        self, prompt: Prompt = "", *, timeout: float | None = None, **options: Unpack[Options]
    ) -> RequestStream:
        """Returns a request whose prompt arrives in pieces: ``append`` each, then ``commit``. The service computes them
        as they arrive. Without ``prompt``, piece 0 is empty."""
        start = build_start(prompt, options, timeout)
        start.open = True
        if prompt == "":
            start.ClearField("text")
        return self.send(start)

    def send(self, start: pb.GenerationStart) -> RequestStream:
        """Like ``generate``, for a ``GenerationStart``, which is used only once; its ref is overwritten."""
        return RequestStream(self._generate_stream, start, len(split_targets(self.target)), self._count_move)

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]
    ) -> AsyncIterator[Delta]:
        """Yields only the output, as it arrives. Leaving the loop cancels the request."""
        return only_deltas(self.generate(prompt, timeout=timeout, **options))

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

    async def prefetch(
        self,
        prompt: Prompt,
        *,
        timeout: float | None = None,  # noqa: ASYNC109 - the service keeps it
        **options: Unpack[Options],
    ) -> int:
        """Computes a prompt that is expected soon and retains its KV (``retain_ms``). Returns the number of its tokens
        that were not in the prefix cache."""
        request = pb.PrefetchRequest(start=build_start(prompt, options))
        answer = await self._unary(GenerationServiceStub(self._channel()).Prefetch, request, timeout)
        return answer.prompt_tokens - answer.cached_tokens

    async def release(self, request_ids: Sequence[str], *, tenant: str = "") -> list[str]:
        """Gives up the contexts of ended requests, which cannot be continued any more. Returns the ids for which the
        service keeps none."""
        request = pb.ReleaseRequest(request_ids=request_ids, tenant=tenant)
        return list((await self._unary(GenerationServiceStub(self._channel()).Release, request)).unknown_request_ids)

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
                if await any_is_serving(self._channel(), self._metadata, timeout=left, wait_for_ready=True):
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
        for stream in (self._stream, *self._left):
            if stream is not None:
                await stream.close()
        if self._opened is not None:
            await self._opened.close()

    def _channel(self) -> grpc.aio.Channel:
        # Created here and not in __init__, since a channel belongs to the loop that runs when it is created.
        if self._closed:
            raise PenstockError("the client is closed")
        if self._opened is None:
            self._opened = open_targets(self.target, self._tls)
        return self._opened

    def _count_move(self) -> None:
        self.num_moves += 1

    def _generate_stream(self, avoid: GenerateStream | None = None) -> GenerateStream:
        """Returns the open stream, or a new one in place of a broken one or of ``avoid``, at the next target."""
        channel = self._channel()
        if avoid is not None and avoid is self._stream:
            if avoid.is_open:
                avoid.leave()
                self._left = [stream for stream in self._left if stream.is_open] + [avoid]
            self._stream = None
        if self._stream is None or not self._stream.is_open:
            one = channel_for_stream(channel, None if avoid is None else avoid.channel)
            stub = GenerationServiceStub(one)
            self._stream = GenerateStream(lambda: stub.Generate(metadata=self._metadata), self.target, one)
        return self._stream

    async def _unary(
        self, method: Callable[..., Awaitable[T]], request: object, seconds: float | None = _UNARY_SECONDS
    ) -> T:
        try:
            return await method(request, timeout=seconds, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise failure_from_call(error, self.target) from None
