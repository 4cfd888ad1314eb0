"""Converts a ``ClassifyRequest`` to a request for the scheduler, and the resulting logits to the response. Knows
neither calls nor the engine.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence

import penstock.v1 as pb
from penstock.models.checkpoint.classification_head import ClassificationHead
from penstock.scheduler.plan import Pooling
from penstock.scheduler.request import Event, Request
from penstock.service.errors import Reason, ServiceError
from penstock.service.requests.pooled.inputs import Encoded, PooledInputs, check_num_values
from penstock.service.requests.preparation import Origin


class ClassifyRequestBuilder:
    """Builds requests to classify texts with one served model."""

    operation = "classification"

    def __init__(self, inputs: PooledInputs, head: ClassificationHead | None) -> None:
        """``head`` is the model's; None: it has none, and every request is refused."""
        self._inputs = inputs
        self._head = head

    def check(self, request: pb.ClassifyRequest) -> None:
        """Makes all checks that are possible before the inputs are tokenized. Raises ServiceError."""
        self._inputs.validator.check(request)
        existing(self._head)
        self._inputs.check(request.inputs, truncates=self._inputs.truncation(request) is not None)
        check_num_values(len(request.inputs), len(existing(self._head).labels), "inputs x labels")

    def work(self, request: pb.ClassifyRequest) -> int:
        """Returns the work of ``response`` for each input, in values."""
        return existing(self._head).weight.size

    def kept(self, request: pb.ClassifyRequest, vector: bytes) -> bytes:
        """Returns the part of a hidden state that ``response`` needs."""
        return existing(self._head).reduced(vector)

    async def prepare(self, request: pb.ClassifyRequest, origin: Origin, sink: Callable[[Event], None]) -> Request:
        """Returns the scheduler's request. ``request`` has passed ``check``. Raises ServiceError."""
        inputs, head = self._inputs, existing(self._head)

        def make() -> Request:
            encoded = inputs.encode(request.inputs, inputs.truncation(request))
            return inputs.make(without_padding(encoded, head), request, origin, sink, Pooling.LAST)

        return await inputs.pool.run(make, request.ByteSize(), origin.tenant)

    def response(
        self, request: pb.ClassifyRequest, request_id: str, usage: pb.Usage, vectors: Sequence[bytes]
    ) -> pb.ClassifyResponse:
        """Returns the response for what ``kept`` returned."""
        head = existing(self._head)
        use_activation = request.use_activation if request.HasField("use_activation") else True
        response = pb.ClassifyResponse(request_id=request_id, usage=usage, labels=head.labels)
        for reduced in vectors:
            response.classifications.add().values.extend(array("f", head.values(reduced, use_activation)))
        return response


def existing(head: ClassificationHead | None) -> ClassificationHead:
    """Returns the model's head. Raises ServiceError if it has none."""
    if head is None:
        raise ServiceError(Reason.NO_CLASSIFIER)
    return head


def without_padding(encoded: Iterator[Encoded], head: ClassificationHead) -> Iterator[Encoded]:
    """Yields inputs up to the token whose state counts. Later ones cannot change it."""
    return ((head.last_counted(token_ids), limit) for token_ids, limit in encoded)
