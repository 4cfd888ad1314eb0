"""Embed: the vector of one tokenized input, computed by the code of penstock.v1's EmbeddingService."""

from collections.abc import Callable, Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

import penstock.v1 as pb
from penstock.scheduler.request import Event, Request
from penstock.service.requests.pooled.embed import EmbedRequestBuilder
from penstock.service.requests.preparation import Origin


def embed_request(request: vllm.EmbedRequest) -> pb.EmbedRequest:
    """Translates the request."""
    own = pb.EmbedRequest(client_request_id=request.request_id)
    own.inputs.add().token_ids.ids.extend(request.tokenized.input_ids)
    return own


class SingleEmbedBuilder:
    """Builds requests with one input, and the response to one."""

    operation = EmbedRequestBuilder.operation

    def __init__(self, builder: EmbedRequestBuilder) -> None:
        self._builder = builder

    def check(self, request: pb.EmbedRequest) -> None:
        self._builder.check(request)

    def work(self, request: pb.EmbedRequest) -> int:
        return self._builder.work(request)

    def kept(self, request: pb.EmbedRequest, vector: bytes) -> bytes:
        return self._builder.kept(request, vector)

    async def prepare(self, request: pb.EmbedRequest, origin: Origin, sink: Callable[[Event], None]) -> Request:
        return await self._builder.prepare(request, origin, sink)

    def response(
        self, request: pb.EmbedRequest, request_id: str, usage: pb.Usage, vectors: Sequence[bytes]
    ) -> vllm.EmbedResponse:
        """Returns the only vector."""
        [embedding] = self._builder.message(request, request_id, 0, vectors, usage).embeddings
        return vllm.EmbedResponse(
            embedding=embedding.values, prompt_tokens=usage.prompt_tokens, embedding_dim=len(embedding.values)
        )
