"""EmbeddingService: the vectors of texts."""

from typing import Any

import grpc

import penstock.v1 as pb
from penstock.service.requests.embed import EmbedRequestBuilder
from penstock.service.rpc.pooled_calls import PooledCalls
from penstock.v1 import embedding_pb2_grpc as pb_grpc


class EmbeddingService(pb_grpc.EmbeddingServiceServicer):
    """The servicer."""

    def __init__(self, calls: PooledCalls, request_builder: EmbedRequestBuilder) -> None:
        self._calls = calls
        self._request_builder = request_builder

    async def Embed(self, request: pb.EmbedRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.EmbedResponse:
        return await self._calls.serve(self._request_builder, request, context)
