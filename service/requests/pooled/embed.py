"""Converts an ``EmbedRequest`` to a request for the scheduler, and the resulting vectors to the response. Knows neither
calls nor the engine.

``check`` is for the event loop; the work of ``prepare`` runs in the tokenizer's thread pool.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import penstock.v1 as pb
from penstock.models.checkpoint.pooling_config import PoolingConfig
from penstock.scheduler.request import Event, Request
from penstock.service.errors import invalid
from penstock.service.requests.pooled.inputs import PooledInputs
from penstock.service.requests.preparation import Origin

ResponseT = TypeVar("ResponseT")

MAX_MESSAGE_BYTES = 1 << 20
"""Limit on a message with more than one vector."""
_HEAD_BYTES = 256
"""More than a message has besides its vectors."""
_VECTOR_BYTES = 16
"""More than a vector has besides its values."""


class EmbedRequestBuilder:
    """Builds embedding requests for one served model."""

    operation = "embeddings"

    def __init__(self, inputs: PooledInputs, embedding: PoolingConfig, hidden_size: int) -> None:
        self._inputs = inputs
        self._embedding = embedding
        self._hidden_size = hidden_size

    def check(self, request: pb.EmbedRequest) -> None:
        """Makes all checks that are possible before the inputs are tokenized. Raises ServiceError."""
        self._inputs.validator.check(request)
        if request.dimensions > self._hidden_size:
            raise invalid(
                "dimensions", f"at most {self._hidden_size:,}, the model's embedding_size; it is {request.dimensions:,}"
            )
        self._inputs.check(request.inputs, truncates=self._inputs.truncation(request) is not None)

    def work(self, request: pb.EmbedRequest) -> int:
        """Returns the number of values in each vector of the response."""
        return request.dimensions or self._hidden_size

    def kept(self, request: pb.EmbedRequest, vector: bytes) -> bytes:
        """Returns the part of a vector that ``response`` needs."""
        return vector[: array("f").itemsize * self.work(request)]

    async def prepare(self, request: pb.EmbedRequest, origin: Origin, sink: Callable[[Event], None]) -> Request:
        """Returns the scheduler's request. ``request`` has passed ``check``. Raises ServiceError."""
        inputs = self._inputs

        def make() -> Request:
            encoded = inputs.encode(request.inputs, inputs.truncation(request))
            return inputs.make(encoded, request, origin, sink, self._embedding.pooling)

        return await inputs.pool.run(make, request.ByteSize(), origin.tenant)

    def num_in_message(self, request: pb.EmbedRequest) -> int:
        """Returns how many vectors a message holds, at least 1."""
        return max(1, (MAX_MESSAGE_BYTES - _HEAD_BYTES) // (array("f").itemsize * self.work(request) + _VECTOR_BYTES))

    def message(
        self, request: pb.EmbedRequest, request_id: str, first: int, vectors: Sequence[bytes], usage: pb.Usage | None
    ) -> pb.EmbedResponse:
        """Returns the message with vectors, parts of them as ``kept`` returned them, from the one with the index
        ``first``, normalized if the request or the model requires it. Only the first message has the request's id, and
        only the last one has ``usage``. Takes about 0.1 us per value."""
        response = pb.EmbedResponse(request_id="" if first else request_id, first_index=first, usage=usage)
        normalize = request.normalize if request.HasField("normalize") else self._embedding.normalize
        for vector in vectors:
            values: Sequence[float] = array("f", vector)
            length = math.hypot(*values) if normalize else 0.0
            response.embeddings.add().values.extend([value / length for value in values] if length else values)
        return response


class SingleEmbedBuilder(Generic[ResponseT]):
    """Builds requests with one input, and the whole response to one, in another contract's message."""

    operation = EmbedRequestBuilder.operation

    def __init__(self, builder: EmbedRequestBuilder, respond: Callable[[Sequence[float], pb.Usage], ResponseT]) -> None:
        """``respond`` builds the message with the values of the vector."""
        self._builder = builder
        self._respond = respond

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
    ) -> ResponseT:
        """Returns the message with the only vector."""
        [embedding] = self._builder.message(request, request_id, 0, vectors, usage).embeddings
        return self._respond(embedding.values, usage)
