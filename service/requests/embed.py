"""Converts an ``EmbedRequest`` to a request for the scheduler, and the resulting vectors to the response. Knows neither
calls nor the engine.

``check`` is for the event loop; the work of ``prepare`` runs in the tokenizer's thread pool.
"""

import math
from array import array
from collections.abc import Callable, Sequence

from penstock.kv.block_hash import tenant_salt
from penstock.models.checkpoint.pooling_config import PoolingConfig
from penstock.scheduler.plan import SamplingParams
from penstock.scheduler.request import Event, Prompt, Request
from penstock.service.config.field_rules import Limit
from penstock.service.config.limits import Validator
from penstock.service.config.text_size import MAX_TEXT_BYTES, utf8_bytes
from penstock.service.errors import Reason, ServiceError, invalid
from penstock.service.requests.generate import Origin
from penstock.service.text.detokenizer import IdsOnly
from penstock.service.text.tokenizer import TokenizerPool
from penstock.service.text.truncation import Truncation
from penstock.v1 import embedding_pb2 as pb

MAX_VALUES = 900_000
"""The maximum number of values in a response, which keeps it below the 4 MiB default limit of gRPC's clients."""
MAX_TOKENS = 1 << 20
"""The maximum number of tokens in all inputs of a request."""


class EmbedRequestBuilder:
    """Builds embedding requests for one served model."""

    def __init__(
        self, validator: Validator, pool: TokenizerPool, model_name: str, embedding: PoolingConfig, hidden_size: int
    ) -> None:
        self._validator = validator
        self._pool = pool
        self._model_name = model_name
        self._embedding = embedding
        self._hidden_size = hidden_size

    def check(self, request: pb.EmbedRequest) -> None:
        """Makes all checks that are possible before the inputs are tokenized. Raises ServiceError."""
        self._validator.check(request)
        if request.dimensions > self._hidden_size:
            raise invalid(
                "dimensions", f"at most {self._hidden_size:,}, the model's embedding_size; it is {request.dimensions:,}"
            )
        num_bytes = 0
        truncates = self._truncation(request) is not None
        for index, item in enumerate(request.inputs):
            kind = item.WhichOneof("input")
            if kind is None:
                raise invalid(f"inputs[{index}].input", "is required; set text or token_ids")
            if kind == "text":
                num_bytes += utf8_bytes(item.text)
                if not truncates:
                    self._pool.check_text(item.text, f"inputs[{index}].text", room_for_output=0)
            elif not truncates:
                self._validator.check_num_ids(item.token_ids.ids, f"inputs[{index}].token_ids.ids", Limit.CONTEXT)
        if num_bytes > MAX_TEXT_BYTES:
            raise invalid("inputs", f"at most {MAX_TEXT_BYTES:,} bytes of text in total; they have {num_bytes:,}")
        num_values = len(request.inputs) * self.dimensions(request)
        if num_values > MAX_VALUES:
            raise _too_expensive("inputs x dimensions", num_values, MAX_VALUES)

    def dimensions(self, request: pb.EmbedRequest) -> int:
        """Returns the number of values in each vector of the response."""
        return request.dimensions or self._hidden_size

    def vector_bytes(self, request: pb.EmbedRequest) -> int:
        """Returns the number of each vector's bytes that ``fill`` needs."""
        return array("f").itemsize * self.dimensions(request)

    async def prepare(self, request: pb.EmbedRequest, origin: Origin, sink: Callable[[Event], None]) -> Request:
        """Returns the scheduler's request. ``request`` has passed ``check``. Raises ServiceError."""
        return await self._pool.run(lambda: self._make(request, origin, sink), request.ByteSize(), origin.tenant)

    def _make(self, request: pb.EmbedRequest, origin: Origin, sink: Callable[[Event], None]) -> Request:
        salt = tenant_salt(self._model_name, origin.tenant)
        prompts: list[Prompt] = []
        num_tokens = 0
        truncation = self._truncation(request)
        for index, item in enumerate(request.inputs):
            prompts.append(self._prompt(item, f"inputs[{index}]", salt, truncation))
            num_tokens += len(prompts[-1].token_ids)
            if num_tokens > MAX_TOKENS:
                raise _too_expensive("the total number of tokens", num_tokens, MAX_TOKENS)
        first, *others = prompts
        return Request(
            request_id=origin.request_id,
            prompt_token_ids=first.token_ids,
            block_hashes=first.block_hashes,
            sampling=SamplingParams(),
            max_tokens=0,
            sink=sink,
            make_text=IdsOnly,
            n=len(prompts),
            tenant=origin.tenant,
            priority=request.priority,
            deadline=origin.deadline,
            client_request_id=request.client_request_id,
            arrival=origin.arrival,
            hash_salt=salt,
            pooling=self._embedding.pooling,
            more_prompts=others,
        )

    def _truncation(self, request: pb.EmbedRequest) -> Truncation | None:
        return Truncation.of(request, self._validator.limits.max_model_len, keeps_first=True)

    def _prompt(self, item: pb.EmbedInput, field: str, salt: bytes, truncation: Truncation | None) -> Prompt:
        if item.WhichOneof("input") == "text":
            limit = self._pool.limit(f"{field}.text", room_for_output=0)
            token_ids = self._pool.tokenizer.encode(item.text, True, truncation, limit)
        else:
            limit = self._pool.limit(f"{field}.token_ids.ids", room_for_output=0)
            token_ids = list(item.token_ids.ids)
            self._validator.check_ids(token_ids, limit.field)
            token_ids = token_ids if truncation is None else truncation.cut(token_ids)
        return self._pool.prompt(token_ids, salt, limit)

    def fill(self, response: pb.EmbedResponse, vectors: Sequence[bytes], request: pb.EmbedRequest) -> None:
        """Adds the vectors, cut to ``vector_bytes``, to the response, normalized if the request or the model requires
        it. Takes about 0.1 us per value."""
        normalize = request.normalize if request.HasField("normalize") else self._embedding.normalize
        for vector in vectors:
            values: Sequence[float] = array("f", vector)
            length = math.hypot(*values) if normalize else 0.0
            response.embeddings.add().values.extend([value / length for value in values] if length else values)


def _too_expensive(what: str, value: int, limit: int) -> ServiceError:
    return ServiceError(
        Reason.TOO_EXPENSIVE,
        f"inputs: {what} must be at most {limit:,}; it is {value:,} or more; send the inputs in several requests",
        field="inputs",
    )
