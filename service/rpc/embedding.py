"""EmbeddingService: the vectors of texts."""

from typing import Any

import grpc

import penstock.v1 as pb
from penstock.service.requests.pooled.embed import EmbedRequestBuilder
from penstock.service.rpc.pooled_calls import PooledCalls
from penstock.v1 import embedding_pb2_grpc as pb_grpc


class EmbeddingService(pb_grpc.EmbeddingServiceServicer):
    """The servicer."""

    def __init__(self, calls: PooledCalls, request_builder: EmbedRequestBuilder) -> None:
        self._calls = calls
        self._request_builder = request_builder

    # The generated base class knows only handlers that yield; gRPC also accepts handlers that write.
    async def Embed(  # type: ignore[override]
        self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> None:
        await self._calls.stream(self._request_builder, request, context)
