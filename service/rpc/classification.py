"""ClassificationService: the classes of texts, and the scores of documents for a query."""

from typing import Any

import grpc

import penstock.v1 as pb
from penstock.models.checkpoint.classification_head import ClassificationHead
from penstock.service.requests.pooled.classify import ClassifyRequestBuilder
from penstock.service.requests.pooled.inputs import PooledInputs
from penstock.service.requests.pooled.score import ScoreRequestBuilder
from penstock.service.rpc.pooled_calls import PooledCalls
from penstock.v1 import classification_pb2_grpc as pb_grpc


class ClassificationService(pb_grpc.ClassificationServiceServicer):
    """The servicer."""

    def __init__(self, calls: PooledCalls, inputs: PooledInputs, head: ClassificationHead | None) -> None:
        """``head`` is the model's; None: it has none, and every call is refused."""
        self._calls = calls
        self._classify = ClassifyRequestBuilder(inputs, head)
        self._score = ScoreRequestBuilder(inputs, head)

    async def Classify(
        self, request: pb.ClassifyRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pb.ClassifyResponse:
        return await self._calls.serve(self._classify, request, context)

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]) -> pb.ScoreResponse:
        return await self._calls.serve(self._score, request, context)
