"""One replica: it runs ``penstock serve`` as its child, and passes requests on to it.

Ray Serve creates the replica, calls its methods on one event loop, and starts another one when its process ends.
Nothing here imports Ray.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response as HttpResponse

import penstock.v1 as pb
from penstock.clients.channel import open_channel
from penstock.clients.health import LIVENESS, is_serving
from penstock.clients.ray.grpc_forwarding import CallContext, Response, forward_call, forward_stream
from penstock.clients.ray.http_forwarding import ForwardedResponse, open_session
from penstock.clients.ray.serve_process import ServeProcess
from penstock.v1.classification_pb2_grpc import ClassificationServiceStub
from penstock.v1.embedding_pb2_grpc import EmbeddingServiceStub
from penstock.v1.generation_pb2_grpc import GenerationServiceStub
from penstock.v1.model_pb2_grpc import ModelServiceStub
from penstock.v1.tokenizer_pb2_grpc import TokenizerServiceStub

HEALTH_TIMEOUT_S = 10.0
"""How long the child may take to respond to a health check."""
FLUSH_S = 0.5
"""The time between the end of the child and that of the replica. In it, requests that were running end with a status
after which clients may retry; without it, Serve would report INTERNAL."""

_log = logging.getLogger(__name__)


def _unary(
    stub: type[Any], rpc: str, response: type[Response]
) -> Callable[["ServeReplica", Message, CallContext], Awaitable[Response]]:
    """Returns the method of a replica that passes a unary call on to the child."""

    async def forward(self: "ServeReplica", request: Message, grpc_context: CallContext) -> Response:
        return await forward_call(getattr(stub(self._channel), rpc), request, grpc_context, response())

    forward.__name__ = rpc
    return forward


class ServeReplica:
    """The class that Ray Serve deploys. The methods of penstock.v1 have the names of their RPCs."""

    _process: ServeProcess | None = None
    _is_stopping = False

    # Serve awaits it: the replica can be stopped while its child loads a model.
    async def __init__(self, arguments: Sequence[str], stop_timeout_s: float) -> None:  # type: ignore[misc]
        """Starts the child, and returns when it serves. ``arguments`` are flags of ``penstock serve``. The child has
        ``stop_timeout_s`` to end. Raises ServeFailed."""
        self._stop_timeout_s = stop_timeout_s
        self._process = ServeProcess(arguments)
        addresses = await self._process.addresses()
        self._gateway, self._session = addresses.http, open_session()
        self._channel = open_channel(addresses.target, None)
        self._supervisor = asyncio.create_task(self._end_with_child(self._process))

    def __del__(self) -> None:
        """Ends the child. Serve calls this when it stops the replica, after the last request."""
        self._is_stopping = True
        if self._process is not None:
            self._process.stop(self._stop_timeout_s)

    async def check_health(self) -> None:
        """Queries the child's liveness. While the child replaces its worker, it is not ready, but it is alive, and its
        streams continue afterwards. Raises an exception if the child does not respond."""
        if not await is_serving(self._channel, timeout=HEALTH_TIMEOUT_S, service=LIVENESS):
            raise RuntimeError("penstock serve is not alive")

    async def __call__(self, request: Request) -> HttpResponse:
        """Serves OpenAI's API over HTTP."""
        return ForwardedResponse(self._session, self._gateway, request)

    async def GenerateOne(self, request: pb.GenerateOneRequest, grpc_context: CallContext) -> AsyncIterator[Message]:
        return forward_stream(GenerationServiceStub(self._channel).GenerateOne, request, grpc_context)

    async def Generate(
        self, requests: AsyncIterator[pb.GenerateRequest], grpc_context: CallContext
    ) -> AsyncIterator[Message]:
        return forward_stream(GenerationServiceStub(self._channel).Generate, requests, grpc_context)

    async def Embed(self, request: pb.EmbedRequest, grpc_context: CallContext) -> AsyncIterator[Message]:
        return forward_stream(EmbeddingServiceStub(self._channel).Embed, request, grpc_context)

    Complete = _unary(GenerationServiceStub, "Complete", pb.CompleteResponse)
    Prefetch = _unary(GenerationServiceStub, "Prefetch", pb.PrefetchResponse)
    Release = _unary(GenerationServiceStub, "Release", pb.ReleaseResponse)
    Classify = _unary(ClassificationServiceStub, "Classify", pb.ClassifyResponse)
    Score = _unary(ClassificationServiceStub, "Score", pb.ScoreResponse)
    GetModel = _unary(ModelServiceStub, "GetModel", pb.GetModelResponse)
    ListModels = _unary(ModelServiceStub, "ListModels", pb.ListModelsResponse)
    Tokenize = _unary(TokenizerServiceStub, "Tokenize", pb.TokenizeResponse)
    Detokenize = _unary(TokenizerServiceStub, "Detokenize", pb.DetokenizeResponse)
    RenderChat = _unary(TokenizerServiceStub, "RenderChat", pb.RenderChatResponse)
    DescribeTokens = _unary(TokenizerServiceStub, "DescribeTokens", pb.DescribeTokensResponse)
    # The readiness of the replica that Serve chose, for clients that wait until a service is ready.
    Check = _unary(health_pb2_grpc.HealthStub, "Check", health_pb2.HealthCheckResponse)

    async def _end_with_child(self, process: ServeProcess) -> None:
        """Ends the replica's process soon after its child, unless Serve stops the replica. A replica without a child
        refuses requests faster than others serve them, so Serve would send it most of them until it fails enough
        health checks. A process that has ended gets none."""
        ending = await process.wait()
        if self._is_stopping:
            return
        _log.error("penstock serve ended with %s; this replica ends too, and Ray Serve starts another", ending)
        await asyncio.sleep(FLUSH_S)
        os._exit(1)
