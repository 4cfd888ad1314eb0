"""Embed: the vector of one tokenized input, computed by the code of penstock.v1's EmbeddingService."""

from collections.abc import Sequence

from smg_grpc_proto.generated import vllm_engine_pb2 as vllm

import penstock.v1 as pb


def embed_request(request: vllm.EmbedRequest) -> pb.EmbedRequest:
    """Translates the request."""
    own = pb.EmbedRequest(client_request_id=request.request_id)
    own.inputs.add().token_ids.ids.extend(request.tokenized.input_ids)
    return own


def embed_response(values: Sequence[float], usage: pb.Usage) -> vllm.EmbedResponse:
    """Returns the response with a vector."""
    return vllm.EmbedResponse(embedding=values, prompt_tokens=usage.prompt_tokens, embedding_dim=len(values))
