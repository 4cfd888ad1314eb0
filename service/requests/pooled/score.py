"""Converts a ``ScoreRequest`` to a request for the scheduler, and the resulting logits to the response. Knows neither
calls nor the engine.
"""

from collections.abc import Callable, Iterator, Sequence

import penstock.v1 as pb
from penstock.models.checkpoint.classification_head import ClassificationHead
from penstock.scheduler.plan import Pooling
from penstock.scheduler.request import Event, Request
from penstock.service.config.text_size import MAX_TEXT_BYTES, utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.requests.pooled.classify import existing, without_padding
from penstock.service.requests.pooled.inputs import Encoded, PooledInputs, too_expensive
from penstock.service.requests.preparation import Origin
from penstock.service.text.text_pairs import TextPairs

MAX_PAIR_BYTES = 4 * MAX_TEXT_BYTES
"""The maximum size of all pairs of a request together. A query counts once for each of its documents."""


class ScoreRequestBuilder:
    """Builds requests to score documents for queries with one served model."""

    operation = "score"

    def __init__(self, inputs: PooledInputs, head: ClassificationHead | None) -> None:
        """``head`` is the model's; None: it has none, and every request is refused."""
        self._inputs = inputs
        self._head = head
        self._pairs = TextPairs(inputs.pool.tokenizer)

    def check(self, request: pb.ScoreRequest) -> None:
        """Makes all checks that are possible before the texts are tokenized. Raises ServiceError."""
        self._inputs.validator.check(request)
        num_labels = len(existing(self._head).labels)
        if num_labels != 1:
            raise ServiceError(
                Reason.SEVERAL_LABELS,
                f"the model's classification head has {num_labels:,} labels, and a score needs a head with one; send "
                "the texts to be classified, or serve a reranker",
            )
        num_queries, num_documents = len(request.queries), len(request.documents)
        if num_queries not in (1, num_documents):
            raise invalid("queries", f"must be one, or one for each of the {num_documents:,} documents; they are "
                          f"{num_queries:,}")  # fmt: skip
        if request.HasField("instruction") and not self._pairs.has_template:
            raise invalid(
                "instruction", "the model has no chat template with the roles query and document; leave it out"
            )
        truncates = self._inputs.truncation(request) is not None
        for name, texts in (("queries", request.queries), ("documents", request.documents)):
            for index, text in enumerate(() if truncates else texts):
                self._inputs.pool.check_text(text, f"{name}[{index}]", room_for_output=0)
        num_bytes = self._num_bytes(request)
        if num_bytes > MAX_PAIR_BYTES:
            raise too_expensive("documents", "the bytes of all pairs, with the query of each,", num_bytes,
                                MAX_PAIR_BYTES)  # fmt: skip

    def work(self, request: pb.ScoreRequest) -> int:
        """Returns the work of ``response`` for each pair, in values."""
        return existing(self._head).weight.size

    def kept(self, request: pb.ScoreRequest, vector: bytes) -> bytes:
        """Returns the part of a hidden state that ``response`` needs."""
        return existing(self._head).reduced(vector)

    async def prepare(self, request: pb.ScoreRequest, origin: Origin, sink: Callable[[Event], None]) -> Request:
        """Returns the scheduler's request. ``request`` has passed ``check``. Raises ServiceError."""
        inputs, head = self._inputs, existing(self._head)

        def make() -> Request:
            encoded = without_padding(self._encode(request), head)
            return inputs.make(encoded, request, origin, sink, Pooling.LAST, "documents")

        return await inputs.pool.run(make, self._num_bytes(request), origin.tenant)

    def _num_bytes(self, request: pb.ScoreRequest) -> int:
        of_queries = sum(map(utf8_bytes, request.queries)) + len(request.queries) * utf8_bytes(request.instruction)
        repeated = len(request.documents) if len(request.queries) == 1 else 1
        return repeated * of_queries + sum(map(utf8_bytes, request.documents))

    def _encode(self, request: pb.ScoreRequest) -> Iterator[Encoded]:
        truncation = self._inputs.truncation(request)
        instruction = request.instruction if request.HasField("instruction") else None
        for index, document in enumerate(request.documents):
            query = request.queries[index if len(request.queries) > 1 else 0]
            limit = self._inputs.pool.limit(f"documents[{index}]", room_for_output=0)
            yield self._pairs.encode(query, document, instruction, truncation, limit), limit

    def response(
        self, request: pb.ScoreRequest, request_id: str, usage: pb.Usage, vectors: Sequence[bytes]
    ) -> pb.ScoreResponse:
        """Returns the response for what ``kept`` returned."""
        head = existing(self._head)
        use_activation = request.use_activation if request.HasField("use_activation") else True
        scores = [score for reduced in vectors for score in head.values(reduced, use_activation)]
        return pb.ScoreResponse(request_id=request_id, usage=usage, scores=scores)
